"""Blocks outside of the cache: swapped out and in, written to disk and fetched, and never trusted further than they were reported."""

from __future__ import annotations

import pytest

from octavo.contracts import BlockContent, BlockId, DiskFile, DiskSpace, KVLayout, StepPlan
from octavo.engine.offload import CacheCounts, Offload
from support.fake_executor import Answer, FakeDisk, Faults, Harness, alone, layout, request

FIRST, SECOND = range(24), range(40, 64)


def counts(harness: Harness, name: str) -> int:
    return sum(getattr(output.stats.cache, name) for output in harness.outbox.outputs if output.stats.cache is not None)


def evicting(harness: Harness, times: int = 1) -> None:
    """Runs prompts that need all blocks, so that what was cached is evicted."""
    for number in range(times):
        tokens = harness.layout.num_blocks[0] * harness.layout.block_size - 8
        harness.add(request(f"evicts {len(harness.added)}", [number + 70, *[5] * (tokens - 1)], 4))
        harness.run()


# --- swap -----------------------------------------------------------------------------------------------------------


def preempting(kv: KVLayout, **options: object) -> Harness:
    """Two requests that do not both fit to their end, then those that evict what the preempted one has left."""
    harness = Harness(kv, max_num_seqs=2, max_num_batched_tokens=32, **options)
    harness.add(request("a", FIRST, 24), request("b", SECOND, 24))
    harness.run()
    harness.check_answers()
    assert sum(output.stats.num_preemptions for output in harness.outbox.outputs) > 0
    return harness


NEEDED = 24 + 24 + 2 * 23
"""Positions that two requests compute who are never preempted."""


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("kv", [layout(14), layout(14, 14, window=6)], ids=["full", "window"])
def test_a_preempted_request_is_swapped_out_and_in(kv: KVLayout, caching: bool) -> None:
    plain = preempting(kv, enable_prefix_caching=caching)
    swapped = preempting(kv, enable_prefix_caching=caching, swap_blocks=40)
    assert plain.executor.num_computed > NEEDED + 4
    # Each time it comes back it computes the one token whose logits it needs, at most.
    preemptions = sum(output.stats.num_preemptions for output in swapped.outbox.outputs)
    assert swapped.executor.num_computed <= NEEDED + preemptions
    assert counts(swapped, "swapped_out_blocks") >= counts(swapped, "swapped_in_blocks") > 0
    assert swapped.scheduler._kv.offload.used_bytes == (0, 0)


def test_swap_space_is_bounded() -> None:
    harness = preempting(layout(14), swap_blocks=1)
    used = [output.stats.cache.swap_bytes for output in harness.outbox.outputs if output.stats.cache is not None]
    assert 0 < max(used) <= 8 * 4


def test_what_a_cancelled_request_has_swapped_out_is_dropped() -> None:
    harness = Harness(layout(14), max_num_seqs=2, max_num_batched_tokens=32, swap_blocks=40)
    harness.add(request("a", FIRST, 24), request("b", SECOND, 24))
    while harness.scheduler._kv.offload.used_bytes[0] == 0:
        assert harness.step() is not None
    harness.cancel("b")
    assert harness.scheduler._kv.offload.used_bytes[0] == 0
    harness.run()
    harness.check_answers(except_for=["b"])
    assert not harness.executor._outside


# --- disk -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", [layout(12), layout(12, 12, window=6)], ids=["full", "window"])
def test_evicted_blocks_come_back_from_disk(kv: KVLayout) -> None:
    harness = Harness(kv, max_num_batched_tokens=32, disk_blocks=100)
    harness.add(request("cold", FIRST, logprobs=0))
    harness.run()
    evicting(harness, 2)
    computed = harness.executor.num_computed
    harness.add(request("warm", FIRST, logprobs=0))
    harness.run()
    harness.check_answers()
    assert harness.answer("warm").num_cached_tokens == 20
    assert harness.executor.num_computed - computed == 4 + 3
    assert counts(harness, "disk_hit_tokens") == 20
    assert counts(harness, "fetched_files") == harness.executor.num_loaded > 0
    assert harness.scheduler._kv.offload.used_bytes[0] == 0
    assert not harness.executor._outside


