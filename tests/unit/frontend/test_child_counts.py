"""Sequences that die with an engine's child are counted like any others; one that dies again while it loads is replaced again."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from octavo.config import BackendConfig, CacheConfig, Config, ModelConfig
from octavo.contracts import FinishReason
from octavo.errors import EngineDeadError
from octavo.frontend.build import open_engine
from octavo.frontend.engine import MAX_RESTARTS, AsyncEngine, EngineState
from octavo.frontend.params import SamplingParams
from octavo.obs.events import Event, EventLog, StepCompleted
from support.scripted import until

TINY = Path(__file__).parents[2] / "golden" / "tiny-llama"


def config(*, restart: bool = False) -> Config:
    return Config(
        model=ModelConfig(model=str(TINY)),
        cache=CacheConfig(kv_cache_memory="8M"),
        backend=BackendConfig(backend="numpy", engine_process=True, engine_restart=restart),
    )


def test_o41_what_dies_with_a_child_is_counted_once() -> None:
    async def main() -> None:
        events: list[Event] = []
        log = EventLog()
        log.add_sink(events.append)
        engine = AsyncEngine(config(), log)
        await engine.start()
        params = SamplingParams(max_tokens=engine.model.max_model_len - 10, ignore_eos=True, n=3)
        handle = engine.submit(engine.builder.build("hello", params))
        await until(lambda: any(isinstance(event, StepCompleted) and event.stats.num_running == 3 for event in events))
        assert engine.child_pid is not None
        os.kill(engine.child_pid, signal.SIGKILL)
        try:
            await asyncio.wait_for(handle.collect(), 5)
            raise AssertionError("it cannot have finished")
        except EngineDeadError:
            pass
        finished = [times for event in events if isinstance(event, StepCompleted) for times in event.stats.finished]
        assert sorted(times.request_id for times in finished) == sorted(r.request_id for r in handle.prepared.requests)
        assert {times.finish_reason for times in finished} == {FinishReason.ERROR}
        assert all(times.finished_s >= times.arrival_s for times in finished)
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("failures", [2, 100])
def test_o41_a_child_that_dies_again_while_it_loads_is_replaced_again(
    failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons: list[str] = []
    attempts = 0

    async def main() -> None:
        nonlocal attempts
        engine = AsyncEngine(config(restart=True), EventLog(), on_death=reasons.append)
        await engine.start()
        first = engine.child_pid
        assert first is not None

        def fail_at_first(*arguments: Any) -> Any:
            nonlocal attempts
            attempts += 1
            if attempts <= failures:
                raise EngineDeadError("the engine process was killed by signal 9 while loading")
            return open_engine(*arguments)

        monkeypatch.setattr("octavo.frontend.build.open_engine", fail_at_first)
        os.kill(first, signal.SIGKILL)
        end = EngineState.READY if failures < MAX_RESTARTS else EngineState.DEAD
        await until(lambda: engine.child_pid != first and engine.state is end, 20)
        await engine.close()

    asyncio.run(main())
    assert attempts == min(failures + 1, MAX_RESTARTS)
    assert len(reasons) == (failures >= MAX_RESTARTS)
