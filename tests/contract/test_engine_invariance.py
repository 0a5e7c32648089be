"""Same bits through the whole engine: real scheduler, runner and native kernels, whatever else runs and however memory is short.

A request's tokens and logprob bits are those it gets alone: in a batch, in chunks, with a cold and a warm prefix cache, after
preemption, on other threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from octavo.backends.base import KVDType
from octavo.backends.cpu.backend import CpuBackend
from octavo.config import SchedulerConfig
from octavo.contracts import (
    CacheStats,
    DiskSpace,
    GenerateRequest,
    KVLayout,
    RequestId,
    TokenEvent,
    TokenLogprobs,
    TokenSampling,
)
from octavo.engine.scheduler import Scheduler
from octavo.models import ModelSpec, make_forward
from octavo.quant import Format
from octavo.runner.kv_budget import blocks_for_request
from octavo.runner.kv_files import OVERHEAD_BYTES, KVFiles
from octavo.runner.model_runner import ModelRunner
from support.tiny_models import random_tensors, tiny_spec

SPECS = {"full": tiny_spec(), "windows": tiny_spec(windows=(None, 24), qkv_bias=True)}
MAX_MODEL_LEN = 256


class Answer(msgspec.Struct):
    """What one request got."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()


class Engine:
    """Scheduler and runner without threads. `num_preemptions`, `num_cached` and `num_copies` are totals.

    `chunk` bounds long prompts beside decodes; 0: nothing does, so that more of them hold memory at once.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        max_num_seqs: int = 20,
        budget: int = 512,
        block_size: int = 16,
        num_blocks: int | None = None,
        caching: bool = True,
        threads: int = 1,
        kv_dtype: KVDType = "auto",
        swap_blocks: int = 0,
        folder: Path | None = None,
        namespace: bytes = b"model",
        chunk: int | None = None,
        steps: int | None = None,
    ) -> None:
        model = CpuBackend(threads=threads).load(
            make_forward(spec), random_tensors(spec, Format.Q4_1), dtype="auto", kv_dtype=kv_dtype
        )
        groups = spec.kv_groups(model.bytes_per_kv_value, model.bytes_per_kv_scale)
        layout = KVLayout(block_size=block_size, groups=groups, num_blocks=(num_blocks or 2000,) * len(groups))
        files = None if folder is None else KVFiles(folder, namespace)
        disk = files and DiskSpace(max_bytes=1 << 26, overhead_bytes=OVERHEAD_BYTES, files=files.scan())
        self.scheduler = Scheduler(
            layout,
            SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=budget,
                long_prefill_token_threshold=chunk,
                num_scheduler_steps=steps,
            ),
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_caching=caching,
            swap_bytes=swap_blocks * max(group.bytes_per_token for group in groups) * block_size,
            disk=disk,
            least_part=1,
            namespace=namespace,
        )
        self.runner = ModelRunner(model, layout, max_num_seqs=max_num_seqs, max_model_len=MAX_MODEL_LEN, kv_files=files)
        self.caches: list[CacheStats] = []
        self.num_preemptions = 0
        self.num_cached = 0
        self.num_copies = 0
        self.num_repeated = 0

    def run(self, requests: Sequence[GenerateRequest]) -> list[Answer]:
        """Answers of all requests, which arrive one step after the other."""
        answers = {request.request_id: Answer() for request in requests}
        waiting = list(requests)
        while waiting or self.scheduler.has_work:
            if waiting:
                self.scheduler.add(waiting.pop(0))
            plan = self.scheduler.plan()
            assert plan is not None
            self.num_copies += len(plan.copies)
            self.num_repeated += plan.repeat > 1
            output = self.scheduler.commit(plan, self.runner.submit(plan).sample())
            self.scheduler.check()
            self.num_preemptions += output.stats.num_preemptions
            if output.stats.cache is not None:
                self.caches.append(output.stats.cache)
            for event in output.events:
                self._take(answers[event.request_id], event)
        self.scheduler.check_idle()
        return list(answers.values())

    def count(self, name: str) -> int:
        """Sum of one of the cache's counts."""
        return sum(getattr(cache, name) for cache in self.caches)

    def _take(self, answer: Answer, event: TokenEvent) -> None:
        assert event.error_code is None, event.error_message
        answer.token_ids += event.token_ids
        answer.logprobs += event.logprobs or ()
        answer.prompt_logprobs += event.prompt_logprobs or ()
        self.num_cached += event.num_cached_tokens or 0


