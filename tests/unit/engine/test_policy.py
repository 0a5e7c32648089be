"""Queues and policies in readable cases: who is next, who gives way."""

from __future__ import annotations

import random
import time

import pytest

from octavo.config import SchedulerConfig
from octavo.contracts import RowResult, StepResult
from octavo.engine import Scheduler
from octavo.engine.kv import SequenceBlocks
from octavo.engine.policy import Fair, FirstComeFirstServed, Policy, Priority
from octavo.engine.queue import OrderedQueue
from octavo.engine.request import Request
from octavo.engine.settings import make_policy, prefill_bounds, tenant_weights
from octavo.errors import ConfigError
from support.fake_executor import VOCABULARY, Harness, layout, request


def free(_: Request) -> bool:
    return False


def arrivals(policy: Policy, *names: str, **fields: object) -> list[Request]:
    """Requests that arrive in this order; a name's letter is its tenant, and "+" makes it a long one."""
    made = []
    for name in names:
        number = next(_NUMBERS)
        spec = request(name, range(3), tenant=name[0], **fields)
        made.append(Request(spec, SequenceBlocks(1, None), 99, policy.order(spec, number)))
        made[-1].is_long = "+" in name
        policy.arrive(made[-1])
    return made


_NUMBERS = iter(range(10**9))


def served(policy: Policy, held: object = free) -> list[str]:
    """Names in the order in which the policy lets them run."""
    names = []
    while (one := policy.peek(held)) is not None:  # type: ignore[arg-type]
        policy.take(one)
        names.append(str(one.request_id))
    return names


def test_a_queue_keeps_order_whatever_is_taken_out() -> None:
    chance = random.Random(3)
    queue, expected = OrderedQueue(), {}
    requests = arrivals(FirstComeFirstServed(), *(f"r{number}" for number in range(200)))
    for _ in range(5000):
        one = chance.choice(requests)
        if one in expected:
            queue.discard(one)
            del expected[one]
        else:
            expected[one] = (chance.random(), one.order[1])
            queue.add(one, expected[one])
        first = queue.first
        assert (first is None) == (not expected)
        assert first is None or (first == (expected[first[1]], first[1]) and first[0] == min(expected.values()))
        assert len(queue) == len(expected)
        assert set(queue) == set(expected)
        assert len(queue._heap) <= 2 * len(expected) + 18


def test_first_come_first_served_lets_short_ones_pass_long_ones_that_are_held() -> None:
    policy = FirstComeFirstServed()
    arrivals(policy, "a", "b+", "c", "d+")
    assert len(policy) == 4
    assert served(policy, lambda request: True) == ["a", "c"]
    assert [request.request_id for request in policy] == ["b+", "d+"]
    assert served(policy) == ["b+", "d+"]


def test_a_preempted_request_comes_before_those_that_arrived_later() -> None:
    policy = FirstComeFirstServed()
    first, second, _ = arrivals(policy, "a", "b", "c")
    policy.take(first)
    policy.take(second)
    policy.put_back(first)
    policy.put_back(second)
    assert served(policy) == ["a", "b", "c"]


def test_priority_orders_by_level_and_age() -> None:
    policy = Priority(ageing_s=10.0)
    arrivals(policy, "later", arrival_s=100.0)
    arrivals(policy, "urgent", arrival_s=115.0, priority=-2)
    arrivals(policy, "patient", arrival_s=60.0, priority=3)
    arrivals(policy, "unimportant", arrival_s=95.0, priority=1)
    # 95, 100, 89.75, 104.97 s: the arrival, put off by the level.
    assert served(policy) == ["patient", "urgent", "later", "unimportant"]


def test_extreme_priorities_are_worth_an_hour_at_most() -> None:
    policy = Priority(ageing_s=60.0)
    arrivals(policy, "first", arrival_s=0.0)
    arrivals(policy, "most urgent", arrival_s=3601.0, priority=-(2**31))
    assert served(policy) == ["first", "most urgent"]
    levels = [-(2**31), -1000, -2, -1, 0, 1, 2, 1000, 2**31 - 1]
    keys = [policy.order(request("x", range(3), priority=level), 1)[0] for level in levels]
    assert keys == sorted(keys)
    assert len(set(keys)) == len(keys)