def test_others_go_on_while_one_waits_for_disk() -> None:
    disk = FakeDisk(fetch_steps=4)
    harness = Harness(layout(12), max_num_batched_tokens=32, disk_blocks=100, disk=disk)
    harness.add(request("cold", range(9)))
    harness.run()
    evicting(harness, 2)
    harness.add(request("warm", range(9)), request("other", range(50, 55), 8))
    started: list[str] = []
    while (plan := harness.step()) is not None:
        started += [start.request_id for start in plan.starts]
    assert started == ["other", "warm"]
    harness.check_answers()
    assert harness.answer("warm").num_cached_tokens == 8


def restarted(harness: Harness, **options: object) -> Harness:
    return Harness(harness.layout, max_num_batched_tokens=32, disk=harness.disk, disk_blocks=100, **options)


def test_files_outlive_the_engine_but_serve_only_its_like() -> None:
    """O-29: another namespace stands for other weights, arithmetic, KV format or layout."""
    harness = Harness(layout(12), max_num_batched_tokens=32, disk_blocks=100)
    harness.add(request("cold", FIRST))
    harness.run()
    evicting(harness)
    for namespace, cached in ((b"other", 0), (b"model", 20)):
        again = restarted(harness, namespace=namespace)
        again.add(request("warm", FIRST))
        again.run()
        again.check_answers()
        assert again.answer("warm").num_cached_tokens == cached


def test_a_damaged_file_is_computed_again_and_gone() -> None:
    harness = Harness(layout(12), max_num_batched_tokens=32, disk_blocks=100)
    harness.add(request("cold", FIRST))
    harness.run()
    evicting(harness, 2)
    chain = harness.scheduler._kv.sequence(b"").chain
    assert chain is not None
    chain.extend(FIRST, 5)
    damaged = BlockContent(0, chain.keys[2])
    harness.disk.damaged.add(damaged)
    harness.add(request("warm", FIRST))
    harness.run()
    harness.check_answers()
    assert harness.answer("warm").num_cached_tokens == 8
    assert counts(harness, "missing_files") == 1
    harness.step()
    assert damaged not in harness.disk.files or harness.scheduler._kv.offload._traffic.deletes


def test_files_are_bounded_and_the_least_recently_used_go_first() -> None:
    harness = Harness(layout(12), max_num_batched_tokens=32, disk_blocks=6)
    for number in range(8):
        harness.add(request(f"r{number}", [number + 1, *FIRST]))
        while harness.step() is not None:
            assert len(harness.disk.files) <= 6
    assert 0 < len(harness.disk.files) <= 6


def test_a_file_about_to_be_deleted_is_kept_only_where_there_is_room() -> None:
    old = DiskFile("a", BlockContent(0, b"a"), 10)
    offload = Offload([10], CacheCounts(), disk=DiskSpace(max_bytes=10, overhead_bytes=0, files=(old,)))
    assert offload.save(0, BlockId(1), b"b")  # makes room by deleting the old file, in the next step
    assert not offload.save(0, BlockId(2), b"a")
    offload.check()
    assert offload.used_bytes == (0, 10)


def test_what_cannot_be_written_is_not_relied_on() -> None:
    harness = Harness(layout(12), max_num_batched_tokens=32, disk_blocks=100, disk=FakeDisk(max_writes=2))
    harness.add(request("cold", FIRST))
    harness.run()
    evicting(harness, 3)
    harness.add(request("warm", FIRST))
    harness.run()
    harness.check_answers()
    assert counts(harness, "unsaved_files") > 0
    assert set(harness.scheduler._kv.offload._files) == set(harness.disk.files)


