"""A discrete-event simulation of serving: the real engine loop, scheduler and KV cache on a virtual clock; only the steps are not computed.

Each step takes what the cost model says (`octavo.bench.local.costs`), so hours of traffic run in seconds and every decision is the one that
the real engine would take. Nothing depends on the machine that simulates: equal traffic, settings and costs give equal results.

What is not modelled: text (outputs have the asked length), noise of the machine, and a client slower than the server.
"""

from __future__ import annotations

import heapq
import itertools
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from octavo.bench.figures import Outcome, by_kind, figures
from octavo.bench.local.costs import Costs
from octavo.bench.traffic import Job, Traffic, sessions
from octavo.config import Config
from octavo.contracts import (
    Add,
    EngineInput,
    EngineOutput,
    GenerateRequest,
    RequestId,
    RowResult,
    Shutdown,
    Slot,
    StepMasks,
    StepPlan,
    StepResult,
    TokenSampling,
)
from octavo.engine import EngineLoop, Scheduler
from octavo.errors import ConfigError
from octavo.frontend.build import budget_memory, resolve_scheduler

Progress = Callable[[int, int], None]
"""Called with (jobs ended, jobs in all)."""


class Simulation(msgspec.Struct, kw_only=True):
    """What came out: the stories of the jobs sent, in order of the traffic, and the engine's side."""

    outcomes: list[Outcome]
    engine: dict[str, float]

    def figures(self, goodput: dict[str, float] | None = None) -> dict[str, Any]:
        """As JSON-ready values: of all jobs, of each kind, and of the engine."""
        return figures(self.outcomes, goodput) | {"kinds": by_kind(self.outcomes, goodput), "engine": self.engine}


def simulate(traffic: Traffic, costs: Costs, config: Config, progress: Progress | None = None) -> Simulation:
    """Runs the traffic through a virtual server configured by the sections `cache` and `scheduler`, and `max_model_len`.

    Raises ConfigError for settings that a server of this model would refuse, and for traffic that cannot be simulated.
    """
    traffic.check()
    facts, asked = costs.model, config.model.max_model_len
    if asked is not None and not 1 <= asked <= facts.max_context:
        raise ConfigError(
            f"--max-model-len is {asked}, but this model's context is 1 to {facts.max_context} tokens",
            param="max_model_len",
        )
    budget = budget_memory(config, facts.groups, facts.max_context, facts.free_bytes, facts.weight_bytes)
    scheduling = resolve_scheduler(config.scheduler, budget.max_model_len)
    clock = _Clock()
    scheduler = Scheduler(
        budget.layout,
        scheduling,
        max_model_len=budget.max_model_len,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        least_part=facts.least_part,
        clock=clock,
    )
    world = _World(traffic, costs, clock, progress or (lambda *_: None))
    started = time.perf_counter()
    EngineLoop(scheduler, _Executor(costs, clock), world, world, clock).run()
    wall_s = time.perf_counter() - started
    engine = world.engine_figures()
    engine |= {"simulation_wall_s": wall_s, "wall_us_per_step": 1e6 * wall_s / max(engine["steps"], 1)}
    sent = [outcome for index, outcome in enumerate(world.outcomes) if index in world.sent]
    return Simulation(outcomes=sent, engine=engine)


