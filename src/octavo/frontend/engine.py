"""The engine as an asyncio server sees it: start, submit, stream, cancel, drain, and death made visible.

Knows no HTTP and no tensors. Everything here runs on one event loop; only loading and the engine itself do not.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from enum import StrEnum
from types import TracebackType
from typing import Any, TypeVar

from octavo.config import Config
from octavo.contracts import (
    Add,
    Cancel,
    EngineOutput,
    Executor,
    FinishReason,
    RequestId,
    ResetPrefixCache,
    StepStats,
    UnpinPrefix,
)
from octavo.errors import ConfigError, EngineDeadError, NotReadyError, OctavoError, OverloadedError
from octavo.frontend.constrain import GrammarDoor, constrained
from octavo.frontend.link import WATCH_INTERVAL_S, EngineLink, Hooks, Progress, Watch
from octavo.frontend.model import ServedModel
from octavo.frontend.outputs import Delta
from octavo.frontend.requests import Prepared, RequestBuilder, cache_namespace
from octavo.frontend.stream import StreamTable, merge
from octavo.obs.events import EngineStateChanged, EventLog, StepCompleted

_log = logging.getLogger("octavo")

MAX_RESTARTS = 5
RESTART_WINDOW_S = 60.0
"""More deaths than `MAX_RESTARTS` within this time: restarting does not help."""

Opener = Callable[[Hooks, Progress | None], tuple[EngineLink, ServedModel]]
"""Loads a model and starts its loop. Blocks; runs in a thread."""

T = TypeVar("T")


class EngineState(StrEnum):
    """Where the engine is in its life."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class RequestHandle:
    """A running request: an async iterator of the deltas of all its choices; as `async with` it cancels what is left
    on exit.

    Ends after the terminal delta of every choice. Deltas of one choice that nobody fetched are merged, so a slow
    reader costs at most one answer's memory. One consumer at a time.
    """

    def __init__(self, prepared: Prepared, cancel: Callable[[tuple[RequestId, ...]], None]) -> None:
        self.prepared = prepared
        self._cancel = cancel
        self._unfinished = {request.sampling.choice: request.request_id for request in prepared.requests}
        self._pending: dict[int, list[Delta]] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._collecting = False

    @property
    def finished(self) -> bool:
        """Whether every choice has ended (its deltas may still wait to be fetched)."""
        return not self._unfinished

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        while not self._pending:
            if not self._unfinished:
                raise StopAsyncIteration
            await self._wait()
        index = next(iter(self._pending))
        return merge(self._pending.pop(index))

    async def collect(self) -> list[Delta]:
        """Waits for the end and returns one delta per choice, in order of choices. Raises the error of a failed
        choice.
        """
        self._collecting = True
        while self._unfinished and not self._failure():
            await self._wait()
        if failure := self._failure():
            raise failure
        return [merge(self._pending.pop(index)) for index in sorted(self._pending)]

    def cancel(self) -> None:
        """Ends all unfinished choices (finish_reason ABORT). Idempotent, never raises."""
        if not self._unfinished:
            return
        unfinished = dict(self._unfinished)
        self._cancel(tuple(unfinished.values()))
        for index in unfinished:
            self.put(Delta(index=index, finish_reason=FinishReason.ABORT))

    def put(self, delta: Delta) -> None:
        """Adds news of a choice. Called by the engine; what follows a choice's end is dropped."""
        if delta.index not in self._unfinished:
            return
        pending = self._pending.setdefault(delta.index, [])
        pending.append(delta)
        if len(pending) >= 64:
            pending[:] = [merge(pending)]
        if delta.finish_reason is not None:
            del self._unfinished[delta.index]
        if self._waiter is not None and (not self._collecting or not self._unfinished or delta.error is not None):
            if not self._waiter.done():
                self._waiter.set_result(None)
            self._waiter = None

    async def __aenter__(self) -> RequestHandle:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _failure(self) -> OctavoError | None:
        for deltas in self._pending.values():
            if deltas[-1].error is not None:
                return deltas[-1].error
        return None


