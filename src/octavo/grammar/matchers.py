"""Matchers beside an engine loop: made of sources in a thread of their own, they mask and follow tokens. Knows no schemas, no steps.

Sources have been compiled before, in the limited process of `helper`, so that making a matcher takes about as long and as much memory as
it did there. Compiled sources are kept and copied. llguidance's copies share what their lexer has found out so far, which makes them fast,
but also its bounds: a copy that reaches one is made anew and reads its tokens again, so that no output depends on others.
Masks and compiling run in native code without the GIL.
"""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from octavo.contracts import MaskBits, RequestId, Slot
from octavo.grammar.limits import MAX_FORCED_BYTES, parser_limits
from octavo.grammar.tokens import Spell, TokenTable, make_tokenizer

_log = logging.getLogger("octavo")

CACHE_BYTES = 128 << 20
"""Compiled sources that are kept, by the estimate of `_cost_bytes`."""
_NICE = 19
"""The compiling thread gives way to those that compute steps."""


class _Matcher:
    """One output's."""

    __slots__ = ("native", "problem", "source", "token_ids")

    def __init__(self, source: str, native: Any) -> None:
        self.source = source
        self.native = native
        self.token_ids: list[int] = []
        self.problem: str | None = None
        """Why it is to go no further."""

    def take(self, token_ids: list[int]) -> None:
        self.token_ids += token_ids
        self.native.consume_tokens(token_ids)


