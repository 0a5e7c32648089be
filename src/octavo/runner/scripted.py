"""An executor without a model: emits exactly the tokens it is told to, when it is told to. For tests and `octavo
mock`, no benchmark.

Knows no text and no weights. It obeys the plans as the real runner does, so scheduling, streaming and failure are
real.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from octavo.contracts import RowPlan, RowResult, Slot, SlotStart, StepMasks, StepPlan, StepResult, TokenLogprobs


class RowFailure(Exception):
    """In a script: ends this request with an error; its neighbours in the step go on. Any other exception fails the
    step.
    """


Script = Callable[[SlotStart], Sequence[int | Exception]]
"""What a request generates: item i is its i-th generated token, or what goes wrong instead of it."""


class ScriptedExecutor:
    """Emits `script(start)[i]` as the i-th generated token of each request, and end-of-sequence after the script's
    end.

    A request without end-of-sequence ids repeats its script. The step that samples a request's first token takes
    `ttft_s`, others that sample take `itl_s`. Logprobs are made up: the token has -0.5, alternatives k = 1, 2, ...
    are the next ids with -0.5 - k. The same request at the same position always gets the same answer, also after
    preemption.
    """

    def __init__(self, script: Script, *, ttft_s: float = 0.0, itl_s: float = 0.0, vocab_size: int = 256) -> None:
        self._script = script
        self._ttft_s = ttft_s
        self._itl_s = itl_s
        self._vocab_size = vocab_size
        self._slots: dict[Slot, _Running] = {}

    def submit(self, plan: StepPlan) -> _ScriptedStep:
        """Applies releases and starts. Raises what a script raises."""
        for slot in plan.releases:
            self._slots.pop(slot, None)
        for start in plan.starts:
            self._slots[start.slot] = _Running(start, tuple(self._script(start)))
        for row in plan.rows:
            self._slots[row.slot].tokens += row.forced
        return _ScriptedStep(self, plan)

    def close(self) -> None:
        """Forgets all slots."""
        self._slots.clear()

    def _result(self, plan: StepPlan) -> StepResult:
        sampling = [row for row in plan.rows if row.sample]
        first = any(row.start + row.count == self._slots[row.slot].num_prompt_tokens for row in sampling)
        delay_s = self._ttft_s if first else self._itl_s
        if sampling and delay_s > 0:
            time.sleep(delay_s)
        return StepResult(step=plan.step, rows=tuple(self._row(row) for row in plan.rows))

    def _row(self, row: RowPlan) -> RowResult:
        running = self._slots[row.slot]
        sampling = running.start.sampling
        end = row.start + row.count
        for position in range(row.start, end):
            if position >= len(running.tokens):
                raise AssertionError(f"position {position} of slot {row.slot} is computed before it is known")
        prompt_logprobs = None
        if sampling.prompt_logprobs is not None and row.start < running.num_prompt_tokens:
            scored = running.tokens[row.start + 1 : min(end + 1, running.num_prompt_tokens)]
            prompt_logprobs = tuple(self._logprobs(token, sampling.prompt_logprobs) for token in scored)
        if not row.sample:
            return RowResult(slot=row.slot, prompt_logprobs=prompt_logprobs)
        item = running.item(end - running.num_prompt_tokens)
        if isinstance(item, RowFailure):
            return RowResult(slot=row.slot, error=str(item))
        if isinstance(item, Exception):
            raise item
        running.tokens.append(item)
        logprobs = None if sampling.logprobs is None else (self._logprobs(item, sampling.logprobs),)
        return RowResult(slot=row.slot, token_ids=(item,), logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def _logprobs(self, token: int, count: int) -> TokenLogprobs:
        count = self._vocab_size if count < 0 else min(count, self._vocab_size)
        top = tuple((token + k) % self._vocab_size for k in range(count))
        return TokenLogprobs((token, *top), (-0.5, *(-0.5 - k for k in range(count))), 1)


class _Running:
    """A request in a slot: what it knows, and what it will say."""

    def __init__(self, start: SlotStart, script: tuple[int | Exception, ...]) -> None:
        self.start = start
        self.script = script
        self.num_prompt_tokens = start.num_prompt_tokens
        self.tokens = list(start.token_ids)

    def item(self, index: int) -> int | Exception:
        if index < len(self.script):
            return self.script[index]
        if self.start.sampling.eos_token_ids:
            return self.start.sampling.eos_token_ids[0]
        return self.script[index % len(self.script)]


class _ScriptedStep:
    def __init__(self, executor: ScriptedExecutor, plan: StepPlan) -> None:
        self._executor = executor
        self._plan = plan

    def sample(self, masks: StepMasks | None = None) -> StepResult:
        """Waits as long as the step is told to take, and returns its tokens."""
        return self._executor._result(self._plan)