@pytest.fixture(params=SPECS)
def spec(request: pytest.FixtureRequest) -> ModelSpec:
    return SPECS[request.param]


@pytest.fixture
def engines(spec: ModelSpec) -> Iterator[list[Engine]]:
    """Engines to be closed after the test."""
    made: list[Engine] = []
    yield made
    for engine in made:
        engine.runner.close()


def requests_for(spec: ModelSpec, count: int = 17) -> list[GenerateRequest]:
    """Prompts of 1 to 120 tokens, some of which begin alike, with every kind of sampling."""
    rng = np.random.default_rng(3)
    stem = rng.integers(0, spec.vocab_size, 60).tolist()
    requests = []
    for index in range(count):
        own = rng.integers(0, spec.vocab_size, int(rng.integers(1, 60))).tolist()
        sampling = TokenSampling(
            max_tokens=int(rng.integers(5, 40)),
            temperature=[0.0, 0.8, 1.3][index % 3],
            top_p=[1.0, 0.9][index % 2],
            frequency_penalty=[0.0, 0.5][index % 2],
            repetition_penalty=[1.0, 1.2][index % 2],
            seed=index,
            logprobs=3,
            prompt_logprobs=2 if index % 5 == 0 else None,
            ignore_eos=True,
        )
        requests.append(
            GenerateRequest(
                request_id=RequestId(f"r{index}"),
                prompt_token_ids=tuple([*stem, *own] if index % 2 else own),
                sampling=sampling,
            )
        )
    return requests


def alone(spec: ModelSpec, engines: list[Engine]) -> tuple[list[GenerateRequest], list[Answer]]:
    requests = requests_for(spec)
    engine = Engine(spec, caching=False)
    engines.append(engine)
    answers = [engine.run([request])[0] for request in requests]
    assert len({answer.token_ids for answer in answers}) == len(answers)
    assert all(len(a.token_ids) == r.sampling.max_tokens for a, r in zip(answers, requests, strict=True))
    return requests, answers


def need_of(spec: ModelSpec, requests: Sequence[GenerateRequest]) -> int:
    """Blocks that the longest request takes alone, in steps of 32 tokens."""
    longest = max(len(request.prompt_token_ids) + request.sampling.max_tokens for request in requests)
    return max(blocks_for_request(group, longest, block_size=16, max_chunk=32) for group in spec.kv_groups(2.0))


def test_batches_and_chunks(spec: ModelSpec, engines: list[Engine]) -> None:
    requests, expected = alone(spec, engines)
    settings: list[dict[str, int]] = [{}, {"budget": 64}, {"budget": 20}, {"budget": 7, "max_num_seqs": 5}]
    settings += [{"budget": 1, "max_num_seqs": 1}, {"block_size": 8}, {"block_size": 32, "threads": 2}]
    for changes in settings:
        engine = Engine(spec, caching=False, **changes)
        engines.append(engine)
        assert engine.run(requests) == expected, changes


def test_several_steps_at_once(spec: ModelSpec, engines: list[Engine]) -> None:
    """Rows that end by length, by a stop id in the middle, and by none; beside others, on threads, and where memory is short."""
    requests = [
        msgspec.structs.replace(
            request, sampling=msgspec.structs.replace(request.sampling, logprobs=None, prompt_logprobs=None)
        )
        for request in requests_for(spec)
    ]
    single = Engine(spec, caching=False)
    engines.append(single)
    freely = [single.run([request])[0].token_ids for request in requests]
    requests = [
        msgspec.structs.replace(
            request, sampling=msgspec.structs.replace(request.sampling, stop_token_ids=(tokens[3],))
        )
        if index % 3 == 0
        else request
        for index, (request, tokens) in enumerate(zip(requests, freely, strict=True))
    ]
    expected = [single.run([request])[0] for request in requests]
    assert single.num_repeated == 0
    settings: list[dict[str, int]] = [{}, {"threads": 2}, {"block_size": 8, "budget": 64}, {"max_num_seqs": 3}]
    settings += [{"budget": 32, "num_blocks": need_of(spec, requests)}]
    for steps in (2, 5, 64):
        for changes in settings:
            engine = Engine(spec, steps=steps, **changes)
            engines.append(engine)
            assert engine.run(requests) == expected, (steps, changes)
            assert engine.num_repeated > 0


