"""How a front talks to an engine loop: in a thread of this process, or in a child process. Both look the same from
outside.

A link passes messages to the engine and calls back with outputs and with the engine's death. It knows no text, no
event loop and no request.
"""

from __future__ import annotations

import os
import queue
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from octavo import errors
from octavo.contracts import EngineInput, EngineOutput, Inbox, Outbox, Shutdown
from octavo.errors import EngineDeadError, OctavoError
from octavo.frontend.wire import (
    Channel,
    Configure,
    Crashed,
    EngineFacts,
    LoadFailed,
    LoadProgress,
    ToChild,
    from_child_decoder,
)
from octavo.frontend.wire import Loaded as LoadedMessage

_SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), from any thread."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """What a link calls, from a thread of its own: each output in order, and at most once the reason why there will
    be no more.
    """

    on_output: Callable[[EngineOutput], None]
    on_death: Callable[[str], None]


class EngineLink(Protocol):
    """A running engine."""

    @property
    def signs_of_life(self) -> int | None:
        """A counter that rises at least once a second while the engine's process runs; None where that cannot stop
        alone.
        """
        ...

    def send(self, message: EngineInput) -> None:
        """Passes a message on. Never blocks, never raises; messages to a dead engine are dropped."""
        ...

    def kill(self) -> None:
        """Ends a child at once, without waiting; a thread cannot be killed and is left alone. No hook is called
        afterwards.
        """
        ...

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the engine: politely, after `timeout_s` by force. No hook is called afterwards. Idempotent."""
        ...


WATCH_INTERVAL_S = 0.5
"""How often `Watch.look` is to be called."""
SILENCE_LIMIT_S = 3.5
"""A child that gives no sign of life for so long while work waits is stopped or dead."""
STEP_LIMIT_S = 300.0
"""A loop that finishes no step for so long while work waits is stuck, although its process lives."""


class Watch:
    """Finds a stopped child or a stuck loop. It counts its own rounds instead of reading a clock, so that a pause of
    this whole process (a debugger, a laptop's sleep) is no alarm.
    """

    def __init__(self) -> None:
        self._signs: int | None = None
        self._steps = -1
        self._silent_rounds = 0
        self._stuck_rounds = 0

    def look(self, link: EngineLink, num_steps: int, *, work_waits: bool) -> str | None:
        """What is wrong, if anything. `num_steps` counts the outputs received so far."""
        signs = link.signs_of_life
        self._silent_rounds = self._silent_rounds + 1 if work_waits and signs == self._signs else 0
        self._stuck_rounds = self._stuck_rounds + 1 if work_waits and num_steps == self._steps else 0
        self._signs, self._steps = signs, num_steps
        if signs is not None and self._silent_rounds * WATCH_INTERVAL_S >= SILENCE_LIMIT_S:
            return f"its process gave no sign of life for {SILENCE_LIMIT_S:g} s"
        if self._stuck_rounds * WATCH_INTERVAL_S >= STEP_LIMIT_S:
            return f"it finished no step for {STEP_LIMIT_S:g} s"
        return None


