"""The engine loop: messages in, steps through the executor, outputs out. The same in a thread and in a child process.

One turn: take messages, plan, submit, begin the masks of grammars, deliver what the step *before* did while this one computes, sample,
let matchers follow, commit. So the executor does not wait for delivery. While nothing runs the loop blocks in the inbox and uses no CPU.

Whose fault an exception is decides what it ends. From the executor: the requests of that step. From the scheduler or the
mailboxes: a bug of ours, after which nothing can be trusted, so all requests end with an error and the exception goes to
the loop's owner. This module does not know requests' states, blocks, or how the other side of the mailboxes is reached.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress

from octavo.contracts import (
    Add,
    Cancel,
    EngineInput,
    EngineOutput,
    Executor,
    Grammar,
    Inbox,
    Outbox,
    ResetPrefixCache,
    Shutdown,
    StepPlan,
    UnpinPrefix,
)
from octavo.engine.blocks import InvariantError
from octavo.engine.constraints import Constraints
from octavo.engine.scheduler import Scheduler
from octavo.errors import EngineDeadError, EngineError, OctavoError

_log = logging.getLogger("octavo")


class EngineLoop:
    """Drives an executor by a scheduler. Owns both from construction on; closes the executor when it ends.

    Without a `grammar` requests that have one are refused; with `jumps`, tokens that one forces are not sampled. `clock` gives seconds,
    on the clock of the scheduler and of `GenerateRequest.arrival_s`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        inbox: Inbox,
        outbox: Outbox,
        clock: Callable[[], float] = time.monotonic,
        *,
        grammar: Grammar | None = None,
        jumps: bool = True,
    ) -> None:
        self._scheduler = scheduler
        self._constraints = Constraints(scheduler, grammar, jumps=jumps)
        self._executor = executor
        self._inbox = inbox
        self._outbox = outbox
        self._clock = clock
        self._undelivered: EngineOutput | None = None

    def run(self) -> None:
        """Runs until a Shutdown message: aborts what is unfinished, delivers the last events, closes the executor, returns.

        Raises what the scheduler or a mailbox raised, after every unfinished request got its terminal event.
        """
        try:
            while self._receive():
                self._turn()
            self._constraints.release()
            self._scheduler.abort_all()
            self._deliver()
            self._say_farewell()
        except BaseException as error:
            with suppress(Exception):
                self._constraints.release()
            self._scheduler.kill_all(
                EngineDeadError(f"the engine stopped because of an internal error ({type(error).__name__})")
            )
            self._deliver()
            raise
        finally:
            self._executor.close()

    def _say_farewell(self) -> None:
        """What is cached outlives this engine, where there is a disk for it."""
        plan = self._scheduler.farewell()
        if plan is not None:
            try:
                self._executor.submit(plan).sample()
            except Exception as error:  # noqa: BLE001 - it is over anyway
                _log.warning("cached KV blocks could not be put on disk", exc_info=error)

    def _receive(self) -> bool:
        """Handles all messages that wait; blocks for one when there is no work. False once told to shut down."""
        busy = self._scheduler.has_work or self._undelivered is not None
        messages = self._inbox.receive(0.0 if busy else self._constraints.idle_timeout_s)
        for message in messages:
            self._handle(message)
        self._constraints.admit()
        if not busy and not messages:
            self._constraints.settle()
        return not any(isinstance(message, Shutdown) for message in messages)

    def _handle(self, message: EngineInput) -> None:
        match message:
            case Add(requests=requests):
                for request in requests:
                    self._constraints.add(request)
            case Cancel(request_ids=request_ids):
                self._constraints.release(request_ids)
                self._scheduler.cancel(request_ids)
            case ResetPrefixCache():
                self._scheduler.reset_prefix_cache()
            case UnpinPrefix(token_ids=token_ids, namespace=namespace):
                self._scheduler.unpin(token_ids, namespace)
            case Shutdown():
                pass  # After the messages that came with it, so that requests among them end with an event too.

    def _turn(self) -> None:
        plan = self._scheduler.plan()
        if plan is None:
            self._deliver()
            self._check_idle()
        else:
            self._undelivered = self._step(plan)
            self._constraints.forget(self._undelivered)

    def _step(self, plan: StepPlan) -> EngineOutput:
        started_s = self._clock()
        try:
            handle = self._executor.submit(plan)
        except Exception as error:  # noqa: BLE001 - whatever an executor raises ends this step only
            self._deliver()
            return self._scheduler.fail(plan, _step_error(plan, error))
        masks = self._constraints.masks(plan)
        self._deliver()
        try:
            result = handle.sample(masks)
            self._scheduler.verify(plan, result)
        except Exception as error:  # noqa: BLE001 - as above
            return self._scheduler.fail(plan, _step_error(plan, error))
        return self._scheduler.commit(plan, self._constraints.follow(result), self._clock() - started_s)

    def _deliver(self) -> None:
        """Sends the last step's output, then what happened outside of steps: refusals, cancels, a changed state while idle."""
        output, self._undelivered = self._undelivered, None
        if output is not None:
            self._outbox.send(output)
        if self._scheduler.has_events or not self._scheduler.has_work:
            aside = self._scheduler.flush()
            if aside is not None:
                self._constraints.forget(aside)
                self._outbox.send(aside)

    def _check_idle(self) -> None:
        """A leak does not stop the service, but it must be seen."""
        try:
            self._scheduler.check_idle()
        except InvariantError as error:
            _log.error("engine bookkeeping is wrong, please report this: %s", error)


def _step_error(plan: StepPlan, error: Exception) -> OctavoError:
    """What the step's requests are told. Details of foreign exceptions go to the log only."""
    _log.error("step %d with %d sequences failed", plan.step, len(plan.rows), exc_info=error)
    if isinstance(error, OctavoError):
        return error
    return EngineError(f"the engine failed in this step ({type(error).__name__}); the request may be sent again")