def test_an_int8_cache(spec: ModelSpec, engines: list[Engine]) -> None:
    """Cached blocks hold what the same tokens would write again, wherever chunks and blocks end."""
    requests = requests_for(spec)
    answers = []
    for block_size, budget in ((16, 512), (8, 20), (32, 27)):
        engine = Engine(spec, block_size=block_size, budget=budget, kv_dtype="int8")
        engines.append(engine)
        answers += [engine.run(requests), engine.run(requests)]
        assert engine.num_cached > 0
    assert all(answer == answers[0] for answer in answers)
    exact = Engine(spec)
    engines.append(exact)
    assert exact.run(requests) != answers[0]


def test_cold_and_warm_cache(spec: ModelSpec, engines: list[Engine]) -> None:
    requests, expected = alone(spec, engines)
    engine = Engine(spec, budget=64)
    engines.append(engine)
    assert engine.run(requests) == expected
    cold = engine.num_cached
    assert engine.run(requests) == expected
    assert engine.num_cached - cold > cold


def test_preemption(spec: ModelSpec, engines: list[Engine]) -> None:
    """The pools hold just the longest request, or little more while nothing holds the others back."""
    requests, expected = alone(spec, engines)
    need = need_of(spec, requests)
    for caching in (False, True):
        for num_blocks, chunk in ((need, None), (need + 2, 0)):
            engine = Engine(spec, budget=32, num_blocks=num_blocks, chunk=chunk, caching=caching)
            engines.append(engine)
            assert engine.run(requests) == expected, f"caching {caching}, {num_blocks} blocks"
            assert engine.num_preemptions > 0


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_choices_that_share_a_prompt(spec: ModelSpec, engines: list[Engine], kv_dtype: KVDType) -> None:
    """Full blocks of the prompt are shared and its last one is copied, while others preempt them."""
    (long,) = (request for request in requests_for(spec) if request.request_id == "r7")
    requests = [
        msgspec.structs.replace(
            long,
            request_id=RequestId(f"{length}-{choice}"),
            prompt_token_ids=long.prompt_token_ids[:length],
            sampling=msgspec.structs.replace(long.sampling, choice=choice, temperature=1.0),
        )
        for length in (31, 64)
        for choice in range(4)
    ]
    single = Engine(spec, caching=False, kv_dtype=kv_dtype)
    engines.append(single)
    expected = [single.run([request])[0] for request in requests]
    assert len({answer.token_ids for answer in expected}) == len(expected)
    for changes in ({}, {"budget": 20}, {"num_blocks": 24, "budget": 20}):
        engine = Engine(spec, kv_dtype=kv_dtype, **changes)
        engines.append(engine)
        assert engine.run(requests) == expected, changes
        assert engine.num_copies > 0


@pytest.mark.parametrize("caching", [True, False])
def test_swapping(spec: ModelSpec, engines: list[Engine], caching: bool) -> None:
    """The pools hold little more than the longest request; what the others have computed goes to memory and comes back."""
    requests, expected = alone(spec, engines)
    num_blocks = need_of(spec, requests) + 2
    for swap_blocks in (2, 1000) if caching else (1000,):
        engine = Engine(spec, budget=32, num_blocks=num_blocks, chunk=0, caching=caching, swap_blocks=swap_blocks)
        engines.append(engine)
        assert engine.run(requests) == expected, swap_blocks
        assert engine.num_preemptions > 0
        assert engine.count("swapped_in_blocks") > 0


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_files_of_evicted_blocks(spec: ModelSpec, engines: list[Engine], kv_dtype: KVDType, tmp_path: Path) -> None:
    """Evicted, fetched, swapped, after a restart, and after damage: the same bits, from files of the same namespace only."""
    requests = requests_for(spec, 11)
    single = Engine(spec, caching=False, kv_dtype=kv_dtype)
    engines.append(single)
    expected = [single.run([request])[0] for request in requests]
    for life in range(3):
        engine = Engine(spec, budget=32, num_blocks=16, kv_dtype=kv_dtype, swap_blocks=20 * (life % 2), folder=tmp_path)
        try:
            for _ in range(2):
                assert engine.run(requests) == expected, life
            assert engine.count("fetched_files") > 0
            assert (engine.count("missing_files") > 0) == (life == 2)
        finally:
            engine.runner.close()
        if life == 1:
            for number, path in enumerate(sorted(tmp_path.glob("*.kv"))):
                data = bytearray(path.read_bytes())
                data[(number * 997) % len(data)] ^= 0x10
                path.write_bytes(data)
    other = Engine(spec, num_blocks=200, kv_dtype=kv_dtype, folder=tmp_path, namespace=b"other")
    engines.append(other)
    assert other.run(requests) == expected
    assert other.count("disk_hit_tokens") == 0