class AsyncEngine:
    """One engine for one event loop. All methods are called from that loop.

    `on_death(reason)` is called once, on the loop, when the engine died and will not be restarted. With
    `config.backend.engine_restart` a dead child is replaced: its requests end in an error, the state is LOADING, then
    READY.
    """

    def __init__(
        self,
        config: Config,
        events: EventLog,
        *,
        on_death: Callable[[str], None] | None = None,
        opener: Opener | None = None,
    ) -> None:
        if config.backend.engine_restart and not config.backend.engine_process:
            raise ConfigError("--engine-restart needs --engine-process", param="engine_restart")
        self._config = config
        self._events = events
        self._on_death_hook = on_death
        self._opener = opener
        self._state = EngineState.LOADING
        self._reason = ""
        self._model: ServedModel | None = None
        self._builder: RequestBuilder | None = None
        self._door: GrammarDoor | None = None
        self._link: EngineLink | None = None
        self._life = 0
        self._closed = False
        self._streams = StreamTable()
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._deaths_s: list[float] = []
        self._steps_seen = 0
        limit = config.scheduler.max_num_queued_reqs
        self._max_unfinished = 16 * config.scheduler.max_num_seqs if limit is None else limit

    @classmethod
    def with_executor(
        cls,
        config: Config,
        events: EventLog,
        model: ServedModel,
        executor_factory: Callable[[], Executor],
        *,
        num_blocks: int | None = None,
        on_death: Callable[[str], None] | None = None,
    ) -> AsyncEngine:
        """An engine over a given executor: tests and `octavo mock`. `num_blocks` bounds the KV pool; default: never
        short.
        """
        from octavo.frontend.build import open_with_executor

        def opener(hooks: Hooks, progress: Progress | None) -> tuple[EngineLink, ServedModel]:
            return open_with_executor(config, model, executor_factory(), hooks, num_blocks=num_blocks)

        return cls(config, events, on_death=on_death, opener=opener)

    @property
    def state(self) -> EngineState:
        """Where the engine is in its life."""
        return self._state

    @property
    def reason(self) -> str:
        """Why the engine is in its state; empty when there is nothing to say."""
        return self._reason

    @property
    def model(self) -> ServedModel:
        """The model being served. Raises NotReadyError until it has been loaded."""
        if self._model is None:
            raise NotReadyError("the model is still loading: try again in a moment")
        return self._model

    @property
    def builder(self) -> RequestBuilder:
        """Builds requests for the model. Raises NotReadyError until it has been loaded."""
        if self._builder is None:
            raise NotReadyError("the model is still loading: try again in a moment")
        return self._builder

    @property
    def num_unfinished(self) -> int:
        """Sequences submitted and not ended."""
        return len(self._streams)

    @property
    def child_pid(self) -> int | None:
        """Process id of the engine's child, None when it runs in this process."""
        from octavo.frontend.link import ChildLink

        return self._link.pid if isinstance(self._link, ChildLink) else None

    async def start(self, progress: Progress | None = None) -> None:
        """Loads the model beside the event loop and becomes READY.

        Raises ConfigError, ModelFileError, ModelUnavailableError; the state is then DEAD.
        """
        self._set_state(EngineState.LOADING)
        try:
            await self._launch(progress)
        except Exception as error:
            self._set_state(EngineState.DEAD, str(error))
            raise
        self._spawn(self._watch())

    async def constrain(self, prepared: Prepared) -> Prepared:
        """The request with its grammar compiled, if it has one. Cancelling stops the work.

        Raises InvalidRequestError, OverloadedError.
        """
        if prepared.grammar is None:
            return prepared
        assert self._door is not None
        door = self._door
        future = await asyncio.to_thread(door.begin, prepared)
        assert future is not None
        return constrained(prepared, await asyncio.wrap_future(future))

    def submit(self, prepared: Prepared) -> RequestHandle:
        """Queues a request. Raises NotReadyError, OverloadedError, EngineDeadError."""
        self.check_room([prepared])
        assert self._link is not None
        handle = RequestHandle(prepared, self._cancel)
        self._streams.add(prepared, self.model, handle.put)
        self._idle.clear()
        self._link.send(Add(prepared.requests))
        return handle

    def check_room(self, prepared: Sequence[Prepared]) -> None:
        """Raises OverloadedError, or what `check_ready` raises, unless a call's requests, all of one tenant, are accepted now.

        Under the policy `fair` the limit is each tenant's own, so that one that floods the server fills no other's room.
        """
        self.check_ready()
        num_sequences = sum(one.num_choices for one in prepared)
        if self._config.scheduler.scheduling_policy == "fair":
            num_unfinished, whose = self._streams.num_of(prepared[0].requests[0].tenant), "of yours "
        else:
            num_unfinished, whose = len(self._streams), ""
        if num_unfinished + num_sequences > self._max_unfinished:
            raise OverloadedError(
                f"{num_unfinished} sequences {whose}are running or waiting and this request adds {num_sequences}; "
                f"the limit is {self._max_unfinished}: try again later"
            )

    def check_ready(self) -> None:
        """Raises NotReadyError or EngineDeadError unless requests are accepted."""
        match self._state:
            case EngineState.LOADING:
                raise NotReadyError("the model is still loading: try again in a moment")
            case EngineState.DRAINING:
                raise NotReadyError("the server is shutting down: send the request elsewhere")
            case EngineState.DEAD:
                raise EngineDeadError(f"the engine is dead: {self._reason}")
            case EngineState.READY:
                return

    def reset_prefix_cache(self) -> None:
        """Forgets cached blocks that no request holds, pinned ones and those on disk included."""
        self.check_ready()
        assert self._link is not None
        self._link.send(ResetPrefixCache())

    def unpin_prefix(self, token_ids: tuple[int, ...] | None, *, cache_salt: str | None = None) -> None:
        """Lets the pinned blocks of a prompt go, of all prompts with None."""
        self.check_ready()
        assert self._link is not None
        self._link.send(UnpinPrefix(token_ids, cache_namespace(cache_salt)))

    async def drain(self, timeout_s: float) -> bool:
        """Refuses new requests and waits for the running ones; after `timeout_s` the rest end with a NotReadyError.

        True if all finished by themselves.
        """
        if self._state in (EngineState.LOADING, EngineState.READY):
            self._set_state(EngineState.DRAINING)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
            return True
        self._fail_all(NotReadyError("the server shut down before the answer was complete"))
        return False

    async def close(self) -> None:
        """Ends the loop, the thread or child, and every handle. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._life += 1
        for task in tuple(self._tasks):
            task.cancel()
        self._fail_all(NotReadyError("the server shut down before the answer was complete"))
        link, self._link = self._link, None
        if link is not None:
            await _in_thread(link.close)
        if self._door is not None:
            await _in_thread(self._door.close)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._state is not EngineState.DEAD:
            self._set_state(EngineState.DEAD, "it was closed")

    async def _launch(self, progress: Progress | None) -> None:
        """Opens a link. Hooks carry the number of this life, so that a late word from an earlier engine is ignored."""
        self._life += 1
        life = self._life
        loop = asyncio.get_running_loop()

        def post(call: Callable[[int, T], None]) -> Callable[[T], None]:
            def run(value: T) -> None:
                with suppress(RuntimeError):  # The event loop has been closed.
                    loop.call_soon_threadsafe(call, life, value)

            return run

        def open_link() -> tuple[EngineLink, ServedModel]:
            opener = self._opener
            if opener is None:
                from octavo.frontend.build import open_engine

                return open_engine(self._config, hooks, progress)
            return opener(hooks, progress)

        hooks = Hooks(on_output=post(self._on_output), on_death=post(self._on_death))
        link, model = await _in_thread(open_link, abandon=lambda result: result[0].close())
        if self._life != life:
            await _in_thread(link.close)
            raise NotReadyError("the server shut down while the model was loading")
        priorities = self._config.scheduler.scheduling_policy == "priority"
        self._link, self._model, self._builder = link, model, RequestBuilder(model, priorities=priorities)
        if self._door is None:
            self._door = GrammarDoor(model, self._config.structured)
        if self._state is EngineState.LOADING:
            self._set_state(EngineState.READY)

    def _on_output(self, life: int, output: EngineOutput) -> None:
        if life != self._life or self._link is None:
            return
        self._steps_seen += 1
        stats, cancels = self._streams.dispatch(output)
        if cancels:
            self._link.send(Cancel(cancels))
        self._note_idle()
        self._events.emit(StepCompleted(stats))

    def _on_death(self, life: int, reason: str) -> None:
        if life != self._life or self._closed:
            return
        self._life += 1
        link, self._link = self._link, None
        if link is not None:
            link.kill()
            threading.Thread(target=link.close, name="octavo-engine-reaper", daemon=True).start()
        finished = self._streams.lost(time.monotonic())
        self._fail_all(EngineDeadError(f"the engine died: {reason}"))
        self._events.emit(
            StepCompleted(StepStats(step=0, num_running=0, num_waiting=0, kv_usage=0.0, finished=finished))
        )
        if self._may_restart() and self._state is EngineState.READY:
            _log.error("the engine died and is replaced: %s", reason)
            self._set_state(EngineState.LOADING, reason)
            self._spawn(self._restart())
        else:
            self._die(reason)

    def _may_restart(self) -> bool:
        """Notes a death, and says whether to try again."""
        now_s = asyncio.get_running_loop().time()
        self._deaths_s = [at_s for at_s in self._deaths_s if now_s - at_s < RESTART_WINDOW_S] + [now_s]
        return self._config.backend.engine_restart and len(self._deaths_s) <= MAX_RESTARTS

    async def _restart(self) -> None:
        while True:
            try:
                await self._launch(None)
                _log.info("the new engine is ready")
                return
            except Exception as error:  # noqa: BLE001 - whatever keeps a new engine from starting, clients must hear of it
                if self._closed:
                    return
                if not isinstance(error, EngineDeadError) or not self._may_restart():
                    self._die(f"it died and could not be replaced: {error}")
                    return
                _log.error("the new engine died while it loaded and is replaced: %s", error)

    def _die(self, reason: str) -> None:
        self._set_state(EngineState.DEAD, reason)
        if self._on_death_hook is not None:
            self._on_death_hook(reason)

    async def _watch(self) -> None:
        watch = Watch()
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            if self._link is None:
                watch = Watch()
            elif fault := watch.look(self._link, self._steps_seen, work_waits=bool(len(self._streams))):
                self._on_death(self._life, fault)

    def _cancel(self, request_ids: tuple[RequestId, ...]) -> None:
        self._streams.remove(request_ids)
        self._note_idle()
        if self._link is not None:
            self._link.send(Cancel(request_ids))

    def _fail_all(self, error: OctavoError) -> None:
        request_ids = self._streams.fail_all(error)
        self._note_idle()
        if request_ids and self._link is not None:
            self._link.send(Cancel(request_ids))

    def _note_idle(self) -> None:
        if not len(self._streams):
            self._idle.set()

    def _set_state(self, state: EngineState, reason: str = "") -> None:
        self._state = state
        self._reason = reason
        self._events.emit(EngineStateChanged(state.value, reason))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _in_thread(call: Callable[[], T], abandon: Callable[[T], object] | None = None) -> T:
    """Runs a blocking call in a daemon thread, so that a process that wants to end need not wait for it.

    If the waiting task is cancelled, `abandon` receives the result that came too late.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            if error is None and abandon is not None:
                threading.Thread(target=abandon, args=(result,), daemon=True).start()
        elif error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - handed to the task that waits
            failure = error
        try:
            loop.call_soon_threadsafe(deliver, result, failure)
        except RuntimeError:  # The event loop has been closed meanwhile.
            if failure is None and abandon is not None:
                abandon(result)  # type: ignore[arg-type]

    threading.Thread(target=run, name="octavo-load", daemon=True).start()
    return await future
