"""Cached blocks on disk, through a real server: they come back after a kill and a restart, to the server they belong to."""

from __future__ import annotations

import concurrent.futures
import time
from pathlib import Path
from typing import Any

from support.live import Live, live

TEXT = "/v1/completions"
PROMPT = [500 + 13 * index for index in range(240)]


def serve(folder: Path, *more: str) -> Any:
    return live(
        "serve", "--max-model-len", "1024", "--kv-cache-memory", "26M", "--kv-offloading-size", "0.2", "--kv-offloading-folder",
        str(folder), "--swap-space", "0.05", *more,
    )  # fmt: skip


def ask(server: Live, prompt: list[int], max_tokens: int = 8) -> tuple[Any, int]:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": 1, "ignore_eos": True}
    answer = server.post(TEXT, body).json()
    return answer["choices"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def others(server: Live, count: int) -> None:
    """Prompts that take all blocks."""
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda number: ask(server, [3 + number + 7 * i for i in range(700)], 2), range(count)))


def test_kill_while_files_are_written(smollm2: Path, tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        cold, cached = ask(server, PROMPT)
        assert cached == 0
        others(server, 2)
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            busy = threads.submit(others, server, 40)
            time.sleep(1.0)
            server.process.kill()
            server.process.wait()
            assert busy.exception() is not None
    assert list(tmp_path.glob("*.kv"))
    # Some are damaged besides.
    for number, path in enumerate(sorted(tmp_path.glob("*.kv"))):
        if number % 10 == 0:
            data = bytearray(path.read_bytes())
            data[number % len(data)] ^= 1
            path.write_bytes(data)
    with serve(tmp_path) as server:
        warm, cached = ask(server, PROMPT)
        assert warm == cold
        others(server, 2)
        again, _ = ask(server, PROMPT)
        assert again == cold
        metrics = server.get("/metrics").body.decode()
        assert "octavo:kv_files_total" in metrics
        assert server.get("/ready").status == 200


def test_a_restart_keeps_what_was_cached(smollm2: Path, tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        cold, _ = ask(server, PROMPT)
        server.process.terminate()
        assert server.process.wait(20) == 0
    with serve(tmp_path) as server:
        warm, cached = ask(server, PROMPT)
        assert (warm, cached) == (cold, 224)
