"""`octavo batch`: killed and started again, it answers every request once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

MODEL = Path(__file__).parents[1] / "golden" / "tiny-llama"


def start(source: Path, target: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "octavo", "batch", str(MODEL), "-i", str(source), "-o", str(target)]
    command += ["--kv-cache-memory", "16M", "--max-num-seqs", "4", "--backend", "numpy"]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ)


def test_a_killed_batch_goes_on(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": [1, 2, 3], "max_tokens": 20, "ignore_eos": True, "temperature": 0}
    lines = [
        {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": {**body, "seed": number}}
        for number in range(60)
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    first = start(source, target)
    deadline = time.monotonic() + 60
    while not (target.exists() and target.read_bytes().count(b"\n") >= 5):
        assert first.poll() is None, first.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    killed = target.read_bytes()
    assert 5 <= killed.count(b"\n") < 60
    second = start(source, target)
    _, told = second.communicate(timeout=60)
    assert second.returncode == 0, told
    assert "60 requests are answered" in told
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert sorted(answer["custom_id"] for answer in answers) == sorted(line["custom_id"] for line in lines)
    assert target.read_bytes().startswith(killed[: killed.rindex(b"\n") + 1])
    assert {answer["response"]["status_code"] for answer in answers} == {200}
    assert len({answer["response"]["body"]["choices"][0]["text"] for answer in answers}) == 1
    third = start(source, target)
    _, told = third.communicate(timeout=60)
    assert (third.returncode, "60 requests are answered" in told) == (0, True)