class _Clock:
    """Virtual seconds. Only the executor (a step) and the inbox (waiting) let them pass."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class _Executor:
    """Answers every plan after the time that it would have taken. Every sampled token is id 0."""

    def __init__(self, costs: Costs, clock: _Clock) -> None:
        self._costs, self._clock = costs, clock
        self._answers: dict[tuple[Slot, int], RowResult] = {}

    def submit(self, plan: StepPlan) -> _Step:
        """Nothing happens before `sample`."""
        return _Step(self, plan)

    def close(self) -> None:
        """Holds nothing."""

    def result(self, plan: StepPlan) -> StepResult:
        rows, repeat = plan.rows, plan.repeat
        scheduler, serving = self._costs.scheduler, self._costs.serving
        num_sampled = repeat * sum(row.sample for row in rows)
        self._clock.now_s += (
            repeat * self._costs.step.step_s(rows)
            + scheduler.step
            + scheduler.row * len(rows)
            + serving.step
            + serving.token * num_sampled
        )
        return StepResult(step=plan.step, rows=tuple(self._answer(row.slot, repeat * row.sample) for row in rows))

    def _answer(self, slot: Slot, num_tokens: int) -> RowResult:
        answer = self._answers.get((slot, num_tokens))
        if answer is None:
            answer = self._answers[slot, num_tokens] = RowResult(slot=slot, token_ids=(0,) * num_tokens)
        return answer


class _Step:
    """`StepHandle`."""

    def __init__(self, executor: _Executor, plan: StepPlan) -> None:
        self._executor, self._plan = executor, plan

    def sample(self, masks: StepMasks | None = None) -> StepResult:
        return self._executor.result(self._plan)


class _World:
    """The clients: an `Inbox` that lets jobs arrive when they would, and an `Outbox` that notes what became of them."""

    def __init__(self, traffic: Traffic, costs: Costs, clock: _Clock, progress: Progress) -> None:
        self._traffic, self._clock, self._progress = traffic, clock, progress
        self._request_s = costs.serving.request
        jobs = traffic.jobs
        self.outcomes = [Outcome(kind=job.kind, tenant=job.tenant, sent_s=0.0) for job in jobs]
        self._next_of: dict[int, int] = {}
        self._due: list[tuple[float, int, int]] = []
        """(time, order, job): when jobs become ready to be sent."""
        self._order = itertools.count()
        for chain in sessions(jobs):
            self._next_of.update(itertools.pairwise(chain))
            self._make_due(jobs[chain[0]].at_s, chain[0])
        self._ready: deque[int] = deque()
        """Jobs that wait at the client because enough others run."""
        self._arriving: list[tuple[float, int, int]] = []
        """(time, order, job): sent, and not yet in the engine."""
        self.sent: set[int] = set()
        self._places = len(jobs) if traffic.max_concurrency is None else traffic.max_concurrency
        self._num_ended = 0
        self._steps: dict[str, array[float]] = {
            name: array("d") for name in ("seconds", "rows", "waiting", "kv_usage", "prefill_tokens")
        }
        self._num_preemptions = self._num_displaced = 0

    # --- inbox ------------------------------------------------------------------------------------------------------

    def receive(self, timeout_s: float | None) -> Sequence[EngineInput]:
        """Requests that have arrived by now; without any, time passes until the next one or the timeout. After the last, the end."""
        clock, arrived = self._clock, self._arrived()
        until_s = None if timeout_s is None else clock.now_s + timeout_s
        while not arrived and (until_s is None or clock.now_s < until_s):
            moments = [heap[0][0] for heap in (self._due, self._arriving) if heap]
            if not moments and until_s is None:
                return (Shutdown(),)
            clock.now_s = max(clock.now_s, min(moments if until_s is None else (*moments, until_s)))
            arrived = self._arrived()
        return (Add(requests=tuple(map(self._request, arrived))),) if arrived else ()

    def _arrived(self) -> list[int]:
        now_s = self._clock.now_s
        self._send(now_s)
        arrived = []
        while self._arriving and self._arriving[0][0] <= now_s:
            arrived.append(heapq.heappop(self._arriving)[2])
        return arrived

    def _send(self, now_s: float) -> None:
        """Sends what is due, at the moment it was due, as long as there are places."""
        while self._due and self._due[0][0] <= now_s:
            due_s, _, job = heapq.heappop(self._due)
            if self._places:
                self._depart(job, due_s)
            else:
                self._ready.append(job)

    def _depart(self, job: int, sent_s: float) -> None:
        if sent_s > self._traffic.until_s:
            return
        self.sent.add(job)
        self._places -= 1
        self.outcomes[job].sent_s = sent_s
        heapq.heappush(self._arriving, (sent_s + self._request_s, next(self._order), job))

    def _make_due(self, at_s: float, job: int) -> None:
        heapq.heappush(self._due, (at_s, next(self._order), job))

    def _request(self, index: int) -> GenerateRequest:
        job: Job = self._traffic.jobs[index]
        return GenerateRequest(
            request_id=RequestId(str(index)),
            prompt_token_ids=self._traffic.word_indices(job),
            sampling=TokenSampling(max_tokens=job.output_tokens, temperature=0.0, ignore_eos=True),
            tenant=job.tenant or "default",
            priority=job.priority,
            arrival_s=self._clock.now_s,
        )

    # --- outbox -----------------------------------------------------------------------------------------------------

    def send(self, output: EngineOutput) -> None:
        """Notes tokens and ends at the present moment, and lets the jobs go on that waited for an end."""
        now_s, stats = self._clock.now_s, output.stats
        if stats.num_prefill_rows or stats.num_decode_rows:
            for name, value in (
                ("seconds", stats.step_s),
                ("rows", stats.num_running),
                ("waiting", stats.num_waiting),
                ("kv_usage", stats.kv_usage),
                ("prefill_tokens", stats.num_prefill_tokens),
            ):
                self._steps[name].append(value)
        self._num_preemptions += stats.num_preemptions
        self._num_displaced += stats.num_displaced
        for event in output.events:
            outcome = self.outcomes[int(event.request_id)]
            if event.token_ids:
                outcome.token(now_s)
                outcome.output_tokens += len(event.token_ids)
            if event.error_message is not None:
                outcome.error = event.error_message
            if event.finish_reason is not None:
                self._end(int(event.request_id), now_s)
        for times in stats.finished:
            outcome = self.outcomes[int(times.request_id)]
            outcome.prompt_tokens, outcome.cached_tokens = times.num_prompt_tokens, times.num_cached_tokens

    def _end(self, index: int, now_s: float) -> None:
        self._num_ended += 1
        self._progress(self._num_ended, len(self.outcomes))
        self._places += 1
        following = self._next_of.get(index)
        if following is not None:
            job = self._traffic.jobs[following]
            self._make_due(max(job.at_s, now_s + job.think_s), following)
        # Who waited longest goes first; what has just become due is behind them.
        while self._places and self._ready:
            self._depart(self._ready.popleft(), now_s)

    def engine_figures(self) -> dict[str, float]:
        """The engine's side: steps, how full they and the cache were (means over time), preemptions."""
        seconds = np.array(self._steps["seconds"])
        if not len(seconds):
            return {"steps": 0}

        def over_time(name: str) -> float:
            return float(np.average(self._steps[name], weights=np.maximum(seconds, 1e-12)))

        return {
            "steps": len(seconds),
            "simulated_s": self._clock.now_s,
            "step_p50_ms": float(np.median(seconds) * 1e3),
            "step_p95_ms": float(np.percentile(seconds, 95) * 1e3),
            "running_mean": over_time("rows"),
            "waiting_mean": over_time("waiting"),
            "waiting_max": max(self._steps["waiting"]),
            "kv_usage_mean": over_time("kv_usage"),
            "kv_usage_max": max(self._steps["kv_usage"]),
            "prefill_tokens_per_step": float(np.mean(self._steps["prefill_tokens"])),
            "preemptions": self._num_preemptions,
            "displaced": self._num_displaced,
        }
