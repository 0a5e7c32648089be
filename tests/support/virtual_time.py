"""A server in virtual time: the real scheduler, requests that come when they are due, and steps that take what a cost model says.

Tokens are all alike and nothing is computed, so a minute of load takes a second, and every run gives the same figures.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from octavo.config import SchedulerConfig
from octavo.contracts import (
    FinishReason,
    GenerateRequest,
    KVGroup,
    KVLayout,
    RequestId,
    RowResult,
    StepPlan,
    StepResult,
    TokenSampling,
)
from octavo.engine import DEFAULT_LEAST_PART, Scheduler

BASE_S, TOKEN_S = 0.008, 0.0009
"""About what a step and each of its tokens cost with a model of 135 M parameters on two cores."""


@dataclass
class Story:
    """What happened to one request, in seconds of virtual time."""

    spec: GenerateRequest
    token_s: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error_code: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.spec.arrival_s

    @property
    def itl_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.token_s, self.token_s[1:], strict=False)]


class VirtualServer:
    """One scheduler and its load. `check` calls the invariants after every step, or part of one; each takes at least `base_s`."""

    def __init__(
        self,
        num_blocks: int = 4096,
        *,
        check: bool = False,
        max_model_len: int = 8192,
        least_part: int | None = DEFAULT_LEAST_PART,
        base_s: float = BASE_S,
        **config: object,
    ) -> None:
        self._base_s = base_s
        self.now_s = 0.0
        layout = KVLayout(block_size=16, groups=(KVGroup(layers=(0,)),), num_blocks=(num_blocks,))
        self.scheduler = Scheduler(
            layout,
            SchedulerConfig(**config),  # type: ignore[arg-type]
            max_model_len=max_model_len,
            least_part=least_part,
            clock=lambda: self.now_s,
        )
        self.stories: dict[str, Story] = {}
        self.steps: list[tuple[float, StepPlan]] = []
        """When each step, or part of one, ended, and what it was."""
        self.num_preemptions = 0
        self.num_computed = 0
        self._check = check
        self._due: list[tuple[float, int, GenerateRequest]] = []
        self._numbers = count()
        self._on_end: dict[str, Callable[[], None]] = {}

    def add(
        self,
        kind: str,
        num_prompt_tokens: int,
        max_tokens: int,
        at_s: float | None = None,
        on_end: Callable[[], None] | None = None,
        **fields: object,
    ) -> str:
        """A request with a prompt of its own that comes at a time, or now. Returns its name, which starts with `kind`."""
        number = next(self._numbers)
        name = f"{kind}-{number}"
        at_s = self.now_s if at_s is None else at_s
        spec = GenerateRequest(
            request_id=RequestId(name),
            prompt_token_ids=(number + 1, *range(num_prompt_tokens - 1)),
            sampling=TokenSampling(max_tokens=max_tokens),
            arrival_s=at_s,
            **fields,  # type: ignore[arg-type]
        )
        heapq.heappush(self._due, (at_s, number, spec))
        if on_end is not None:
            self._on_end[name] = on_end
        return name

    def keep(
        self, kind: str, num: int, num_prompt_tokens: int, max_tokens: int, until_s: float, **fields: object
    ) -> None:
        """`num` clients that send one request after the other until a time. Lengths vary by half, so that they do not keep step."""
        chance = random.Random(kind)

        def again() -> None:
            if self.now_s < until_s:
                lengths = (round(length * chance.uniform(0.5, 1.5)) for length in (num_prompt_tokens, max_tokens))
                self.add(kind, *lengths, on_end=again, **fields)

        for _ in range(num):
            again()

    def run(self, until_s: float = float("inf")) -> None:
        """Runs until nothing is left, or until a time."""
        while self.now_s < until_s:
            while self._due and self._due[0][0] <= self.now_s:
                spec = heapq.heappop(self._due)[2]
                self.stories[spec.request_id] = Story(spec)
                self.scheduler.add(spec)
            plan = self.scheduler.plan()
            if plan is not None:
                self._step(plan)
            elif self._due:
                self.now_s = self._due[0][0]
            else:
                break
            self._take(self.scheduler.flush())

    def _step(self, plan: StepPlan) -> None:
        self.now_s += self._base_s + TOKEN_S * plan.num_tokens
        self.num_computed += plan.num_tokens
        rows = tuple(RowResult(slot=row.slot, token_ids=(1,) if row.sample else ()) for row in plan.rows)
        result = StepResult(step=plan.step, rows=rows)
        self.scheduler.verify(plan, result)
        self.steps.append((self.now_s, plan))
        self._take(self.scheduler.commit(plan, result))
        if self._check:
            self.scheduler.check()

    def _take(self, output: object) -> None:
        if output is None:
            return
        self.num_preemptions += output.stats.num_preemptions  # type: ignore[attr-defined]
        for event in output.events:  # type: ignore[attr-defined]
            story = self.stories[event.request_id]
            story.token_s.extend(self.now_s for _ in event.token_ids)
            if event.finish_reason is not None:
                story.finish_reason, story.error_code = event.finish_reason, event.error_code
                on_end = self._on_end.pop(event.request_id, None)
                if on_end is not None:
                    on_end()

    def tokens_per_step(self) -> list[int]:
        """Tokens computed in each step, all its parts together."""
        tokens: dict[int, int] = {}
        for _, plan in self.steps:
            tokens[plan.step] = tokens.get(plan.step, 0) + plan.num_tokens
        return list(tokens.values())

    def of(self, kind: str) -> Iterator[Story]:
        """The stories of a kind that got a token."""
        return (story for name, story in self.stories.items() if name.startswith(f"{kind}-") and story.token_s)

    def num_tokens(self, kind: str = "", until_s: float = float("inf")) -> int:
        """Tokens that requests of a kind were given by a time."""
        return sum(
            sum(at_s <= until_s for at_s in story.token_s)
            for name, story in self.stories.items()
            if name.startswith(kind)
        )


def p95(values: Sequence[float]) -> float:
    """The value that 95 of 100 do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, -(-95 * len(ordered) // 100) - 1)]
