"""AsyncEngine over the scripted executor: streams, cancel, slow readers, overload, errors, drain, death (O-15, O-25,
O-35, O-41, O-44).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence

import pytest

from octavo.config import BackendConfig, Config
from octavo.contracts import FinishReason, SlotStart
from octavo.errors import ConfigError, EngineDeadError, EngineError, NotReadyError, OverloadedError
from octavo.frontend.engine import AsyncEngine, EngineState
from octavo.frontend.outputs import Delta
from octavo.frontend.params import SamplingParams
from octavo.frontend.stream import merge
from octavo.obs.events import EngineStateChanged, Event, EventLog, StepCompleted
from octavo.runner.scripted import RowFailure
from support.scripted import EOS, model_of, running, spell, until

LONG = SamplingParams(max_tokens=2000, ignore_eos=True)


def prompt_echo(start: SlotStart) -> Sequence[int]:
    """Every request says its own prompt, and its choice's number."""
    return [*start.token_ids[: start.num_prompt_tokens], ord("0") + start.sampling.choice, EOS]


class Recorder(EventLog):
    """An event log that keeps what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Event] = []
        self.add_sink(self.seen.append)

    @property
    def last_stats(self) -> StepCompleted:
        return [event for event in self.seen if isinstance(event, StepCompleted)][-1]

    @property
    def states(self) -> list[str]:
        return [event.state for event in self.seen if isinstance(event, EngineStateChanged)]


async def answer(engine: AsyncEngine, prompt: str, params: SamplingParams) -> list[Delta]:
    async with engine.submit(engine.builder.build(prompt, params)) as handle:
        return await handle.collect()


def test_each_request_gets_its_own_answer() -> None:
    async def main() -> None:
        events = Recorder()
        async with running(prompt_echo, events=events) as engine:
            params = SamplingParams(n=3, max_tokens=50)
            answers = await asyncio.gather(*(answer(engine, f"prompt {i}", params) for i in range(40)))
            for i, choices in enumerate(answers):
                assert [choice.text for choice in choices] == [f"prompt {i}{choice}" for choice in range(3)]
                assert all(choice.finish_reason is FinishReason.STOP for choice in choices)
            assert engine.num_unfinished == 0
            await until(lambda: events.last_stats.stats.num_running == events.last_stats.stats.num_waiting == 0)
        assert events.states == ["loading", "ready", "dead"]
        finished = [
            times for event in events.seen if isinstance(event, StepCompleted) for times in event.stats.finished
        ]
        assert len(finished) == 120

    asyncio.run(main())


def test_a_stream_joined_is_the_whole_answer() -> None:
    async def main() -> None:
        text = "streamed " * 20
        async with running([*spell(text), EOS], itl_s=0.0005) as engine:
            params = SamplingParams(max_tokens=None, logprobs=1)
            async with engine.submit(engine.builder.build("x", params)) as handle:
                deltas = [delta async for delta in handle]
            assert len(deltas) > 5
            whole = merge(deltas)
            assert whole.text == text
            assert whole.logprobs is not None
            assert len(whole.logprobs) == len(whole.token_ids) == len(text) + 1
            assert whole.num_cached_tokens == 0
            assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)

    asyncio.run(main())


def test_prompt_logprobs_come_once_whatever_the_chunks() -> None:
    async def main() -> None:
        async with running([*spell("ab"), EOS], max_num_batched_tokens=7, max_num_seqs=2) as engine:
            prompt = "a prompt of many chunks"
            params = SamplingParams(prompt_logprobs=2, logprobs=0, n=2)
            async with engine.submit(engine.builder.build(prompt, params)) as handle:
                for choice in await handle.collect():
                    assert choice.prompt_logprobs is not None
                    assert choice.prompt_logprobs[0] is None
                    assert "".join(entry.token for entry in choice.prompt_logprobs[1:] if entry) == prompt[1:]
                    assert all(len(entry.top) == 2 for entry in choice.prompt_logprobs[1:] if entry)
                    assert [entry.top for entry in choice.logprobs or ()] == [(), (), ()]

    asyncio.run(main())


def test_o25_leaving_the_block_cancels() -> None:
    async def main() -> None:
        events = Recorder()
        async with running(spell("x" * 2000), itl_s=0.001, events=events) as engine:
            async with engine.submit(engine.builder.build("x", LONG)) as handle:
                async for delta in handle:
                    assert delta.text
                    break
            assert engine.num_unfinished == 0
            await until(lambda: events.last_stats.stats.num_running == 0)
            [times] = [t for event in events.seen if isinstance(event, StepCompleted) for t in event.stats.finished]
            assert times.finish_reason is FinishReason.ABORT
            assert events.last_stats.stats.kv_usage == 0.0

    asyncio.run(main())


def test_cancel_ends_the_iteration_once() -> None:
    async def main() -> None:
        async with running(spell("x" * 2000), itl_s=0.001) as engine:
            handle = engine.submit(engine.builder.build("x", SamplingParams(n=2, max_tokens=2000, ignore_eos=True)))
            await anext(handle)
            handle.cancel()
            handle.cancel()
            rest = [delta async for delta in handle]
            assert sorted(delta.index for delta in rest if delta.finish_reason is FinishReason.ABORT) == [0, 1]
            assert [delta async for delta in handle] == []

    asyncio.run(main())


def test_o25_a_slow_reader_costs_one_answer() -> None:
    async def main() -> None:
        async with running(spell("y" * 2000)) as engine:
            handle = engine.submit(engine.builder.build("x", LONG))
            await until(lambda: handle.finished)
            assert sum(len(deltas) for deltas in handle._pending.values()) < 64
            [delta] = [delta async for delta in handle]
            assert delta.text == "y" * 2000

    asyncio.run(main())


def test_overload_is_refused_and_counted_by_choices() -> None:
    async def main() -> None:
        async with running(spell("x" * 2000), itl_s=0.001, max_num_queued_reqs=4, max_num_seqs=2) as engine:
            build = engine.builder.build
            first = engine.submit(build("x", SamplingParams(n=3, max_tokens=2000, ignore_eos=True)))
            with pytest.raises(OverloadedError) as refusal:
                engine.submit(build("x", SamplingParams(n=2)))
            assert refusal.value.http_status == 429
            second = engine.submit(build("x", LONG))
            with pytest.raises(OverloadedError):
                engine.submit(build("x", SamplingParams()))
            second.cancel()
            engine.submit(build("x", SamplingParams())).cancel()
            first.cancel()

    asyncio.run(main())


def test_with_the_fair_policy_a_flood_fills_nobody_elses_room() -> None:
    async def main() -> None:
        options = {"max_num_queued_reqs": 3, "max_num_seqs": 2, "scheduling_policy": "fair"}
        async with running(spell("x" * 2000), itl_s=0.001, **options) as engine:
            build = engine.builder.build
            flood = [engine.submit(build("x", LONG, tenant="a")) for _ in range(3)]
            with pytest.raises(OverloadedError, match="of yours"):
                engine.submit(build("x", LONG, tenant="a"))
            async with engine.submit(build("x", SamplingParams(max_tokens=3, ignore_eos=True), tenant="b")) as handle:
                await handle.collect()
            assert engine.num_unfinished == 3
            flood[0].cancel()
            flood.append(engine.submit(build("x", LONG, tenant="a")))
            for one in flood:
                one.cancel()
            await until(lambda: engine.num_unfinished == 0)
            assert engine._streams.num_of("a") == engine._streams.num_of("b") == 0

    asyncio.run(main())


def test_o15_a_failing_row_ends_one_request() -> None:
    def script(start: SlotStart) -> Sequence[int | Exception]:
        return [*spell("abc"), RowFailure("no more")] if start.token_ids[0] == ord("f") else [*spell("fine" * 9), EOS]

    async def main() -> None:
        async with running(script, itl_s=0.001) as engine:
            params = SamplingParams(max_tokens=100)
            async with engine.submit(engine.builder.build("fail", params)) as failing:
                good = asyncio.create_task(answer(engine, "good", params))
                whole = merge([delta async for delta in failing])
            assert whole.text == "abc"
            assert (whole.finish_reason, type(whole.error)) == (FinishReason.ERROR, EngineError)
            assert "no more" in str(whole.error)
            assert (await good)[0].text == "fine" * 9
            with pytest.raises(EngineError, match="no more"):
                await answer(engine, "fail", params)

    asyncio.run(main())


def test_o41_a_failing_step_ends_its_requests_only() -> None:
    calls = 0

    def script(start: SlotStart) -> Sequence[int | Exception]:
        nonlocal calls
        calls += 1
        return [*spell("ab"), MemoryError()] if calls == 1 else [*spell("ok"), EOS]

    async def main() -> None:
        async with running(script) as engine:
            with pytest.raises(EngineError, match="MemoryError"):
                await answer(engine, "x", SamplingParams())
            assert engine.state is EngineState.READY
            assert (await answer(engine, "x", SamplingParams()))[0].text == "ok"

    asyncio.run(main())


def test_o41_a_dead_loop_is_visible() -> None:
    reasons: list[str] = []

    async def main() -> None:
        events = Recorder()
        async with running(spell("x" * 2000), itl_s=0.001, events=events, on_death=reasons.append) as engine:
            handles = [engine.submit(engine.builder.build("x", LONG)) for _ in range(3)]
            for handle in handles:
                await anext(handle)
            engine._link._inbox.receive = None  # the loop's next turn raises
            for handle in handles:
                with pytest.raises(EngineDeadError):
                    await asyncio.wait_for(handle.collect(), 5)
            await until(lambda: engine.state is EngineState.DEAD)
            assert len(reasons) == 1
            with pytest.raises(EngineDeadError):
                engine.submit(engine.builder.build("x", LONG))
            assert events.last_stats.stats.num_running == 0

    asyncio.run(main())


def test_o44_drain_lets_requests_finish_and_refuses_new_ones() -> None:
    async def main() -> None:
        async with running([*spell("done" * 20), EOS], itl_s=0.001) as engine:
            task = asyncio.create_task(answer(engine, "x", SamplingParams(max_tokens=200)))
            await asyncio.sleep(0.01)
            draining = asyncio.create_task(engine.drain(5.0))
            await asyncio.sleep(0)
            assert engine.state is EngineState.DRAINING
            with pytest.raises(NotReadyError):
                engine.submit(engine.builder.build("x", LONG))
            assert await draining
            assert (await task)[0].text == "done" * 20

    asyncio.run(main())


def test_o44_what_outlasts_the_drain_ends_with_an_error() -> None:
    async def main() -> None:
        async with running(spell("x" * 2000), itl_s=0.005) as engine:
            task = asyncio.create_task(answer(engine, "x", LONG))
            await asyncio.sleep(0.02)
            assert not await engine.drain(0.05)
            with pytest.raises(NotReadyError):
                await task
            assert engine.num_unfinished == 0

    asyncio.run(main())


def test_closing_ends_what_runs_and_the_thread() -> None:
    async def main() -> None:
        async with running(spell("x" * 2000), itl_s=0.001) as engine:
            task = asyncio.create_task(answer(engine, "x", LONG))
            await asyncio.sleep(0.02)
            await engine.close()
            with pytest.raises(NotReadyError):
                await task
            with pytest.raises(EngineDeadError):
                engine.submit(engine.builder.build("x", LONG))

    before = threading.active_count()
    asyncio.run(main())
    deadline = time.monotonic() + 5  # the thread that closed the engine has told so, and is about to end
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_before_loading_nothing_is_accepted() -> None:
    async def main() -> None:
        engine = AsyncEngine(Config(), EventLog())
        assert engine.state is EngineState.LOADING
        for use in (lambda: engine.model, lambda: engine.builder, engine.check_ready):
            with pytest.raises(NotReadyError):
                use()
        await engine.close()

    asyncio.run(main())


def test_restart_needs_a_process() -> None:
    with pytest.raises(ConfigError, match="--engine-process"):
        AsyncEngine(Config(backend=BackendConfig(engine_restart=True)), EventLog())


def test_preemption_does_not_change_answers() -> None:
    async def main() -> None:
        async with running(prompt_echo, model=model_of(max_model_len=64), num_blocks=9, max_num_seqs=8) as engine:
            params = SamplingParams(max_tokens=40)
            prompts = [f"{i:02}" * 12 for i in range(12)]
            answers = await asyncio.gather(*(answer(engine, prompt, params) for prompt in prompts))
            assert [choices[0].text for choices in answers] == [f"{prompt}0" for prompt in prompts]

    asyncio.run(main())