def test_only_those_of_less_priority_that_come_later_give_way() -> None:
    policy = Priority(ageing_s=10.0)
    running = [
        *arrivals(policy, "aged", arrival_s=0.0, priority=4),
        *arrivals(policy, "equal", arrival_s=30.0, priority=1),
        *arrivals(policy, "low", arrival_s=30.0, priority=4),
        *arrivals(policy, "lowest", arrival_s=35.0, priority=9),
    ]
    running.sort(key=lambda one: one.order)
    (waiting,) = arrivals(policy, "waiting", arrival_s=35.0, priority=1)
    assert [one.request_id for one in policy.yielding(waiting, running)] == ["lowest", "low"]
    assert policy.victim(running).request_id == "lowest"


def fair(weights: dict[str, float] | None = None, size: float = 0.1) -> Fair:
    return Fair(weights or {}, lambda request: size)


def test_the_tenant_that_had_least_is_next() -> None:
    policy = fair()
    requests = arrivals(policy, "a1", "a2", "a3", "b1", "b2")
    order = []
    while (one := policy.peek(free)) is not None:
        policy.take(one)
        policy.charge(one, 10)
        order.append(str(one.request_id))
    assert order == ["b1", "a1", "b2", "a2", "a3"]
    assert len(requests) == 5


def test_weights_scale_what_a_tenant_had() -> None:
    policy = fair({"a": 2.0})
    arrivals(policy, *(f"a{number}" for number in range(8)), *(f"b{number}" for number in range(4)))
    order = []
    for _ in range(9):
        one = policy.peek(free)
        assert one is not None
        policy.take(one)
        policy.charge(one, 10)
        order.append(str(one.request_id)[0])
    assert (order.count("a"), order.count("b")) == (6, 3)


def test_a_tenant_whose_long_prompts_are_held_leaves_its_turn_to_others() -> None:
    policy = fair()
    arrivals(policy, "a+")
    arrivals(policy, "b+", "b")
    for tenant in "aab":
        policy.charge(arrivals(policy, f"{tenant}x")[0], 5)
    assert served(policy, lambda request: request.spec.tenant == "a")[0] == "b+"
    policy = fair()
    running, waiting, other = arrivals(policy, "a+1", "a+2", "b+")
    assert policy.is_ahead(running, waiting)
    assert not policy.is_ahead(running, other)
    policy.take(running)
    assert policy.num_held([running], 1) == 1


def test_tenants_give_way_down_to_their_share_and_never_below() -> None:
    policy = fair()
    running = arrivals(policy, *(f"a{number}" for number in range(9)), "b0")
    for one in running:
        policy.take(one)
    (waiting,) = arrivals(policy, "b1")
    # Ten running of a tenth each: A holds nine, is entitled to five, so its four latest may be asked.
    assert [one.request_id for one in policy.yielding(waiting, running)] == ["a8", "a7", "a6", "a5"]
    assert policy.victim(running).request_id == "a8"
    half = running[:5] + arrivals(policy, "b2", "b3", "b4", "b5")
    assert policy.yielding(waiting, half + running[-1:]) == []
    (back,) = arrivals(policy, "a9")
    assert policy.yielding(back, half) == []
    # With nobody above its share the last that arrived is preempted.
    assert policy.victim(half).request_id == "b5"


def test_a_tenant_without_anything_running_may_ask_for_more_than_its_share() -> None:
    policy = Fair({}, lambda request: 0.7 if request.request_id == "b" else 0.1)
    running = arrivals(policy, *(f"a{number}" for number in range(10)))
    (large,) = arrivals(policy, "b")
    assert len(policy.yielding(large, running)) == 5


