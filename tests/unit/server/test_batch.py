"""Batch files: what a line means, what a killed run leaves, what is refused before anything runs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import InvalidRequestError
from octavo.runner.scripted import RowFailure
from octavo.server.batch import check_input, open_output, read_lines, run_batch
from support.asgi import application
from support.scripted import EOS, spell

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def line(name: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    if url == CHAT:
        body = {"messages": [{"role": "user", "content": name}], "max_tokens": 8, **body}
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def write(path: Path, lines: list[Any]) -> Path:
    path.write_bytes(b"".join(one if isinstance(one, bytes) else json.dumps(one).encode() + b"\n" for one in lines))
    return path


def batch(source: Path, target: Path, script: Any = None, **options: Any) -> tuple[int, dict[str, Any]]:
    """Runs what is left of a batch. Returns the number of failures, and all answers by their id."""

    async def main() -> int:
        async with application([*spell("abc"), EOS] if script is None else script, **options) as (app, _):
            output, done = open_output(target)
            with output:
                lines = (one for one in read_lines(source) if one.custom_id not in done)
                return await run_batch(app, lines, output, concurrency=4, advance=lambda: None)

    failures = asyncio.run(main())
    answers = [json.loads(text) for text in target.read_text().splitlines()]
    by_id = {answer["custom_id"]: answer["response"] for answer in answers}
    assert len(by_id) == len(answers)
    return failures, by_id


def test_each_line_means_what_the_request_would(tmp_path: Path) -> None:
    lines = [
        line("chat"),
        line("text", TEXT, prompt="x", max_tokens=2, n=2, temperature=1),
        line("response", "/v1/responses", input="x"),
        line("message", "/v1/messages", messages=[{"role": "user", "content": "x"}], max_tokens=8),
        line("wrong", temperature=9),
        line("unknown", model="other"),
        line("stream", stream=True),
    ]
    failures, answers = batch(write(tmp_path / "in", lines), tmp_path / "out")
    assert failures == 3
    assert {name: answer["status_code"] for name, answer in answers.items()} == {
        "chat": 200, "text": 200, "response": 200, "message": 200, "wrong": 400, "unknown": 404, "stream": 400,
    }  # fmt: skip
    assert answers["chat"]["body"]["choices"][0]["message"]["content"] == "abc"
    assert [choice["text"] for choice in answers["text"]["body"]["choices"]] == ["ab", "ab"]
    assert answers["wrong"]["body"]["error"]["param"] == "temperature"


def test_what_is_answered_is_not_done_again(tmp_path: Path) -> None:
    source, target = write(tmp_path / "in", [line(f"r{number}") for number in range(20)]), tmp_path / "out"
    asked: list[str] = []

    def script(start: Any) -> list[int]:
        asked.append(bytes(start.token_ids[: start.num_prompt_tokens]).decode())
        return [*spell("abc"), EOS]

    batch(source, target, script)
    assert len(asked) == 20
    # A killed run leaves its last line unfinished.
    kept = target.read_bytes().splitlines(keepends=True)[:7]
    target.write_bytes(b"".join(kept) + b'{"id": "batch_req_1", "custom_')
    asked.clear()
    failures, answers = batch(source, target, script)
    assert (failures, len(asked), len(answers)) == (0, 13, 20)
    assert target.read_bytes().startswith(b"".join(kept))


def test_a_full_queue_is_waited_for(tmp_path: Path) -> None:
    lines = [line(f"r{number}", n=2, temperature=1) for number in range(12)]
    failures, answers = batch(write(tmp_path / "in", lines), tmp_path / "out", max_num_queued_reqs=3)
    assert (failures, len(answers)) == (0, 12)


def test_an_error_of_the_engine_is_an_answer(tmp_path: Path) -> None:
    failures, answers = batch(write(tmp_path / "in", [line("a"), line("b")]), tmp_path / "out", [RowFailure("broken")])
    assert failures == 2
    assert answers["a"]["status_code"] == 500


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ([b"{\n"], "line 1"),
        ([line("a"), b"\n", b"[]\n"], "line 3"),
        ([{"custom_id": "a"}], "line 1"),
        ([{**line("a"), "custom_id": 7}], "line 1"),
        ([line("a", "/v1/embeddings")], "/v1/embeddings"),
        ([{**line("a"), "method": "GET"}], "GET"),
        ([line("a"), line("a")], "twice"),
    ],
)
def test_a_wrong_file_is_refused_as_a_whole(lines: list[Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        check_input(write(tmp_path / "in", lines))


def test_a_foreign_output_file_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "out"
    for content in (b"my notes\n", b"[1]\n", b'{"a": 1}\n'):
        target.write_bytes(content)
        with pytest.raises(InvalidRequestError, match="no answer of a batch"):
            open_output(target)
        assert target.read_bytes() == content