class QueueInbox:
    """An inbox fed from other threads of this process."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[EngineInput] = queue.SimpleQueue()

    def put(self, message: EngineInput) -> None:
        """Adds a message. Never blocks."""
        self._queue.put(message)

    def receive(self, timeout_s: float | None) -> Sequence[EngineInput]:
        """See `contracts.Inbox`."""
        messages: list[EngineInput] = []
        with suppress(queue.Empty):
            messages.append(self._queue.get(timeout_s != 0, timeout_s))
            while True:
                messages.append(self._queue.get_nowait())
        return messages


class ThreadLink:
    """An engine loop in a thread of this process. `run(inbox, outbox)` is the loop; it returns after `Shutdown`."""

    def __init__(self, run: Callable[[Inbox, Outbox], None], hooks: Hooks) -> None:
        self._run = run
        self._hooks = hooks
        self._inbox = QueueInbox()
        self._closed = False
        # A daemon, so that a loop stuck in native code cannot keep the process from ending.
        self._thread = threading.Thread(target=self._main, name="octavo-engine", daemon=True)
        self._thread.start()

    @property
    def signs_of_life(self) -> int | None:
        """None: this process cannot tell that it is stopped."""
        return None

    def send(self, message: EngineInput) -> None:
        """See `EngineLink`."""
        self._inbox.put(message)

    def kill(self) -> None:
        """See `EngineLink`."""
        self._closed = True
        self._inbox.put(Shutdown())

    def close(self, timeout_s: float = 5.0) -> None:
        """See `EngineLink`."""
        self.kill()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _main(self) -> None:
        reason = "the engine loop ended"
        try:
            self._run(self._inbox, _CallOutbox(self._on_output))
        except BaseException as error:  # noqa: BLE001 - whatever ends the loop, those who wait for it must hear of it
            reason = f"the engine loop failed: {type(error).__name__}: {error}"
        del self._run  # Weights and native threads go now, whoever still holds this link.
        if not self._closed:
            self._hooks.on_death(reason)

    def _on_output(self, output: EngineOutput) -> None:
        if not self._closed:
            self._hooks.on_output(output)


class ChildLink:
    """An engine loop in a child process. The child ends when this process does, because its socket then ends."""

    def __init__(self, configure: Configure, hooks: Hooks) -> None:
        self._hooks = hooks
        self._closed = False
        self._signs_of_life = 0
        self._outgoing: queue.SimpleQueue[ToChild | None] = queue.SimpleQueue()
        ours, theirs = socket.socketpair()
        with theirs:
            environment = {name: value for name, value in os.environ.items() if not _SECRET.search(name)}
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "octavo.frontend.child", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env=environment,
                process_group=0,  # a terminal's Ctrl-C is for us; the child may not even have got to ignore it
            )
        self._channel = Channel(ours, from_child_decoder())
        self._outgoing.put(configure)
        self._reader = threading.Thread(target=self._read, name="octavo-child-reader", daemon=True)
        self._writer = threading.Thread(target=self._write, name="octavo-child-writer", daemon=True)
        self._writer.start()

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    @property
    def signs_of_life(self) -> int | None:
        """Frames received."""
        return self._signs_of_life

    def wait_loaded(self, progress: Progress | None = None) -> EngineFacts:
        """Blocks until the child is ready, then starts to deliver. Raises what loading raised, or EngineDeadError."""
        try:
            facts = self._await_loaded(progress)
        except BaseException:
            self.close(0.0)
            self._channel.release()
            raise
        self._reader.start()
        return facts

    def send(self, message: EngineInput) -> None:
        """See `EngineLink`."""
        self._outgoing.put(message)

    def kill(self) -> None:
        """See `EngineLink`."""
        self._closed = True
        with suppress(ProcessLookupError):
            self._process.kill()
        self._outgoing.put(None)
        self._channel.shut()

    def close(self, timeout_s: float = 5.0) -> None:
        """See `EngineLink`."""
        self._closed = True
        if timeout_s > 0 and self._process.poll() is None:
            self._outgoing.put(Shutdown())
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
        self.kill()
        self._process.wait()
        current = threading.current_thread()
        for thread in (self._reader, self._writer):
            if thread is not current and thread.ident is not None:
                thread.join()

    def _await_loaded(self, progress: Progress | None) -> EngineFacts:
        while (message := self._channel.receive()) is not None:
            match message:
                case LoadProgress(done, total) if progress is not None:
                    progress(done, total)
                case LoadedMessage(facts):
                    return facts
                case LoadFailed(kind, text):
                    known = getattr(errors, kind, None)
                    if isinstance(known, type) and issubclass(known, OctavoError):
                        raise known(text)
                    raise EngineDeadError(f"the engine process failed to load: {kind}: {text}")
                case _:
                    pass
        raise EngineDeadError(f"the engine process {self._exit_text()} while loading")

    def _read(self) -> None:
        reason = ""
        try:
            while (message := self._channel.receive()) is not None:
                self._signs_of_life += 1
                match message:
                    case EngineOutput() if not self._closed:
                        self._hooks.on_output(message)
                    case Crashed(text):
                        reason = text
                    case _:
                        pass
        except Exception as error:  # noqa: BLE001 - a frame we cannot read means a child we cannot trust
            reason = f"the engine process sent rubbish: {error}"
        self._channel.release()
        if self._closed:
            return
        if not reason:
            reason = f"the engine process {self._exit_text()}"
        self.kill()
        self._hooks.on_death(reason)

    def _write(self) -> None:
        with suppress(OSError):
            while (message := self._outgoing.get()) is not None:
                self._channel.send(message)

    def _exit_text(self) -> str:
        """How the child ended; its socket has ended already, so the process is about to."""
        with suppress(subprocess.TimeoutExpired):
            status = self._process.wait(2.0)
            return f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
        return "closed its connection"


class ChannelOutbox:
    """An outbox into a child's socket. The other end always reads, so a full socket lasts for moments only."""

    def __init__(self, channel: Channel[ToChild]) -> None:
        self._channel = channel

    def send(self, output: EngineOutput) -> None:
        """See `contracts.Outbox`."""
        self._channel.send(output)


class _CallOutbox:
    def __init__(self, call: Callable[[EngineOutput], None]) -> None:
        self._call = call

    def send(self, output: EngineOutput) -> None:
        self._call(output)
