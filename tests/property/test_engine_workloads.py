"""Whatever runs beside a request, its answer is the one it gives alone; every request ends once; nothing is left held."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.contracts import FinishReason, GenerateRequest, KVLayout, RequestId, Retention
from octavo.engine import blocks_needed, capacity_tokens
from support.fake_executor import FORCES, VOCABULARY, FakeDisk, Faults, Harness, layout, request

MAX_MODEL_LEN = 64
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

STEMS = [tuple(range(40)), (*range(9), *range(50, 81)), (7,) * 40]
"""Prompts are beginnings of these with a short tail, so that many share a prefix and differ inside or at the edge of a block."""


@st.composite
def specs(draw: st.DrawFn, name: str) -> GenerateRequest:
    stem = draw(st.sampled_from(STEMS))
    tail = draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=3))
    prompt = (*stem[: draw(st.integers(0, 40))], *tail) or (1,)
    max_tokens = draw(st.integers(0, 16))
    return request(
        name,
        prompt,
        max_tokens,
        pin=draw(st.booleans()),
        namespace=draw(st.sampled_from([b"", b"", b"", b"salt"])),
        min_tokens=draw(st.integers(0, min(3, max_tokens))),
        eos_token_ids=tuple(draw(st.sets(st.integers(0, VOCABULARY - 1), max_size=6))),
        stop_token_ids=tuple(draw(st.sets(st.integers(0, VOCABULARY - 1), max_size=6))),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(st.sampled_from([None, 0])),
        prompt_logprobs=draw(st.sampled_from([None, None, 0])),
        tenant=draw(st.sampled_from(["default", "a", "b"])),
        priority=draw(st.sampled_from([0, 0, -1, 3])),
        grammar=draw(st.sampled_from([None, FORCES])),
    )


def total(spec: GenerateRequest) -> int:
    return min(MAX_MODEL_LEN, len(spec.prompt_token_ids) + spec.sampling.max_tokens)


@st.composite
def layouts(draw: st.DrawFn, longest: int, budget: int, pinned: int) -> KVLayout:
    """Pools from exactly what the longest request needs beside pinned tokens up to plenty, in one or two groups."""
    window = draw(st.sampled_from([None, 1, 3, 8, 20, 100]))
    draft = layout(*[1] * draw(st.integers(1, 2)), block_size=draw(st.sampled_from([1, 2, 4, 16])), window=window)
    sizes = [
        draw(st.integers(0, 12))
        + pinned // draft.block_size
        + blocks_needed(group, longest, block_size=draft.block_size, max_num_batched_tokens=budget)
        for group in draft.groups
    ]
    kv = msgspec.structs.replace(draft, num_blocks=tuple(sizes))
    capacity = capacity_tokens(kv, budget)
    assert capacity is None or capacity >= longest
    return kv


@st.composite
def harnesses(draw: st.DrawFn, requests: Sequence[GenerateRequest], faults: Faults | None = None) -> Harness:
    max_num_seqs = draw(st.integers(1, 5))
    chunked = draw(st.booleans())
    budget = draw(st.integers(max_num_seqs, 40)) if chunked else MAX_MODEL_LEN
    caching = draw(st.sampled_from([True, True, False]))
    pinned = draw(st.sampled_from([0, 0, 16, 40])) if caching else 0
    kv = draw(layouts(max(map(total, requests)), budget, pinned))
    policy = draw(st.sampled_from(["fcfs", "priority", "fair"]))
    return Harness(
        kv,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=caching,
        max_pinned_tokens=pinned,
        swap_blocks=draw(st.sampled_from([0, 3, 100])),
        disk_blocks=draw(st.sampled_from([0, 4, 100])) if caching else 0,
        disk=FakeDisk(fetch_steps=draw(st.integers(0, 3)), max_writes=draw(st.sampled_from([1, 1000]))),
        enable_chunked_prefill=chunked,
        least_part=draw(st.integers(1, 3)),
        faults=faults,
        long_prefill_token_threshold=draw(st.sampled_from([None, 0, 1, 3, 10])) if chunked else None,
        max_long_partial_prefills=draw(st.sampled_from([None, 2])) if chunked else None,
        num_scheduler_steps=draw(st.sampled_from([None, None, 2, 8])),
        scheduling_policy=policy,
        priority_ageing=draw(st.sampled_from([None, 1.0])) if policy == "priority" else None,
        tenant_weights=draw(st.sampled_from([(), ("a=3",)])) if policy == "fair" else (),
    )


@settings(max_examples=200, deadline=None, suppress_health_check=SLOW)
@given(st.data())
def test_any_mixture_gives_each_request_its_own_answer(data: st.DataObject) -> None:
    """Random lengths, arrivals, prefix sharing, pools, chunks and windows; nobody is cancelled."""
    requests = [data.draw(specs(f"r{index}")) for index in range(data.draw(st.integers(1, 10)))]
    harness = data.draw(harnesses(requests))
    gaps = data.draw(st.lists(st.integers(0, 4), min_size=len(requests), max_size=len(requests)))
    for spec, gap in zip(requests, gaps, strict=True):
        for _ in range(gap):
            harness.step()
        harness.add(spec)
    harness.run()
    harness.check_answers()


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@settings(max_examples=40, deadline=None, suppress_health_check=SLOW)
@given(data=st.data())
def test_a_pool_of_one_requests_need_serves_all(policy: str, data: st.DataObject) -> None:
    """The tightest pool: constant preemption, no livelock, and the first in the policy's order is never put back."""
    requests = [
        request(
            f"r{index}",
            STEMS[index % 3][: data.draw(st.integers(1, 40))],
            data.draw(st.integers(1, 20)),
            tenant=data.draw(st.sampled_from("ab")),
            priority=0 if index == 0 else data.draw(st.integers(0, 3)),
        )
        for index in range(6)
    ]
    budget = data.draw(st.sampled_from([6, 13, 64]))
    size = data.draw(st.sampled_from([1, 4, 8]))
    need = -(-max(map(total, requests)) // size)
    harness = Harness(
        layout(need, block_size=size),
        max_num_seqs=6,
        max_num_batched_tokens=budget,
        max_model_len=MAX_MODEL_LEN,
        least_part=1,
        scheduling_policy=policy,
    )
    harness.add(*requests)
    harness.run()
    harness.check_answers()
    finished = {times.request_id: times for output in harness.outbox.outputs for times in output.stats.finished}
    assert finished[RequestId("r0")].num_preemptions == 0


class EngineMachine(RuleBasedStateMachine):
    """Everything that can happen to a scheduler, in any order: the machine looks for a sequence that breaks an invariant."""

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.faults = Faults()
        probe = request("probe", range(40), 24)
        self.harness = data.draw(harnesses([probe], self.faults))
        self.touched: set[str] = set()
        self.num_added = 0

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        self.harness.add(data.draw(specs(f"r{self.num_added}")))
        self.num_added += 1

    @rule(in_flight=st.lists(st.integers(0, 20), max_size=2), steps=st.integers(1, 4))
    def steps(self, in_flight: list[int], steps: int) -> None:
        names = [f"r{number}" for number in in_flight]
        self.touched.update(names)
        self.harness.step(cancel_in_flight=names)
        for _ in range(steps - 1):
            self.harness.step()

    @rule(number=st.integers(0, 20))
    def cancel(self, number: int) -> None:
        self.touched.add(f"r{number}")
        self.harness.cancel(f"r{number}")

    @precondition(lambda self: self.harness.scheduler.has_work)
    @rule(where=st.sampled_from(["submit_before", "submit_after", "sample"]))
    def a_step_fails(self, where: str) -> None:
        getattr(self.faults, where).add(len(self.harness.executor.plans) + 1)
        plan = self.harness.step()
        assert plan is not None or not self.harness.scheduler.has_work  # all were over a deadline

    @rule(data=st.data(), phase=st.sampled_from(["waiting", "prefill", "decode"]), limit_s=st.integers(1, 6))
    def add_with_a_deadline(self, data: st.DataObject, phase: str, limit_s: int) -> None:
        name = f"r{self.num_added}"
        limits = {f"{phase}_timeout_s": float(limit_s), "arrival_s": self.harness.clock.now_s}
        self.harness.add(msgspec.structs.replace(data.draw(specs(name)), **limits))
        self.touched.add(name)
        self.num_added += 1

    @rule(number=st.integers(0, 20))
    def a_row_fails(self, number: int) -> None:
        self.faults.rows.add(RequestId(f"r{number}"))

    @rule(stem=st.sampled_from([None, *STEMS]), length=st.integers(0, 40))
    def unpin(self, stem: tuple[int, ...] | None, length: int) -> None:
        self.harness.scheduler.unpin(None if stem is None else stem[:length], b"")
        self.harness.scheduler.check()

    @precondition(lambda self: self.harness.disk.files)
    @rule(number=st.integers(0, 1000))
    def a_file_is_damaged(self, number: int) -> None:
        files = list(self.harness.disk.files)
        self.harness.disk.damaged.add(files[number % len(files)])

    @rule()
    def reset_prefix_cache(self) -> None:
        self.harness.scheduler.reset_prefix_cache()
        self.harness.scheduler.check()
        assert all(pool.num_cached <= pool.num_blocks - pool.num_free for pool in self.harness.scheduler._kv.pools)

    @invariant()
    def at_most_one_group_is_short(self) -> None:
        if hasattr(self, "harness"):
            assert 0.0 <= self.harness.scheduler.kv_usage <= 1.0

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.harness.run()
        failed = {
            name for name, answer in self.harness.outbox.answers.items() if answer.finish_reason is FinishReason.ERROR
        }
        self.harness.check_answers(except_for=[*self.touched, *failed])


EngineMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=SLOW
)
TestEngineMachine = EngineMachine.TestCase


@settings(max_examples=100, deadline=None)
@given(
    window=st.integers(1, 50), budget=st.integers(1, 50), size=st.sampled_from([1, 2, 8, 16]), start=st.integers(0, 200)
)
def test_blocks_needed_bounds_every_alignment_of_a_window(window: int, budget: int, size: int, start: int) -> None:
    kv = layout(1, 1, block_size=size, window=window)
    assert kv.groups[1].retention is Retention.WINDOW
    first, last = max(0, start - window + 1), start + budget - 1
    held = last // size - first // size + 1
    assert held <= blocks_needed(kv.groups[1], last + 1, block_size=size, max_num_batched_tokens=budget)
    tightest = blocks_needed(kv.groups[1], 10**6, block_size=size, max_num_batched_tokens=budget)
    alignments = range(window - 1, window - 1 + size)
    assert tightest == max((at + budget - 1) // size - (at - window + 1) // size + 1 for at in alignments)
