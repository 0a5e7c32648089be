"""The engine in a child process: death, freezing, restart, refusals and what it can see (case O-41)."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.config import BackendConfig, CacheConfig, Config, ModelConfig, ServerConfig
from octavo.contracts import EngineInput, EngineOutput, RequestId, Shutdown, StepStats, TokenEvent, TokenLogprobs
from octavo.errors import ConfigError, EngineDeadError, ModelUnavailableError
from octavo.frontend.engine import AsyncEngine, EngineState
from octavo.frontend.link import SILENCE_LIMIT_S, STEP_LIMIT_S, WATCH_INTERVAL_S, ChildLink, Hooks, Watch
from octavo.frontend.params import SamplingParams
from octavo.frontend.wire import Configure, from_child_decoder
from octavo.obs.events import EventLog
from support.scripted import until

TINY = Path(__file__).parents[2] / "golden" / "tiny-llama"
LONG = SamplingParams(max_tokens=200, ignore_eos=True)


def config(*, restart: bool = False, **model: Any) -> Config:
    return Config(
        model=ModelConfig(**{"model": str(TINY), **model}),
        cache=CacheConfig(kv_cache_memory="8M"),
        backend=BackendConfig(backend="numpy", engine_process=True, engine_restart=restart),
        server=ServerConfig(api_key=("sesame",)),
    )


@asynccontextmanager
async def started(of: Config, on_death: Callable[[str], None] | None = None) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(of, EventLog(), on_death=on_death)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def exists(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


async def three_in_flight(engine: AsyncEngine) -> list[asyncio.Task[Any]]:
    handles = [engine.submit(engine.builder.build("hello", LONG)) for _ in range(3)]
    for handle in handles:
        await anext(handle)
    return [asyncio.create_task(handle.collect()) for handle in handles]


@pytest.mark.parametrize(("number", "reason"), [(signal.SIGKILL, "signal 9"), (signal.SIGSTOP, "no sign of life")])
def test_o41_a_killed_or_frozen_child_is_seen(number: signal.Signals, reason: str) -> None:
    reasons: list[str] = []

    async def main() -> None:
        async with started(config(), reasons.append) as engine:
            pid = engine.child_pid
            assert pid is not None
            tasks = await three_in_flight(engine)
            began_s = time.monotonic()
            os.kill(pid, number)
            results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
            assert time.monotonic() - began_s < 5
            assert all(isinstance(result, EngineDeadError) and reason in str(result) for result in results)
            assert engine.state is EngineState.DEAD
            assert reason in engine.reason
            assert len(reasons) == 1
            with pytest.raises(EngineDeadError):
                engine.submit(engine.builder.build("hello", LONG))
            await until(lambda: not exists(pid))

    asyncio.run(main())


def test_o41_a_dead_child_is_replaced_when_told_so() -> None:
    async def main() -> None:
        async with started(config(restart=True)) as engine:
            params = SamplingParams(max_tokens=8, temperature=0)
            async with engine.submit(engine.builder.build("hello", params)) as handle:
                [before] = await handle.collect()
            first = engine.child_pid
            assert first is not None
            tasks = await three_in_flight(engine)
            os.kill(first, signal.SIGKILL)
            results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
            assert all(isinstance(result, EngineDeadError) for result in results)
            await until(lambda: engine.state is EngineState.READY, 20)
            assert engine.child_pid != first
            async with engine.submit(engine.builder.build("hello", params)) as handle:
                [after] = await handle.collect()
            assert after == before

    asyncio.run(main())


def test_o41_a_child_that_dies_all_the_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.frontend.engine.MAX_RESTARTS", 0)
    reasons: list[str] = []

    async def main() -> None:
        async with started(config(restart=True), reasons.append) as engine:
            assert engine.child_pid is not None
            os.kill(engine.child_pid, signal.SIGKILL)
            await until(lambda: engine.state is EngineState.DEAD)
            assert len(reasons) == 1

    asyncio.run(main())


def test_refusals_of_the_child_keep_their_kind() -> None:
    async def main() -> None:
        engine = AsyncEngine(config(max_model_len=100_000), EventLog())
        with pytest.raises(ConfigError, match="max-model-len"):
            await engine.start()
        assert engine.state is EngineState.DEAD
        await engine.close()
        with pytest.raises(ModelUnavailableError):
            await AsyncEngine(config(model="no/such-model.gguf"), EventLog()).start()

    asyncio.run(main())


def test_the_child_sees_no_secret_and_ends_with_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OCTAVO_API_KEY", "VLLM_API_KEY", "HF_TOKEN", "DATABASE_PASSWORD"):
        monkeypatch.setenv(name, "sesame")
    link = ChildLink(Configure(config()), Hooks(on_output=lambda _: None, on_death=lambda _: None))
    link.wait_loaded()
    for file in ("environ", "cmdline"):
        assert b"sesame" not in Path(f"/proc/{link.pid}/{file}").read_bytes()
    # What the kernel does when this process ends:
    link._closed = True
    link._channel.shut()
    link._process.wait(5)
    link.close()


def test_closing_is_polite() -> None:
    outputs: list[EngineOutput] = []
    link = ChildLink(Configure(config()), Hooks(on_output=outputs.append, on_death=pytest.fail))
    link.wait_loaded()
    link.close()
    assert link._process.returncode == 0
    link.close()


class FakeLink:
    """A link whose pulse the test decides."""

    signs_of_life: int | None = 0

    def send(self, message: EngineInput) -> None:
        assert isinstance(message, Shutdown)

    def kill(self) -> None:
        pass

    def close(self, timeout_s: float = 5.0) -> None:
        pass


def test_watch_finds_silence_only_while_work_waits() -> None:
    link, watch = FakeLink(), Watch()
    rounds = int(SILENCE_LIMIT_S / WATCH_INTERVAL_S)
    for _ in range(10 * rounds):
        assert watch.look(link, 0, work_waits=False) is None
    for _ in range(rounds - 1):
        assert watch.look(link, 0, work_waits=True) is None
    assert "no sign of life" in (watch.look(link, 0, work_waits=True) or "")


def test_watch_takes_a_long_step_for_life_up_to_a_limit() -> None:
    link, watch = FakeLink(), Watch()
    rounds = int(STEP_LIMIT_S / WATCH_INTERVAL_S)
    faults = []
    for number in range(rounds + 1):
        link.signs_of_life = number
        faults.append(watch.look(link, 7, work_waits=True))
    assert faults[:-1] == [None] * rounds
    assert "no step" in (faults[-1] or "")


def test_logprobs_cross_the_socket_to_the_bit() -> None:
    values = (-0.1, -1e-300, -math.inf, math.nextafter(-0.1, 0))
    event = TokenEvent(request_id=RequestId("r"), token_ids=(1,), logprobs=(TokenLogprobs((1, 2, 3, 4), values, 1),))
    output = EngineOutput(events=(event,), stats=StepStats(step=1, num_running=2, num_waiting=3, kv_usage=0.1))
    assert from_child_decoder().decode(msgspec.msgpack.encode(output)) == output