def test_ended_tenants_are_entitled_to_nothing() -> None:
    policy = fair()
    running = arrivals(policy, "a0", "a1", "a2", "a3")
    (waiting, gone) = arrivals(policy, "b0", "c0")
    assert len(policy.yielding(waiting, running)) == 0  # a third is more than A holds
    policy.take(gone)
    policy.leave(gone)
    assert policy.yielding(waiting, running) == []
    assert policy._entitled("a") == 0.5


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "weights", [("a",), ("a=",), ("=2",), ("a=0",), ("a=-1",), ("a=nan",), ("a=inf",), ("a=1", "a=2")]
)
def test_wrong_weights_are_refused(weights: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="tenant-weights"):
        tenant_weights(SchedulerConfig(tenant_weights=weights))


def test_settings_of_another_policy_are_refused() -> None:
    with pytest.raises(ConfigError, match="--priority-ageing needs --scheduling-policy priority"):
        make_policy(SchedulerConfig(priority_ageing=1.0), lambda request: 1.0)
    with pytest.raises(ConfigError, match="--tenant-weights needs --scheduling-policy fair"):
        make_policy(SchedulerConfig(scheduling_policy="priority", tenant_weights=("a=1",)), lambda request: 1.0)
    with pytest.raises(ConfigError, match="--long-prefill-token-threshold"):
        prefill_bounds(SchedulerConfig(enable_chunked_prefill=False, long_prefill_token_threshold=10), 512)
    with pytest.raises(ConfigError, match="--max-long-partial-prefills"):
        prefill_bounds(SchedulerConfig(enable_chunked_prefill=False, max_long_partial_prefills=1), 512)
    assert tenant_weights(SchedulerConfig(tenant_weights=("a=b=1.5",))) == {"a=b": 1.5}


# --- in the scheduler -----------------------------------------------------------------------------------------------


def test_preemptions_and_deferred_ones_are_counted_by_reason() -> None:
    harness = Harness(layout(60), max_num_seqs=2, scheduling_policy="priority")
    harness.add(request("a", range(6), 20, priority=1), request("b", range(20, 26), 20, priority=1))
    harness.step()
    harness.add(request("c", range(40, 46), 4))
    harness.step()
    stats = harness.outbox.outputs[-1].stats
    assert (stats.num_preemptions, stats.num_displaced, stats.num_waiting, stats.num_deferred) == (1, 1, 1, 0)
    assert (stats.num_prefill_rows, stats.num_prefill_tokens, stats.num_decode_rows) == (1, 6, 1)
    harness.run()
    harness.check_answers()
    harness = Harness(layout(60), max_num_batched_tokens=16)
    harness.add(*(request(name, range(start, start + 40)) for name, start in (("a", 0), ("b", 100), ("c", 200))))
    harness.step()
    stats = harness.outbox.outputs[-1].stats
    assert (stats.num_waiting, stats.num_deferred) == (2, 2)
    harness.run()
    harness.check_answers()


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_a_step_costs_as_many_rows_as_it_has_however_many_wait(policy: str) -> None:
    """Time per step with 64 running: 0.3 ms and less on an idle machine, here with slack for shared ones; linear in rows; and not growing
    with the queue."""

    def best_step_s(num_running: int, num_waiting: int) -> float:
        config = SchedulerConfig(max_num_seqs=num_running, scheduling_policy=policy)  # type: ignore[arg-type]
        scheduler = Scheduler(layout(4096, block_size=16), config, max_model_len=2048)
        for index in range(num_running + num_waiting):
            length = 400 if index % 3 == 0 and index > num_running else 8
            fields = {"tenant": "abcdefgh"[index % 8], "priority": index % 5 if policy == "priority" else 0}
            scheduler.add(request(f"r{index}", range(index, index + length), max_tokens=1000, **fields))
        times = []
        for _ in range(60):
            begin = time.thread_time()
            plan = scheduler.plan()
            planned = time.thread_time()
            assert plan is not None
            result = StepResult(
                step=plan.step,
                rows=tuple(
                    RowResult(slot=row.slot, token_ids=(VOCABULARY,) if row.sample else ()) for row in plan.rows
                ),
            )
            committing = time.thread_time()
            scheduler.commit(plan, result)
            times.append(planned - begin + time.thread_time() - committing)
        return min(times)

    few, many = best_step_s(64, 0), best_step_s(64, 10_000)
    assert few < 0.001
    assert many < 3 * few
    assert best_step_s(256, 0) < 8 * few  # if it grew with their square: 16