class MatcherPool:
    """`contracts.Grammar` by llguidance.

    `load` gives the vocabulary, and a way to spell texts with it; it is called once, when grammars are first needed. `num_threads` compute
    masks.
    """

    def __init__(
        self, load: Callable[[], tuple[TokenTable, Spell]], *, num_threads: int, cache_bytes: int = CACHE_BYTES
    ) -> None:
        self._load = load
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        self._row_words = 0
        self._eos_ids: frozenset[int] = frozenset()
        self._matchers: dict[RequestId, _Matcher] = {}
        self._waiting: dict[str, list[RequestId]] = {}
        """By the source that is being compiled for them."""
        self._ready: list[RequestId] = []
        """Whose source was there already."""
        self._compiled: queue.SimpleQueue[tuple[str, Any, str | None]] = queue.SimpleQueue()
        self._worn: set[str] = set()
        """Sources whose shared lexer has reached a bound."""
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._kept_bytes = 0
        self._cache_bytes = cache_bytes
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="octavo-grammar", initializer=_give_way)
        self._masking = ThreadPoolExecutor(1, thread_name_prefix="octavo-masks")
        self._native: Any = None

    def prepare(self) -> None:
        """Loads the vocabulary and makes llguidance's view of it."""
        with self._lock:
            if self._tokenizer is not None:
                return
            from llguidance import LLExecutor

            table, spell = self._load()
            self._row_words = -(-len(table.pieces) // 32)
            self._eos_ids = frozenset(table.eos_ids)
            self._native = LLExecutor(num_threads=self._num_threads)
            self._tokenizer = make_tokenizer(table, spell)

    def open(self, request_id: RequestId, source: str) -> None:
        """See `contracts.Grammar`."""
        if source in self._worn:
            self._worn.discard(source)
            self._drop(source)
        if source in self._kept:
            self._kept.move_to_end(source)
            self._matchers[request_id] = _Matcher(source, self._kept[source].deep_copy())
            self._ready.append(request_id)
        elif source in self._waiting:
            self._waiting[source].append(request_id)
        else:
            self._waiting[source] = [request_id]
            self._compiling.submit(self._compile, source)

    def opened(self) -> Sequence[tuple[RequestId, str | None]]:
        """See `contracts.Grammar`."""
        news: list[tuple[RequestId, str | None]] = [(request_id, None) for request_id in self._ready]
        self._ready.clear()
        with suppress(queue.Empty):
            while True:
                source, native, problem = self._compiled.get_nowait()
                if native is not None:
                    self._keep(source, native)
                for request_id in self._waiting.pop(source):
                    news.append((request_id, problem))
                    if native is not None:
                        self._matchers[request_id] = _Matcher(source, native.deep_copy())
        return news

    def masks(self, rows: Sequence[tuple[Slot, RequestId]]) -> _Masks:
        """See `contracts.Grammar`."""
        matchers = [self._matchers[request_id] for _, request_id in rows]
        return _Masks([slot for slot, _ in rows], self._masking.submit(self._fill, matchers))

    def advance(self, request_id: RequestId, token: int, *, jump: bool) -> Sequence[int]:
        """See `contracts.Grammar`. A token that the grammar does not allow leaves a matcher that allows none."""
        matcher = self._matchers[request_id]
        matcher.take([token])
        # The same as taking tokens for as long as the mask leaves one, which would cost a mask each. The next mask looks for them too.
        forced: list[int] = matcher.native.compute_ff_tokens()
        if len(forced) > MAX_FORCED_BYTES:  # of a byte at least
            matcher.problem = (
                f"it leaves no choice in {len(forced)} tokens at a time; at most {MAX_FORCED_BYTES} bytes are allowed"
            )
            return ()
        if not jump:
            return ()
        for place, following in enumerate(forced):
            if following in self._eos_ids:
                del forced[place:]
                break
        if forced:
            matcher.take(forced)
        return forced

    def close(self, request_id: RequestId) -> None:
        """See `contracts.Grammar`."""
        if self._matchers.pop(request_id, None) is None:
            for waiting in self._waiting.values():
                if request_id in waiting:
                    waiting.remove(request_id)

    def stop(self) -> None:
        """Ends the threads. Idempotent."""
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self._masking.shutdown(wait=True, cancel_futures=True)

    # --- in the threads ---------------------------------------------------------------------------------------------

    def _compile(self, source: str) -> None:
        native, problem = None, None
        try:
            self.prepare()
            native = self._make(source)
            # A first mask fills caches that the copies then have.
            native.compute_bitmask()
            if native.is_error():
                native, problem = None, f"the grammar cannot be compiled: {_reason(native)}"
        except BaseException as error:  # noqa: BLE001 - whatever native code raises, the request must hear of it
            _log.error("a grammar could not be compiled", exc_info=error)
            native, problem = None, f"the grammar cannot be compiled ({type(error).__name__})"
        self._compiled.put((source, native, problem))

    def _make(self, source: str) -> Any:
        from llguidance import LLMatcher

        return LLMatcher(self._tokenizer, source, log_level=0, limits=parser_limits())

    def _fill(self, matchers: Sequence[_Matcher]) -> MaskBits:
        row_bytes = 4 * self._row_words
        words = bytearray(row_bytes * len(matchers))
        address = ctypes.addressof((ctypes.c_char * len(words)).from_buffer(words))
        natives = [(matcher.native, row) for row, matcher in enumerate(matchers) if matcher.problem is None]
        if natives:
            self._native.unsafe_compute_mask_ptr(natives, address, row_bytes, len(matchers))
        failures: dict[int, str] = {}
        for row, matcher in enumerate(matchers):
            if matcher.problem is not None:
                failures[row] = f"the output cannot go on under its grammar: {matcher.problem}"
                continue
            if matcher.native.is_error():
                self._worn.add(matcher.source)
                matcher.native = self._make(matcher.source)
                matcher.native.consume_tokens(matcher.token_ids)
                matcher.native.unsafe_compute_mask_ptr(address + row * row_bytes, row_bytes)
            if matcher.native.is_error():
                failures[row] = f"the output cannot go on under its grammar: {_reason(matcher.native)}"
                words[row * row_bytes : (row + 1) * row_bytes] = bytes(row_bytes)
        return MaskBits(words, self._row_words, failures)

    # --- kept sources -----------------------------------------------------------------------------------------------

    def _keep(self, source: str, native: Any) -> None:
        """Keeps a compiled source; the least recently used ones go."""
        self._drop(source)
        self._kept[source] = native
        self._kept_bytes += _cost_bytes(source)
        while self._kept_bytes > self._cache_bytes and len(self._kept) > 1:
            self._drop(next(iter(self._kept)))

    def _drop(self, source: str) -> None:
        if source in self._kept:
            self._kept_bytes -= _cost_bytes(source)
            # A large one takes milliseconds to free, which a step need not wait for.
            self._compiling.submit(_let_go, [self._kept.pop(source)])


class _Masks:
    """`contracts.StepMasks`."""

    def __init__(self, slots: Sequence[Slot], bits: Future[MaskBits]) -> None:
        self.slots = slots
        self._bits = bits

    def wait(self) -> MaskBits:
        return self._bits.result()


def _let_go(natives: list[Any]) -> None:
    natives.clear()


def _reason(native: Any) -> str:
    return next(iter(str(native.get_error()).splitlines()), "")[:200]


def _cost_bytes(source: str) -> int:
    """Memory of a compiled source: for large schemas measured at 90 to 160 times its text, and for small ones below this least."""
    return (256 << 10) + 160 * len(source)


def _give_way() -> None:
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
