"""SmolLM2 against an independent implementation: the reference is right, and the native backend is near the reference."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from octavo.backends.base import KVDType
from octavo.backends.cpu.backend import CpuBackend
from octavo.backends.numpy import NumpyBackend
from octavo.contracts import RequestId, RowPlan, Slot, SlotStart, StepPlan, TokenSampling
from octavo.loaders.checkpoint import Checkpoint
from octavo.runner.load import load_model
from octavo.runner.model_runner import ModelRunner
from octavo.text.tokenizer import Tokenizer
from support.driver import layout_for, run
from support.golden import Item, log_softmax, sequence

pytestmark = pytest.mark.timeout(600)  # seconds on a quiet machine, minutes when its cores are shared
END_OF_SEQUENCE = 2
LOGPROBS_WITHIN = 2e-3
MEAN_KL_WITHIN: dict[KVDType, float] = {"auto": 0.004, "int8": 0.0065}
"""In nats. Orders of summation that are equally accurate differ by about 0.0002 here."""
TOP_CHOICES_AGREE = 0.95

Logits = npt.NDArray[np.float32]


def test_prompt_ids(golden: list[Item], checkpoint: Checkpoint) -> None:
    tokenizer = Tokenizer.from_gguf(checkpoint.metadata)
    for item in golden:
        assert tokenizer.encode(item["rendered"]) == item["prompt_ids"]


def test_reference_logprobs(golden: list[Item], reference_logits: list[Logits]) -> None:
    for item, logits in zip(golden, reference_logits, strict=True):
        logprobs = log_softmax(logits)
        assert len(logprobs) == len(item["positions"])
        for row, position in zip(logprobs, item["positions"], strict=True):
            assert abs(row[position["next"]] - position["logprob"]) < LOGPROBS_WITHIN
            for token, logprob in position["top"]:
                assert abs(row[token] - logprob) < LOGPROBS_WITHIN


def test_reference_generates_the_golden_tokens(golden: list[Item], checkpoint: Checkpoint) -> None:
    """All prompts in one batch, through the runner and the sampler."""
    sampling = TokenSampling(max_tokens=48, min_tokens=48, temperature=0.0, eos_token_ids=(END_OF_SEQUENCE,))
    reference = load_model(checkpoint, NumpyBackend())
    layout = layout_for(reference.spec, num_tokens=8192)
    runner = ModelRunner(reference.model, layout, max_num_seqs=len(golden), max_model_len=512)
    size = layout.block_size
    held = [0] * len(golden)
    generated: list[list[int]] = [[] for _ in golden]
    for step in range(48):
        rows, starts = [], []
        for slot, item in enumerate(golden):
            prompt = tuple(item["prompt_ids"])
            begin, count = (0, len(prompt)) if step == 0 else (len(prompt) + step - 1, 1)
            end = -(-(begin + count) // size)
            blocks = tuple(slot * 512 // size + block for block in range(held[slot], end))
            held[slot] = end
            rows.append(RowPlan(slot=Slot(slot), start=begin, count=count, new_blocks=(blocks,), sample=True))
            if step == 0:
                starts.append(
                    SlotStart(
                        slot=Slot(slot),
                        request_id=RequestId(f"r{slot}"),
                        token_ids=prompt,
                        num_prompt_tokens=len(prompt),
                        sampling=sampling,
                    )
                )
        plan = StepPlan(step=step, releases=(), starts=tuple(starts), rows=tuple(rows), num_tokens=0)
        for slot, result in enumerate(runner.submit(plan).sample().rows):
            generated[slot] += result.token_ids
    assert generated == [item["greedy_ids"] for item in golden]


@pytest.mark.parametrize("kv_dtype", MEAN_KL_WITHIN)
def test_native_is_near_the_reference(
    golden: list[Item], checkpoint: Checkpoint, reference_logits: list[Logits], kv_dtype: KVDType
) -> None:
    """Position by position, teacher-forced, over the whole vocabulary: 8-bit block activations cost about 0.003 nats."""
    native = load_model(checkpoint, CpuBackend(threads=2), kv_dtype=kv_dtype)
    layout = layout_for(native.spec)
    native.model.allocate_kv(layout)
    divergences, agreements = [], []
    for item, expected in zip(golden, reference_logits, strict=True):
        (logits,) = run(native.model, layout, [sequence(item)])
        p, q = log_softmax(expected), log_softmax(logits)
        divergences.append((np.exp(p) * (p - q)).sum(axis=1))
        agreements.append(logits.argmax(axis=1) == expected.argmax(axis=1))
    native.model.close()
    assert np.concatenate(divergences).mean() <= MEAN_KL_WITHIN[kv_dtype]
    assert np.concatenate(agreements).mean() >= TOP_CHOICES_AGREE
