"""Log lines: their form, which never shows what a client sent, and a line for each request where that is wanted.

Messages of our own hold no prompts. Messages of exceptions may quote anything, so a trace is written without them: where it happened, and
which kind of exception it was. Knows no HTTP.
"""

from __future__ import annotations

import logging
import sys
import traceback
from types import TracebackType

from octavo.obs.events import Event, RequestReceived, StepCompleted

_log = logging.getLogger("octavo.requests")


class PrivateFormatter(logging.Formatter):
    """Traces without the messages of their exceptions; those of the system keep theirs."""

    def formatException(  # noqa: N802 - logging's name
        self, ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
    ) -> str:
        """The trace of an exception, and of those that it came from."""
        error = ei[1]
        chain: list[BaseException] = []
        while error is not None and error not in chain:
            chain.append(error)
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        blocks = []
        for one in reversed(chain):
            frames = traceback.format_list(traceback.extract_tb(one.__traceback__))
            detail = f": {one.strerror}" if isinstance(one, OSError) and one.strerror else ""
            blocks.append(f"Traceback (most recent call last):\n{''.join(frames)}{type(one).__qualname__}{detail}")
        return "\n\nand then\n\n".join(blocks)


def set_up() -> None:
    """Log lines on stderr, from INFO on. Does nothing where logging has been set up already."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrivateFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def log_requests(event: Event) -> None:
    """A sink of the event log: one line when a request is accepted, one when each of its sequences ends. No text, no key."""
    if isinstance(event, RequestReceived):
        _log.info(
            "%s: %s of %s, %d prompt tokens, %d choices",
            event.request_id,
            event.endpoint,
            event.tenant,
            event.num_prompt_tokens,
            event.choices,
        )
    elif isinstance(event, StepCompleted):
        for times in event.stats.finished:
            _log.info(
                "%s: %s after %.3f s, %d tokens, %d prompt tokens cached",
                times.request_id,
                times.finish_reason.value,
                times.finished_s - times.arrival_s,
                times.num_generated_tokens,
                times.num_cached_tokens,
            )