@pytest.mark.parametrize("where", ["submit_before", "submit_after", "sample"])
def test_a_failed_step_leaves_nothing_to_rely_on(where: str) -> None:
    """Whichever step fails, later answers are right, and no request waits for what will not come."""
    clean = Harness(layout(12), max_num_batched_tokens=32, disk_blocks=100, swap_blocks=3)
    script(clean)
    for step in range(1, len(clean.executor.plans) + 1):
        faults = Faults(**{where: {step}})
        harness = Harness(layout(12), max_num_batched_tokens=32, disk_blocks=100, swap_blocks=3, faults=faults)
        script(harness)
        failed = [name for name, answer in harness.outbox.answers.items() if answer.error_code is not None]
        harness.check_answers(except_for=failed)
        assert not harness.executor._outside or harness.scheduler._kv.offload._traffic.drops


def script(harness: Harness) -> None:
    harness.add(request("a", FIRST, 6), request("b", SECOND, 12))
    harness.run()
    evicting(harness, 2)
    harness.add(request("a again", FIRST, 6), request("b again", SECOND, 12))
    harness.run()
    evicting(harness)
    harness.add(request("last", FIRST, 6))
    harness.run()


def test_what_is_cached_outlives_an_engine_that_is_shut_down() -> None:
    harness = Harness(layout(40), max_num_batched_tokens=32, disk_blocks=100)
    harness.add(request("cold", FIRST))
    harness.run()
    assert not harness.disk.files
    plan = harness.scheduler.farewell()
    assert plan is not None and not plan.rows
    assert plan.traffic is not None and plan.traffic.patient
    harness.executor.submit(plan)
    again = restarted(harness)
    again.add(request("warm", FIRST))
    again.run()
    again.check_answers()
    assert again.answer("warm").num_cached_tokens == 20
    assert Harness(layout(4)).scheduler.farewell() is None


def test_resetting_the_cache_deletes_files() -> None:
    harness = Harness(layout(12), max_num_batched_tokens=32, disk_blocks=100)
    harness.add(request("cold", FIRST))
    harness.run()
    evicting(harness)
    assert harness.disk.files
    harness.scheduler.reset_prefix_cache()
    harness.add(request("again", FIRST))
    harness.run()
    assert harness.answer("again").num_cached_tokens == 0
    assert not set(harness.scheduler._kv.offload._files) - set(harness.disk.files)


def test_what_is_slower_than_computing_is_not_brought() -> None:
    harness = Harness(layout(12), max_num_batched_tokens=32, disk_blocks=100)
    harness.add(request("cold", FIRST))
    harness.run()
    evicting(harness)
    offload = harness.scheduler._kv.offload
    offload._compute_s = 1e-9
    offload._bring_s = dict.fromkeys(offload._bring_s, 1.0)
    harness.add(request("warm", FIRST))
    harness.run()
    assert counts(harness, "disk_query_tokens") > counts(harness, "disk_hit_tokens") == 0
    assert harness.executor.num_loaded == 0


def test_two_that_want_the_same_from_disk_share_it() -> None:
    harness = Harness(layout(14), max_num_batched_tokens=40, disk_blocks=100, disk=FakeDisk(fetch_steps=2))
    harness.add(request("cold", FIRST))
    harness.run()
    evicting(harness, 2)
    harness.add(request("b", FIRST), request("c", (*FIRST, 1)))
    plans: list[StepPlan] = []
    while (plan := harness.step()) is not None:
        plans.append(plan)
    harness.check_answers()
    loads = [load for plan in plans if plan.traffic for load in plan.traffic.loads]
    assert len(loads) == len({load.key for load in loads}) == 5
    assert harness.answer("c").num_cached_tokens == 24


def test_answers_after_every_kind_of_round_trip_are_those_of_requests_alone() -> None:
    harness = Harness(layout(10), max_num_seqs=3, max_num_batched_tokens=12, disk_blocks=30, swap_blocks=8)
    for round_number in range(4):
        for number in range(5):
            prompt = [number, *FIRST[: 3 * number + 6]]
            harness.add(request(f"{round_number}-{number}", prompt, 10, logprobs=0))
        harness.run()
    harness.check_answers()
    assert counts(harness, "swapped_in_blocks") > 0
    assert counts(harness, "disk_hit_tokens") > 0
    assert isinstance(harness.answer("0-0"), Answer) and alone is not None
