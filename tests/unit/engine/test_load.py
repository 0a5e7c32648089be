"""What users feel under load, in virtual time: long prompts beside short ones, floods beside a single caller, and that everything ends."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

import pytest

from octavo.contracts import FinishReason
from octavo.engine import draft
from support.virtual_time import BASE_S, TOKEN_S, VirtualServer, p95

POLICIES = ["fcfs", "priority", "fair"]
FULL_STEP_S = BASE_S + TOKEN_S * 512


def durations(server: VirtualServer) -> list[float]:
    return [end - begin for (begin, _), (end, _) in zip(server.steps, server.steps[1:], strict=False)]


def useful_tokens(server: VirtualServer) -> int:
    """Prompt and output tokens of all that got an answer: what was computed again does not count."""
    started = (story for story in server.stories.values() if story.token_s)
    return sum(len(story.spec.prompt_token_ids) + len(story.token_s) for story in started)


# --- long prompts and short ones ------------------------------------------------------------------------------------


def loaded(**config: object) -> tuple[float, float]:
    """p95 TTFT of prompts up to 64 tokens beside 16 streams and 3 clients with prompts of 3,000 tokens; and the median step."""
    server = VirtualServer(**config)
    for _ in range(16):
        server.add("stream", 60, 4000)
    server.keep("long", 3, 3000, 4, until_s=40)
    chance = random.Random(1)
    at_s = 1.0
    while at_s < 35:
        at_s += chance.expovariate(2)
        server.add("short", chance.randint(8, 64), 16, at_s=at_s)
    server.run(40)
    shorts = list(server.of("short"))
    assert len(shorts) > 50
    return p95([story.ttft_s for story in shorts]), statistics.median(durations(server))


def test_short_prompts_get_in_beside_long_ones() -> None:
    ttft_s, step_s = loaded()
    assert ttft_s <= 2.3 * step_s
    assert ttft_s <= 0.25
    unbounded_s, unbounded_step_s = loaded(long_prefill_token_threshold=0)
    assert unbounded_s > 4 * unbounded_step_s


@pytest.mark.parametrize(("num_streams", "p95_gain"), [(32, 0.85), (48, 0.65), (60, 0.65)])
def test_short_prompts_do_not_wait_for_all_streams_twice(num_streams: int, p95_gain: float) -> None:
    """They wait for none of the streams in the same step, and beside 48 or more only for half of those that are being computed. They get
    their first token a median gap earlier or more; the streams get theirs about as if all were computed at once."""
    found = {}
    for least_part in (16, None):
        server = VirtualServer(check=True, least_part=least_part, base_s=0.002)
        server.keep("stream", num_streams, 32, 225, until_s=60)
        chance = random.Random(7)
        at_s = 5.0
        while (at_s := at_s + chance.expovariate(2)) < 55:
            server.add("short", chance.randint(1, 64), 8, at_s=at_s)
        server.run(60)
        streams = [gap for story in server.of("stream") for gap in story.itl_s]
        found[least_part] = (
            statistics.median(story.ttft_s for story in server.of("short")) / statistics.median(streams),
            p95([story.ttft_s for story in server.of("short")]),
            p95(streams),
            server.num_tokens("stream"),
        )
    (ttft, p95_ttft_s, itl_s, num_tokens), together = found.values()
    assert ttft <= together[0] - 1.0
    assert p95_ttft_s <= p95_gain * together[1]
    assert itl_s <= 1.2 * together[2]
    assert num_tokens >= 0.95 * together[3]


def test_prompts_of_one_token_that_keep_coming_do_not_hold_up_streams() -> None:
    """A new one comes with every forward. A stream waits for a few of those, not for as many as there are tokens to spare: of
    both parts of the streams two go ahead of the first and one of the second."""
    server = VirtualServer(max_num_seqs=200)
    for _ in range(64):
        server.add("stream", 4, 100)
    server.run(1.0)
    for _ in range(200):
        server.add("tiny", 1, 1)
        server.run(server.now_s + 1e-9)
    numbers = [plan.step for _, plan in server.steps]
    assert max(numbers.count(number) for number in set(numbers)) == draft.MOST_AHEAD + 1 + 2


def test_a_long_prompt_every_few_seconds_beside_chats() -> None:
    def mixed(long: bool, **config: object) -> tuple[float, float, float]:
        server = VirtualServer(**config)
        server.keep("chat", 8, 100, 100, until_s=56)
        for number in range(9 if long else 0):
            server.add("long", 2000, 32, at_s=2.0 + 6 * number)
        server.run(56)
        itl_s = [gap_s for story in server.of("chat") for gap_s in story.itl_s]
        return p95(itl_s), max(itl_s), p95([story.ttft_s for story in server.of("long")]) if long else 0.0

    alone_s, alone_most_s, _ = mixed(False)
    itl_s, most_s, ttft_s = mixed(True)
    assert itl_s <= 3 * alone_s
    assert most_s <= 1.5 * alone_most_s
    assert ttft_s <= 6.0
    _, unbounded_s, _ = mixed(True, long_prefill_token_threshold=0)
    _, unchunked_s, _ = mixed(True, enable_chunked_prefill=False, max_num_batched_tokens=8192)
    assert unchunked_s > 3 * unbounded_s > 6 * most_s


@pytest.mark.parametrize(
    ("num_streams", "threshold", "expected"),
    [(5, None, 85), (40, None, 160), (5, 50, 50), (40, 50, 50), (5, 0, 507), (0, None, 512)],
)
def test_beside_decodes_long_prompts_take_a_bounded_part_of_a_step(
    num_streams: int, threshold: int | None, expected: int
) -> None:
    """By default a sixth of a step, or 4 tokens for each request that decodes; alone all of it."""
    server = VirtualServer(long_prefill_token_threshold=threshold)
    for _ in range(num_streams):
        server.add("stream", 5, 100)
    server.run(1.0)
    server.add("long", 2000, 1, at_s=1.0)
    server.run(max(server.now_s, 1.0) + 0.2)
    assert server.tokens_per_step()[-1] == num_streams + expected


@pytest.mark.parametrize("policy", POLICIES)
def test_long_and_short_prompts_do_not_starve_each_other(policy: str) -> None:
    """O-30: decodes advance in every step, short prompts are not behind the long one, and it ends while short ones keep coming."""
    server = VirtualServer(scheduling_policy=policy, max_num_batched_tokens=128, max_num_seqs=16)
    decoding = [server.add("decode", 20, 500) for _ in range(2)]
    server.run(0.5)
    long = server.add("long", 8000, 8)
    for _ in range(10):
        server.add("early", 40, 8)
    server.keep("short", 3, 40, 8, until_s=60)
    server.run(60)
    stories = server.stories
    for name in decoding:
        slot_steps = {
            plan.step for at_s, plan in server.steps if stories[name].token_s[0] < at_s <= stories[name].token_s[-1]
        }
        assert len(stories[name].token_s) == len(slot_steps) + 1 == 500
    assert stories[long].finish_reason is FinishReason.LENGTH
    assert all(story.token_s[0] < stories[long].token_s[0] for story in server.of("early"))
    assert stories[long].token_s[-1] < 60


def test_short_prompts_start_one_after_another_beside_decodes() -> None:
    """Each takes 100 tokens of the 127 that a step may hold of them beside decodes; alone they start together."""
    server = VirtualServer()
    for _ in range(5):
        server.add("stream", 5, 100)
    server.run(1.0)
    before = len(server.steps)
    for _ in range(3):
        server.add("short", 100, 8)
    server.run(server.now_s + 0.5)
    assert [plan.num_tokens for _, plan in server.steps[before : before + 3]] == [105, 106, 107]
    server = VirtualServer()
    for _ in range(3):
        server.add("short", 100, 8)
    server.run(0.1)
    assert server.steps[0][1].num_tokens == 300


def test_a_step_is_used_up_while_a_long_prompt_has_tokens() -> None:
    server = VirtualServer(max_num_batched_tokens=128)
    server.add("long", 2000, 1)
    for _ in range(3):
        server.add("short", 10, 1)
    server.run()
    assert server.tokens_per_step()[:-1] == [128] * 15


def test_at_most_so_many_long_prompts_are_partly_computed() -> None:
    for most in (1, 3):
        server = VirtualServer(800, check=True, max_long_partial_prefills=most)
        for _ in range(6):
            server.add("long", 2000, 1)
        partly = 0
        computed: dict[int, int] = {}
        while server.scheduler.has_work or not server.steps:
            server.run(server.now_s + 1e-9)
            for row in server.steps[-1][1].rows:
                computed[row.slot] = row.start + row.count
            partly = max(partly, sum(0 < count < 2000 for count in computed.values()))
        assert partly == most


# --- fairness -------------------------------------------------------------------------------------------------------


def flood(policy: str, lengths: tuple[int, int], *, flood: bool, caller: bool, num_blocks: int = 4096) -> VirtualServer:
    """Tenant A: 200 clients at once. Tenant B: a short request now and then."""
    server = VirtualServer(num_blocks, scheduling_policy=policy)
    if flood:
        server.keep("A", 200, *lengths, until_s=60, tenant="A")
    for number in range(40 if caller else 0):
        server.add("B", 64, 32, at_s=5 + 1.0137 * number, tenant="B")
    server.run(60)
    return server


@pytest.mark.parametrize(
    ("lengths", "num_blocks"),
    [((500, 32), 4096), ((30, 300), 4096), ((2000, 32), 4096), ((30, 300), 800)],
    ids=["prompts", "slots held", "long prompts", "memory short"],
)
def test_a_flood_of_one_tenant_does_not_hold_up_another(lengths: tuple[int, int], num_blocks: int) -> None:
    both = flood("fair", lengths, flood=True, caller=True, num_blocks=num_blocks)
    one = flood("fair", lengths, flood=True, caller=False, num_blocks=num_blocks)
    other = flood("fair", lengths, flood=False, caller=True, num_blocks=num_blocks)
    alone_s, beside_s = (p95([story.ttft_s for story in server.of("B")]) for server in (other, both))
    assert beside_s <= 1.5 * alone_s + 2 * p95(durations(both))
    assert useful_tokens(both) >= 0.95 * useful_tokens(one)


def test_first_come_first_served_lets_a_flood_hold_up_another() -> None:
    """The comparison that shows what `fair` does."""
    server = flood("fcfs", (30, 300), flood=True, caller=True)
    callers = [story for story in server.stories.values() if story.spec.tenant == "B"]
    assert p95([story.ttft_s if story.token_s else float("inf") for story in callers]) > 10


@pytest.mark.parametrize(("weights", "expected"), [((), 0.5), (("A=3",), 0.75), (("A=1", "B=4"), 0.2)])
def test_tokens_are_shared_by_weight(weights: Sequence[str], expected: float) -> None:
    """Both flood, A with prompts and B with answers: a prompt token counts 1, a generated one 2."""
    server = VirtualServer(scheduling_policy="fair", tenant_weights=tuple(weights), max_num_seqs=32)
    server.keep("A", 60, 150, 8, until_s=40, tenant="A")
    server.keep("B", 60, 20, 60, until_s=40, tenant="B")
    server.run(40)

    def service(kind: str) -> int:
        return sum(len(story.spec.prompt_token_ids) + 2 * len(story.token_s) for story in server.of(kind))

    share = service("A") / (service("A") + service("B"))
    assert share == pytest.approx(expected, abs=0.05)


def test_a_pause_earns_a_tenant_nothing() -> None:
    server = VirtualServer(scheduling_policy="fair", max_num_seqs=8)
    server.keep("A", 20, 100, 40, until_s=40, tenant="A")
    server.run(20)
    server.keep("B", 20, 100, 40, until_s=40, tenant="B")
    server.run(40)
    late = [sum(at_s >= 20 for story in server.of(kind) for at_s in story.token_s) for kind in "AB"]
    assert late[0] / sum(late) == pytest.approx(0.5, abs=0.1)


# --- no thrashing, no starving --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_blocks", [140, 200, 248])
def test_two_long_prompts_that_do_not_both_fit_never_evict_each_other_in_turn(policy: str, num_blocks: int) -> None:
    server = VirtualServer(num_blocks, check=True, scheduling_policy=policy, max_num_batched_tokens=128)
    for tenant, priority in (("A", 1), ("B", 0)):
        for _ in range(3):
            server.add(tenant, 2000, 100, tenant=tenant, priority=priority if policy == "priority" else 0)
    server.run()
    assert server.num_computed <= 1.2 * 6 * 2099
    assert all(story.finish_reason is FinishReason.LENGTH for story in server.stories.values())


def test_a_priority_preempts_only_if_it_must() -> None:
    server = VirtualServer(100, check=True, scheduling_policy="priority", max_num_seqs=4)
    running = [server.add("low", 50, 200, priority=5) for _ in range(3)]
    server.run(0.5)
    free = server.add("high", 50, 20, priority=0)
    server.run(1.0)
    assert server.stories[free].token_s
    assert server.num_preemptions == 0
    server.add("low", 50, 200, priority=5)
    server.run(2.0)
    urgent = server.add("urgent", 50, 20, priority=0)
    server.run(2.1)
    assert server.num_preemptions == 1
    assert server.stories[urgent].ttft_s < 0.15
    # Another of the same priority as those that run waits for them.
    equal = server.add("low", 50, 10, priority=5)
    server.run()
    assert server.num_preemptions == 1
    assert server.stories[equal].token_s[0] > min(server.stories[name].token_s[-1] for name in running)


@pytest.mark.parametrize("priority", [1, 10, 10**6])
def test_ageing_ends_every_wait(priority: int) -> None:
    """One request of low priority under a flood of urgent ones, which alone would keep it waiting for as long as they come."""
    server = VirtualServer(scheduling_policy="priority", priority_ageing=0.5, max_num_seqs=2)
    server.keep("urgent", 6, 50, 50, until_s=100, priority=0)
    patient = server.add("patient", 50, 5, at_s=1.0, priority=priority)
    server.run(100)
    waited_s = server.stories[patient].ttft_s if server.stories[patient].token_s else float("inf")
    if priority == 10**6:
        assert waited_s == float("inf")  # its wait is bounded by an hour and the queue
    else:
        assert 0.4 * priority < waited_s < 0.5 * priority + 5


@pytest.mark.parametrize("policy", POLICIES)
def test_short_memory_recomputes_little(policy: str) -> None:
    """64 slots over memory for a few: what is computed again stays a small part."""
    server = VirtualServer(300, check=True, scheduling_policy=policy)
    for number in range(120):
        server.add("AB"[number % 2], 100 + number, 150, tenant="AB"[number % 2])
    server.run()
    needed = sum(len(story.spec.prompt_token_ids) + 149 for story in server.stories.values())
    assert server.num_computed <= 1.2 * needed
