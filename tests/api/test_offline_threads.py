"""`LLM` used from several threads, closed while it runs, and called with things that are no prompts."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import EngineDeadError, InvalidRequestError

TINY = Path(__file__).parents[1] / "golden" / "tiny-llama"


def tiny() -> LLM:
    return LLM(str(TINY), backend="numpy", kv_cache_memory="8M")


def test_threads_take_turns() -> None:
    params = [SamplingParams(temperature=0, max_tokens=1 + count % 3) for count in range(8)]
    with tiny() as llm:
        alone = [llm.generate([[5 + i, 7]], params[i], use_tqdm=False)[0].outputs[0].token_ids for i in range(8)]
        answers: dict[int, list[list[int]]] = {i: [] for i in range(8)}

        def work(i: int) -> None:
            for _ in range(15):
                answers[i].append(llm.generate([[5 + i, 7]], params[i], use_tqdm=False)[0].outputs[0].token_ids)

        threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(8)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 40
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        assert not any(thread.is_alive() for thread in threads)
    assert answers == {i: [alone[i]] * 15 for i in range(8)}


def test_closing_ends_a_running_call() -> None:
    llm = tiny()
    outcome: list[BaseException] = []

    def work() -> None:
        try:
            llm.generate(["x"] * 64, SamplingParams(max_tokens=200, ignore_eos=True), use_tqdm=False)
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    time.sleep(0.3)
    llm.close()
    thread.join(10)
    assert not thread.is_alive()
    assert [type(error) for error in outcome] == [EngineDeadError]
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("x", use_tqdm=False)


def test_what_is_no_conversation_or_salt_is_refused_by_name() -> None:
    with tiny() as llm:
        wrong: tuple[Any, ...] = (None, {"role": "user", "content": "x"}, "hi", 5)
        for messages in wrong:
            with pytest.raises(InvalidRequestError, match="messages must be"):
                llm.chat(messages, use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="cache_salt must be"):
            llm.generate({"prompt": "x", "cache_salt": 5}, use_tqdm=False)
