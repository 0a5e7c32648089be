"""The engine as an asyncio server sees it: start, submit, stream, cancel, drain, and death made visible."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from enum import StrEnum
from types import TracebackType

from octavo.config import Config
from octavo.contracts import Executor, KVLayout
from octavo.frontend.model import ServedModel
from octavo.frontend.outputs import Delta
from octavo.frontend.requests import Prepared, RequestBuilder
from octavo.obs.events import EventLog

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), possibly from another thread."""

ExecutorFactory = Callable[[KVLayout], Executor]


class EngineState(StrEnum):
    """Where the engine is in its life."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class RequestHandle:
    """A running request: an async iterator of the deltas of all its choices, and `async with`, which cancels what is
    left on exit.

    Ends after the terminal delta of every choice. Deltas of one choice that nobody fetched are merged, so a slow
    reader costs at most one answer's memory.
    """

    prepared: Prepared

    def __aiter__(self) -> AsyncIterator[Delta]:
        raise NotImplementedError

    def cancel(self) -> None:
        """Ends all unfinished choices (finish_reason ABORT). Idempotent, never raises."""
        raise NotImplementedError

    async def __aenter__(self) -> RequestHandle:
        raise NotImplementedError

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        raise NotImplementedError


class AsyncEngine:
    """One engine for one event loop. All methods are called from that loop.

    `on_death(reason)` is called once, on the loop, when the engine died and will not be restarted.
    """

    model: ServedModel
    builder: RequestBuilder
    state: EngineState

    def __init__(self, config: Config, events: EventLog, *, on_death: Callable[[str], None] | None = None) -> None:
        raise NotImplementedError

    @classmethod
    def with_executor(
        cls,
        config: Config,
        events: EventLog,
        model: ServedModel,
        executor_factory: ExecutorFactory,
        *,
        on_death: Callable[[str], None] | None = None,
    ) -> AsyncEngine:
        """An engine over a given executor: tests and `octavo mock`."""
        raise NotImplementedError

    @property
    def num_unfinished(self) -> int:
        """Sequences submitted and not ended."""
        raise NotImplementedError

    async def start(self, progress: Progress | None = None) -> None:
        """Loads the model beside the event loop and becomes READY. Raises ConfigError, ModelFileError,
        ModelUnavailableError.
        """
        raise NotImplementedError

    def submit(self, prepared: Prepared) -> RequestHandle:
        """Queues a request. Raises NotReadyError, OverloadedError, EngineDeadError."""
        raise NotImplementedError

    def reset_prefix_cache(self) -> None:
        """Forgets cached blocks that no request holds."""
        raise NotImplementedError

    async def drain(self, timeout_s: float) -> bool:
        """Refuses new requests and waits for the running ones; aborts what is left after `timeout_s`. True if all
        finished by themselves.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Ends the loop, the thread or child, and every handle. Idempotent."""
        raise NotImplementedError
