"""Outputs under grammars do not depend on the batch, chunks, a warm prefix cache, preemption or jumps: a tiny model with real kernels."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import pytest

from octavo.backends.cpu.backend import CpuBackend
from octavo.config import SchedulerConfig
from octavo.contracts import (
    Add,
    EngineInput,
    EngineOutput,
    FinishReason,
    GenerateRequest,
    KVLayout,
    RequestId,
    Shutdown,
    TokenLogprobs,
    TokenSampling,
)
from octavo.engine import EngineLoop, Scheduler
from octavo.grammar import GrammarKind, GrammarSpec
from octavo.grammar.matchers import MatcherPool
from octavo.grammar.source import source_of
from octavo.grammar.tokens import TokenTable
from octavo.models import make_forward
from octavo.quant import Format
from octavo.runner.model_runner import ModelRunner
from support.tiny_models import random_tensors, tiny_spec

MAX_MODEL_LEN = 256
EOS = 0
SPEC = tiny_spec()
PIECES = (b"<eos>", *(bytes([byte]) for byte in range(32, 127)), b"ab", b"true", b'{"', b'":', b" 1")
Outcome = tuple[tuple[int, ...], tuple[TokenLogprobs, ...], FinishReason | None]


def source(kind: GrammarKind, text: str) -> str:
    return source_of(GrammarSpec(kind=kind, text=text, field="x"), {})


OBJECT = {
    "type": "object",
    "properties": {"ab": {"type": "boolean"}, "n": {"type": "integer", "maximum": 999}},
    "required": ["ab", "n"],
}
GRAMMARS = [
    source(GrammarKind.JSON, json.dumps({**OBJECT, "additionalProperties": False})),
    source(GrammarKind.REGEX, "(ab|c){50,80}!"),
    source(GrammarKind.CHOICE, json.dumps(["true", "abab", "x1"])),
    None,
]


class _Script:
    """Messages to a loop, one batch a turn, then a shutdown once all have ended."""

    def __init__(self, batches: Sequence[Sequence[EngineInput]], num_requests: int) -> None:
        self.batches = list(batches)
        self.num_unfinished = num_requests
        self.outcomes: dict[str, Outcome] = {}
        self.num_preemptions = 0
        self.num_decode_steps = 0
        """That gave tokens."""

    def receive(self, timeout_s: float | None) -> Sequence[EngineInput]:
        if self.batches:
            return self.batches.pop(0)
        return [Shutdown()] if self.num_unfinished == 0 else []

    def send(self, output: EngineOutput) -> None:
        self.num_preemptions += output.stats.num_preemptions
        for event in output.events:
            assert event.error_code is None, event.error_message
            tokens, logprobs, _ = self.outcomes.get(event.request_id, ((), (), None))
            self.outcomes[event.request_id] = (
                tokens + event.token_ids,
                logprobs + (event.logprobs or ()),
                event.finish_reason,
            )
            self.num_decode_steps += bool(event.token_ids)
            self.num_unfinished -= event.finish_reason is not None


def requests_for(count: int, logprobs: int | None) -> list[GenerateRequest]:
    stem = tuple(range(10, 50))
    return [
        GenerateRequest(
            request_id=RequestId(f"r{index}"),
            prompt_token_ids=(*stem, 20 + index) if index % 3 else (30 + index,) * (index + 1),
            grammar=GRAMMARS[index % len(GRAMMARS)],
            sampling=TokenSampling(
                max_tokens=90,
                temperature=1.5 if index % 2 else 0.0,
                seed=index,
                logprobs=logprobs,
                eos_token_ids=(EOS,),
                frequency_penalty=0.5,
            ),
        )
        for index in range(count)
    ]


@pytest.fixture(scope="module")
def pool() -> Iterator[MatcherPool]:
    assert len(PIECES) <= SPEC.vocab_size
    table = TokenTable(pieces=PIECES, special_ids=(EOS,), eos_ids=(EOS,))
    made = MatcherPool(lambda: (table, lambda _: ()), num_threads=2)
    yield made
    made.stop()


def run(
    pool: MatcherPool, requests: Sequence[GenerateRequest], *, rounds: int = 1, jumps: bool = True, **changes: int
) -> list[_Script]:
    """Each round sends all requests again, one a turn."""
    num_blocks, block_size = changes.pop("num_blocks", 400), 16
    model = CpuBackend(threads=1).load(make_forward(SPEC), random_tensors(SPEC, Format.Q4_1), dtype="auto")
    groups = SPEC.kv_groups(model.bytes_per_kv_value, model.bytes_per_kv_scale)
    layout = KVLayout(block_size=block_size, groups=groups, num_blocks=(num_blocks,) * len(groups))
    settings = SchedulerConfig(**{"max_num_seqs": 20, "max_num_batched_tokens": 512, **changes})
    scripts = []
    scheduler = Scheduler(layout, settings, max_model_len=MAX_MODEL_LEN)
    runner = ModelRunner(model, layout, max_num_seqs=settings.max_num_seqs, max_model_len=MAX_MODEL_LEN)
    closing, runner.close = runner.close, lambda: None  # type: ignore[method-assign]
    for _ in range(rounds):
        script = _Script([[Add((request,))] for request in requests], len(requests))
        EngineLoop(scheduler, runner, script, script, grammar=pool, jumps=jumps).run()
        scheduler.check()
        scheduler.check_idle()
        scripts.append(script)
    closing()
    return scripts


@pytest.mark.parametrize("logprobs", [2, None])
def test_the_same_alone_in_a_batch_in_chunks_from_the_cache_and_after_preemption(
    pool: MatcherPool, logprobs: int | None
) -> None:
    requests = requests_for(13, logprobs)
    expected: dict[str, Outcome] = {}
    num_steps = num_sampled = 0
    for request in requests:
        script = run(pool, [request], jumps=False)[0]
        expected |= script.outcomes
        num_steps += script.num_decode_steps
        num_sampled += len(script.outcomes[request.request_id][0])
    assert num_steps == num_sampled
    jumped = [run(pool, [request])[0].num_decode_steps for request in requests]
    assert (sum(jumped) < num_steps) == (logprobs is None)
    texts = {
        request.request_id: b"".join(PIECES[token] for token in expected[request.request_id][0] if token != EOS)
        for request in requests
        if request.grammar is not None
    }
    finished = [name for name in texts if expected[name][2] is FinishReason.STOP]
    assert len(finished) >= 6
    for name in finished:
        if requests[int(name[1:])].grammar == GRAMMARS[0]:
            assert set(json.loads(texts[name])) == {"ab", "n"}
    for changes in ({}, {"max_num_batched_tokens": 21}, {"max_num_batched_tokens": 7, "max_num_seqs": 5}):
        for script in run(pool, requests, rounds=2, **changes):
            assert script.outcomes == expected, changes
    (short,) = run(pool, requests, num_blocks=10)
    assert short.num_preemptions > 0
    assert short.outcomes == expected
