"""The `Sampler` contract (octavo.backends.base), for the numpy reference and the native sampler on every instruction set."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from octavo.backends.base import F32, NAN_LOGITS, NOTHING_LEFT, RowMasks, Sampled, Sampler
from octavo.backends.cpu import _native
from octavo.backends.cpu.sampler import CpuSampler
from octavo.backends.numpy.sampler import NumpySampler
from octavo.contracts import TokenSampling
from octavo.errors import EngineError
from support.sampling import acceptable_tokens, exact_logprobs

ISAS: list[str] = _native.available_isas()
NAMES = ["numpy", *ISAS]
MakeSampler = Callable[[int, int], Sampler]
LARGE = 49_152  # SmolLM2's vocabulary: many chunks of the native passes, the last one full
inf = math.inf


def make(name: str, max_num_seqs: int, vocab_size: int) -> Sampler:
    return NumpySampler(max_num_seqs, vocab_size) if name == "numpy" else CpuSampler(max_num_seqs, vocab_size, isa=name)


@pytest.fixture(params=NAMES)
def make_sampler(request: pytest.FixtureRequest) -> MakeSampler:
    return lambda max_num_seqs, vocab_size: make(request.param, max_num_seqs, vocab_size)


def sampling(**changes: object) -> TokenSampling:
    return msgspec.structs.replace(TokenSampling(max_tokens=100), **changes)


def i32(values: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


def f32(rows: Sequence[Sequence[float]]) -> F32:
    return np.array(rows, np.float32)


def sample_one(
    make_sampler: MakeSampler,
    logits: Sequence[float],
    params: TokenSampling,
    tokens: Sequence[int] = (0,),
    num_prompt: int | None = None,
    position: int | None = None,
) -> Sampled:
    """The next token of a sequence of its own."""
    sampler = make_sampler(1, len(logits))
    sampler.start(0, params, i32(tokens), len(tokens) if num_prompt is None else num_prompt)
    return sampler.sample(f32([logits]), [0], [len(tokens) if position is None else position])[0]


def generate(sampler: Sampler, slot: int, logits: Sequence[float], count: int, first: int) -> list[int]:
    """Tokens of `count` steps that all see the same logits."""
    return [sampler.sample(f32([logits]), [slot], [position])[0].token for position in range(first, first + count)]


# --- each parameter alone -------------------------------------------------------------------------------------------


def test_greedy_takes_the_largest_and_of_equals_the_lowest_id(make_sampler: MakeSampler) -> None:
    greedy = sampling(temperature=0.0)
    assert sample_one(make_sampler, [0.0, 3.0, 1.0, 3.0, -1.0], greedy).token == 1
    assert sample_one(make_sampler, [2.0] * 37, greedy).token == 0
    for best in (0, 15, 16, 1023, 1024, 2047, 2048, 2049):
        logits = [-1.0] * 2050
        logits[best:] = [5.0] * (2050 - best)
        assert sample_one(make_sampler, logits, greedy).token == best


def test_allowed_tokens_mask_all_others(make_sampler: MakeSampler) -> None:
    logits = [5.0, 4.0, 3.0, 2.0, 1.0]
    assert sample_one(make_sampler, logits, sampling(temperature=0.0, allowed_token_ids=(4, 2))).token == 2
    drawn = {
        sample_one(make_sampler, logits, sampling(allowed_token_ids=(4, 2)), position=position).token
        for position in range(60)
    }
    assert drawn == {2, 4}


def row_masks(allowed: Sequence[Sequence[int] | None], vocab: int) -> RowMasks:
    """Masks that allow the given tokens, none for a row with None; in reverse order, as rows may refer to any."""
    sets = [ids for ids in allowed if ids is not None]
    bits = np.zeros((len(sets), -(-vocab // 32) * 32), np.uint8)
    for row, ids in enumerate(reversed(sets)):
        bits[row, list(ids)] = 1
    places = iter(range(len(sets) - 1, -1, -1))
    return RowMasks(
        words=np.packbits(bits, axis=1, bitorder="little").view(np.uint32),
        rows=i32([-1 if ids is None else next(places) for ids in allowed]),
    )


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1000, 49152])
def test_a_mask_is_as_if_no_other_token_were_allowed(make_sampler: MakeSampler, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = rng.normal(0, 4, (6, vocab)).astype(np.float32)
    allowed = [
        None,
        [int(rng.integers(vocab))],
        sorted({int(token) for token in rng.integers(0, vocab, 20)}),
        list(range(vocab)),
        list(range(0, vocab, 2)),
        None,
    ]
    for changes in (
        {"temperature": 0.0},
        {"temperature": 1.0, "logprobs": 3, "frequency_penalty": 1.0},
        {"top_p": 0.8},
    ):
        params = [sampling(seed=row, **changes) for row in range(6)]
        masked, listed = make_sampler(6, vocab), make_sampler(6, vocab)
        for row, one in enumerate(params):
            masked.start(row, one, i32([0]), 0)
            listed.start(
                row,
                msgspec.structs.replace(one, allowed_token_ids=None if allowed[row] is None else tuple(allowed[row])),
                i32([0]),
                0,
            )
        for position in (1, 2):
            with_masks = masked.sample(logits.copy(), range(6), [position] * 6, row_masks(allowed, vocab))
            assert with_masks == listed.sample(logits.copy(), range(6), [position] * 6)


def test_tokens_beyond_a_mask_are_not_allowed(make_sampler: MakeSampler) -> None:
    sampler = make_sampler(1, 40)
    sampler.start(0, sampling(temperature=0), i32([0]), 1)
    logits = np.arange(40, dtype=np.float32)[None]
    short = RowMasks(words=np.full((1, 1), 0xFFFFFFFF, np.uint32), rows=i32([0]))
    assert sampler.sample(logits.copy(), [0], [1], short)[0].token == 31
    nothing = RowMasks(words=np.zeros((1, 2), np.uint32), rows=i32([0]))
    assert sampler.sample(logits.copy(), [0], [2], nothing)[0] == Sampled(-1, error=NOTHING_LEFT)


def test_masks_that_do_not_fit_are_refused(make_sampler: MakeSampler) -> None:
    sampler = make_sampler(2, 40)
    sampler.start(0, sampling(), i32([0]), 1)
    words = np.zeros((1, 2), np.uint32)
    for rows in ([1], [-2], [0, 0], []):
        with pytest.raises(ValueError, match="mask"):
            sampler.sample(np.zeros((1, 40), np.float32), [0], [1], RowMasks(words=words, rows=i32(rows)))


def test_logit_bias_is_added_but_does_not_unmask(make_sampler: MakeSampler) -> None:
    logits = [5.0, 4.0, 3.0]
    assert sample_one(make_sampler, logits, sampling(temperature=0.0, logit_bias=((2, 2.5),))).token == 2
    assert sample_one(make_sampler, logits, sampling(temperature=0.0, logit_bias=((0, -100.0),))).token == 1
    masked = sampling(temperature=0.0, allowed_token_ids=(1,), logit_bias=((2, 100.0), (0, inf)))
    assert sample_one(make_sampler, logits, masked).token == 1


def test_bad_words_mask_the_token_that_would_complete_one(make_sampler: MakeSampler) -> None:
    logits = [1.0, 5.0, 4.0, 3.0]
    greedy = sampling(temperature=0.0, bad_words=((2,), (3, 0, 1), (0, 0, 0, 0, 0, 0)))
    assert (
        sample_one(make_sampler, logits, greedy, tokens=[3, 3, 0]).token == 3
    )  # 1 would complete 3 0 1; 2 is bad alone
    assert sample_one(make_sampler, logits, greedy, tokens=[3, 0, 0]).token == 1
    assert sample_one(make_sampler, logits, greedy, tokens=[0]).token == 1
    # Over generated tokens too: 1, then 1 1 would be the bad word, so 2, then 1 again.
    sampler = make_sampler(1, 4)
    sampler.start(0, sampling(temperature=0.0, bad_words=((1, 1),)), i32([0]), 1)
    assert generate(sampler, 0, logits, 4, first=1) == [1, 2, 1, 2]


def test_penalties_count_as_documented(make_sampler: MakeSampler) -> None:
    logits = [4.0, 3.5, -1.0, 3.0]
    tokens, num_prompt = [0, 2, 1, 1], 2  # prompt: 0 2, generated: 1 1

    def order(**penalties: float) -> list[int]:
        """Tokens from most to least likely after penalties, seen by masking one after the other."""
        seen: list[int] = []
        for _ in logits:
            params = sampling(temperature=0.0, bad_words=tuple((token,) for token in seen), **penalties)
            seen.append(sample_one(make_sampler, logits, params, tokens, num_prompt).token)
        return seen

    assert order() == [0, 1, 3, 2]
    assert order(presence_penalty=2.0, frequency_penalty=2.0) == [0, 3, 2, 1]  # of the prompt's tokens these count none
    assert order(presence_penalty=0.25) == [0, 1, 3, 2]  # 3.25: once, however often
    assert order(presence_penalty=0.75) == [0, 3, 1, 2]
    assert order(frequency_penalty=0.375) == [0, 3, 1, 2]  # 3.5 - 2 * 0.375
    assert order(presence_penalty=-1.0) == [1, 0, 3, 2]
    assert order(repetition_penalty=8.0) == [3, 0, 1, 2]  # -1 becomes -8, 4 becomes 0.5
    assert order(repetition_penalty=0.5) == [0, 1, 3, 2]


def test_repetition_penalty_multiplies_negative_logits(make_sampler: MakeSampler) -> None:
    params = sampling(temperature=0.0, repetition_penalty=2.0)
    assert sample_one(make_sampler, [-1.0, -1.5], params, tokens=[0]).token == 1
    assert sample_one(make_sampler, [-1.0, -2.5], params, tokens=[0]).token == 0


def test_counts_follow_the_generated_tokens(make_sampler: MakeSampler) -> None:
    sampler = make_sampler(1, 3)
    sampler.start(0, sampling(temperature=0.0, frequency_penalty=1.0), i32([2]), 1)
    assert generate(sampler, 0, [2.5, 2.0, 0.0], 8, first=1) == [0, 1, 0, 1, 0, 1, 2, 0]


def test_top_k_keeps_exactly_k_of_equals_the_lowest_ids(make_sampler: MakeSampler) -> None:
    logits = [1.0, 2.0, 1.0, 1.0, 1.0]
    drawn = {sample_one(make_sampler, logits, sampling(top_k=3), position=position).token for position in range(100)}
    assert drawn == {0, 1, 2}


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.0, 1), (1e-300, 1), (0.49, 1), (0.51, 2), (0.74, 2), (0.76, 3), (1.0, 4)]
)
def test_top_p_keeps_the_shortest_list_that_reaches_it(make_sampler: MakeSampler, top_p: float, kept: int) -> None:
    logits = [math.log(0.125), math.log(0.25), math.log(0.5), math.log(0.125) - 1e-3]
    drawn = {
        sample_one(make_sampler, logits, sampling(top_p=top_p), position=position).token for position in range(150)
    }
    assert drawn == set([2, 1, 0, 3][:kept])


def test_top_p_is_a_share_of_what_top_k_kept(make_sampler: MakeSampler) -> None:
    logits = [math.log(p) for p in (0.2, 0.2001, 0.3, 0.1, 0.1999)]
    # Of 0.3 and 0.2001 the first has a share of 0.5999 of what two tokens have, but 0.3 of all.
    drawn = {
        sample_one(make_sampler, logits, sampling(top_k=2, top_p=0.59), position=position).token
        for position in range(60)
    }
    assert drawn == {2}


@pytest.mark.parametrize(("min_p", "kept"), [(0.24, 3), (0.26, 2), (0.49, 2), (0.51, 1), (1.0, 1)])
def test_min_p_is_relative_to_the_largest(make_sampler: MakeSampler, min_p: float, kept: int) -> None:
    logits = [math.log(0.125), math.log(0.25), math.log(0.5)]
    drawn = {sample_one(make_sampler, logits, sampling(min_p=min_p), position=position).token for position in range(80)}
    assert drawn == set([2, 1, 0][:kept])


def test_min_p_keeps_all_of_equals(make_sampler: MakeSampler) -> None:
    drawn = {
        sample_one(make_sampler, [1.0, 0.999, 1.0], sampling(min_p=1.0), position=position).token
        for position in range(40)
    }
    assert drawn == {0, 2}


# --- noise ----------------------------------------------------------------------------------------------------------


def test_the_same_key_gives_the_same_token_and_another_key_another_sequence(make_sampler: MakeSampler) -> None:
    """O-21: seeds."""
    logits = [0.0] * 100

    def sequence(first: int = 1, **changes: object) -> list[int]:
        sampler = make_sampler(1, 100)
        sampler.start(0, sampling(**changes), i32([0]), 1)
        return generate(sampler, 0, logits, 12, first)

    base = sequence(seed=7)
    assert base == sequence(seed=7)
    others = [sequence(seed=8), sequence(seed=7, choice=1), sequence(seed=7, choice=2), sequence(seed=7 + 2**32)]
    assert len({tuple(tokens) for tokens in [base, *others]}) == 5
    assert sequence(first=4, seed=7)[:9] == base[3:]  # the position decides, not how many were drawn before
    assert sequence(seed=-1) == sequence(seed=2**64 - 1)


def test_frequencies_are_the_probabilities(make_sampler: MakeSampler) -> None:
    """Chi-square of 20,000 and of 5,000 draws with a fixed seed: 7 degrees of freedom, 0.1 % point 24.3."""
    shares = np.array([0.3, 0.2, 0.15, 0.12, 0.1, 0.06, 0.04, 0.03])
    rows = 500
    for params, steps in (
        (sampling(seed=1), 40),
        (sampling(seed=2, temperature=2.0), 10),
        (sampling(seed=3, top_k=5), 10),
    ):
        p = shares ** (1 / params.temperature)
        if params.top_k:
            p[params.top_k :] = 0
        p /= p.sum()
        sampler = make_sampler(rows, 8)
        counts: Counter[int] = Counter()
        for row in range(rows):
            sampler.start(row, params, i32([0]), 1)
        for step in range(steps):
            logits = np.tile(np.log(shares).astype(np.float32), (rows, 1))
            positions = range(step * rows, (step + 1) * rows)
            counts.update(sampled.token for sampled in sampler.sample(logits, range(rows), positions))
        assert set(counts) == set(np.flatnonzero(p).tolist())
        expected = p[p > 0] * rows * steps
        observed = np.array([counts[token] for token in np.flatnonzero(p).tolist()])
        assert ((observed - expected) ** 2 / expected).sum() < 24.3


# --- all together ---------------------------------------------------------------------------------------------------

GRID = st.integers(-40, 40).map(lambda n: n / 4)  # exact under bias and penalties, with many ties


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[float], TokenSampling, list[int], int]:
    """(logits, parameters, known tokens, prompt length) over a small vocabulary, with a token left to choose."""
    vocab = draw(st.integers(5, 200))
    ids = st.integers(0, vocab - 1)
    free = draw(ids)  # never masked
    others = ids.filter(lambda token: token != free)
    logits = draw(st.lists(st.one_of(GRID, GRID, GRID, st.just(-inf)), min_size=vocab, max_size=vocab))
    logits[free] = draw(GRID)
    tokens = draw(st.lists(ids, min_size=1, max_size=30))
    some = st.lists(others, max_size=4).map(tuple)
    allowed = draw(st.none() | st.lists(ids, min_size=1, max_size=20, unique=True))
    params = sampling(
        temperature=draw(st.sampled_from([0.0, 1e-6, 0.25, 0.7, 1.0, 1.5, 3.0])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 7, 40, 10**6])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.1, 0.0])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 0.3, 1.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.5, -1.25, 2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.25, -0.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 2.0, 0.5])),
        seed=draw(st.integers(0, 2**64 - 1)),
        choice=draw(st.integers(0, 3)),
        min_tokens=draw(st.integers(0, 10)),
        eos_token_ids=draw(some),
        stop_token_ids=draw(some),
        logit_bias=tuple(draw(st.dictionaries(ids, GRID, max_size=4)).items()),
        allowed_token_ids=None if allowed is None else (*allowed, free),
        bad_words=tuple(
            (*word, last) for word, last in draw(st.lists(st.tuples(st.lists(ids, max_size=2), others), max_size=4))
        ),
        logprobs=draw(st.sampled_from([None, 0, 1, 5, -1])),
    )
    return logits, params, tokens, draw(st.integers(0, len(tokens)))


def check_logprobs(sampled: Sampled, logits: Sequence[float], wanted: int | None) -> None:
    if wanted is None:
        assert sampled.logprobs is None
        return
    assert sampled.logprobs is not None
    exact = exact_logprobs(logits)
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    ids = sampled.logprobs.token_ids
    assert ids[0] == sampled.token
    assert list(ids[1:]) == (order if wanted < 0 else order[:wanted])
    assert sampled.logprobs.rank == order.index(sampled.token) + 1
    assert sampled.logprobs.logprobs == pytest.approx([exact[token] for token in ids], abs=1e-5)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(case=cases())
@example(case=([0.0] * 17, sampling(top_k=16, top_p=0.5), [0], 1))
@example(case=([-inf] * 16 + [1.0], sampling(top_k=5, top_p=0.9, min_p=0.1, logprobs=-1), [16, 16], 1))
def test_every_sampler_does_what_the_contract_says(case: tuple[list[float], TokenSampling, list[int], int]) -> None:
    logits, params, tokens, num_prompt = case
    acceptable = acceptable_tokens(logits, params, tokens, num_prompt, position=len(tokens))
    results = {
        name: sample_one(lambda seqs, vocab, name=name: make(name, seqs, vocab), logits, params, tokens, num_prompt)  # type: ignore[misc]
        for name in NAMES
    }
    for name, sampled in results.items():
        assert sampled.error is None
        assert sampled.token in acceptable, name
        check_logprobs(sampled, logits, params.logprobs)
    if len(acceptable) == 1:
        assert len({sampled.token for sampled in results.values()}) == 1
    for isa in ISAS:
        assert results[isa] == results["portable"]  # to the bit, logprobs included


LARGE_PARAMS = {
    "greedy": sampling(temperature=0.0, logprobs=5),
    "plain": sampling(logprobs=0),
    "hot": sampling(temperature=2.0, logprobs=1),
    "top_k": sampling(top_k=50, logprobs=20),
    "big top_k": sampling(top_k=5000),
    "top_p": sampling(top_p=0.9),
    "wide top_p": sampling(temperature=1.5, top_p=0.999),
    "flat top_p": sampling(temperature=50.0, top_p=0.5),
    "min_p": sampling(min_p=0.02),
    "tiny min_p": sampling(temperature=3.0, min_p=1e-6),
    "all": sampling(temperature=0.8, top_k=200, top_p=0.95, min_p=0.01, repetition_penalty=1.25, logprobs=3),
    "penalised": sampling(
        presence_penalty=0.5, frequency_penalty=0.25, logit_bias=((7, 5.0),), bad_words=((3, 4), (9,))
    ),
    "whole vocabulary": sampling(logprobs=-1),
}


@pytest.mark.parametrize("params", LARGE_PARAMS.values(), ids=LARGE_PARAMS.keys())
@pytest.mark.parametrize("vocab", [LARGE, LARGE - 7])
def test_large_vocabularies(params: TokenSampling, vocab: int) -> None:
    """Logits shaped like a model's: a few tokens far ahead of a wide bell."""
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 2.5, vocab).astype(np.float32)
    logits[rng.integers(0, vocab, 30)] += np.float32(8)
    tokens = rng.integers(0, vocab, 100).tolist()
    steps = 1 if params.logprobs == -1 else 4
    params = msgspec.structs.replace(params, seed=11)
    expected: list[Sampled] | None = None
    for name in NAMES:
        sampler = make(name, steps, vocab)
        for slot in range(steps):
            sampler.start(slot, params, i32(tokens), 60)
        results = sampler.sample(np.tile(logits, (steps, 1)), range(steps), range(100, 100 + steps))
        if name == "numpy":
            assert results[0].token in acceptable_tokens(logits.tolist(), params, tokens, 60, 100)
            check_logprobs(results[0], logits.tolist(), params.logprobs)
            reference = results
            continue
        if expected is None:
            expected = results
            for position, (ours, theirs) in enumerate(zip(results, reference, strict=True), 100):
                if ours.token != theirs.token:
                    assert ours.token in acceptable_tokens(logits.tolist(), params, tokens, 60, position)
                elif ours.logprobs is not None and theirs.logprobs is not None:
                    assert ours.logprobs.token_ids == theirs.logprobs.token_ids
                    assert ours.logprobs.rank == theirs.logprobs.rank
                    np.testing.assert_allclose(ours.logprobs.logprobs, theirs.logprobs.logprobs, rtol=0, atol=1e-5)
        assert results == expected  # every instruction set, to the bit


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(case=cases(), data=st.data())
def test_a_row_does_not_depend_on_the_others(
    case: tuple[list[float], TokenSampling, list[int], int], data: st.DataObject
) -> None:
    logits, params, tokens, num_prompt = case
    vocab = len(logits)
    fillers = data.draw(
        st.lists(st.sampled_from([sampling(), sampling(temperature=0.0, logprobs=2), sampling(top_p=0.5)]), max_size=5)
    )
    place = data.draw(st.integers(0, len(fillers)))
    all_params = [*fillers[:place], params, *fillers[place:]]
    for name in NAMES:
        alone = sample_one(lambda seqs, vocab, name=name: make(name, seqs, vocab), logits, params, tokens, num_prompt)  # type: ignore[misc]
        sampler = make(name, 10, vocab)
        slots = list(range(9, 9 - len(all_params), -1))
        rows = np.full((len(all_params), vocab), 1.0, np.float32)
        rows[place] = logits
        rows[[row for row in range(len(all_params)) if row != place], 0] = np.nan if place % 2 else 3.0
        for slot, each in zip(slots, all_params, strict=True):
            sampler.start(slot, each, i32(tokens), num_prompt)
        together = sampler.sample(rows, slots, [len(tokens)] * len(slots))
        assert together[place] == alone


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_change_a_bit(threads: int) -> None:
    rng = np.random.default_rng(9)
    rows = 24
    logits = rng.normal(0, 3, (3, rows, 2000)).astype(np.float32)
    mixed = [sampling(seed=1, logprobs=2), sampling(top_p=0.8, frequency_penalty=0.5), sampling(temperature=0.0)]
    results = []
    for pool in (None, _native.Pool(threads)):
        sampler = CpuSampler(rows, 2000, pool=pool)
        for slot in range(rows):
            sampler.start(slot, mixed[slot % 3], i32([slot]), 1)
        results.append([sampler.sample(step.copy(), range(rows), [at] * rows) for at, step in enumerate(logits, 1)])
    assert results[0] == results[1]


# --- cases of the past ----------------------------------------------------------------------------------------------


def test_min_tokens_holds_back_every_end_token_then_lets_go(make_sampler: MakeSampler) -> None:
    """O-20: several end-of-sequence ids with a bias of +100, and stop ids; generated tokens count, the prompt does not."""
    logits = [0.0, 1.0, 0.5, 0.25, -3.0]
    for end in (2, 3, 4):
        params = sampling(
            temperature=0.0, min_tokens=4, eos_token_ids=(2, 3), stop_token_ids=(4, 10**6), logit_bias=((end, 100.0),)
        )
        sampler = make_sampler(1, 5)
        sampler.start(0, params, i32([0] * 9), 9)
        assert generate(sampler, 0, logits, 6, first=9) == [1, 1, 1, 1, end, end]
        sampler.start(0, params, i32([0] * 9 + [1] * 3), 9)  # resumed after three
        assert generate(sampler, 0, logits, 2, first=12) == [1, end]
    ignoring = sampling(temperature=0.0, min_tokens=1, eos_token_ids=(1,), ignore_eos=True)
    assert sample_one(make_sampler, logits, ignoring).token == 2


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-300, 1e-6, 9.9e-6, 1e-4])
def test_tiny_temperatures_are_greedy(make_sampler: MakeSampler, temperature: float) -> None:
    """O-06. 1e-4 is computed, and as sharp."""
    for position in range(20):
        params = sampling(temperature=temperature, logprobs=1)
        sampled = sample_one(make_sampler, [80.0, 99.0, 99.5, -3e38], params, position=position)
        assert sampled.token == 2
        assert sampled.logprobs is not None and all(math.isfinite(value) for value in sampled.logprobs.logprobs)


@pytest.mark.parametrize("temperature", [1e10, 1e38, 1e300, 1.7e308])
def test_huge_temperatures_are_uniform_over_what_is_not_masked(make_sampler: MakeSampler, temperature: float) -> None:
    params = sampling(temperature=temperature, allowed_token_ids=(0, 2, 3))
    drawn = {
        sample_one(make_sampler, [0.0, 1.0, 50.0, -50.0], params, position=position).token for position in range(60)
    }
    assert drawn == {0, 2, 3}


@settings(max_examples=100, deadline=None)
@given(
    logits=st.lists(
        st.one_of(
            st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False),
            st.sampled_from([inf, -inf, 3.4e38, 0.0, -0.0]),
        ),
        min_size=1,
        max_size=40,
    ),
    temperature=st.floats(0, allow_nan=False, allow_infinity=False),
    top_k=st.integers(0, 2**31 - 1),
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
    penalty=st.floats(-2, 2),
    repetition=st.floats(1e-6, 1e6),
)
def test_extreme_values_are_safe(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, penalty: float, repetition: float
) -> None:
    params = sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        presence_penalty=penalty,
        repetition_penalty=repetition,
        logprobs=2,
    )
    results = {}
    for name in NAMES:
        sampled = sample_one(lambda seqs, vocab, name=name: make(name, seqs, vocab), logits, params)  # type: ignore[misc]
        results[name] = sampled
        if max(logits) == -inf:
            assert sampled == Sampled(-1, error=NOTHING_LEFT)
            continue
        assert sampled.error is None and sampled.logprobs is not None
        assert logits[sampled.token] > -inf
        assert not any(math.isnan(value) or value > 0 for value in sampled.logprobs.logprobs)
    assert all(results[isa] == results["portable"] for isa in ISAS)


def test_a_resumed_sequence_goes_on_as_if_never_preempted(make_sampler: MakeSampler) -> None:
    params = sampling(
        seed=3,
        presence_penalty=0.5,
        frequency_penalty=0.75,
        repetition_penalty=1.25,
        bad_words=((4, 5), (6, 7, 8)),
        min_tokens=8,
        eos_token_ids=(1,),
        logprobs=2,
    )
    rng = np.random.default_rng(2)
    steps = rng.normal(0, 1, (30, 1, 12)).astype(np.float32)
    prompt = [3, 3, 4]
    sampler = make_sampler(2, 12)
    sampler.start(0, params, i32(prompt), 3)
    whole = [sampler.sample(logits.copy(), [0], [3 + i])[0] for i, logits in enumerate(steps)]
    for cut in (1, 6, 9, 20):
        known = prompt + [sampled.token for sampled in whole[:cut]]
        sampler.start(1, params, i32(known), 3)
        resumed = [sampler.sample(steps[i].copy(), [1], [3 + i])[0] for i in range(cut, 30)]
        assert resumed == whole[cut:]
        sampler.stop(1)
        sampler.start(1, params, i32(known[:4]), 3)
        sampler.extend(1, i32(known[4:]))
        extended = [sampler.sample(steps[i].copy(), [1], [3 + i])[0] for i in range(cut, 30)]
        assert extended == whole[cut:]
        sampler.stop(1)


# --- rows that cannot be sampled ------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 15, 16, 99])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_ends_its_row_alone(make_sampler: MakeSampler, place: int, temperature: float) -> None:
    sampler = make_sampler(3, 100)
    for slot in range(3):
        sampler.start(slot, sampling(temperature=temperature, logprobs=3, allowed_token_ids=(40, 50)), i32([0]), 1)
    rows = np.zeros((3, 100), np.float32)
    rows[1, place] = np.nan
    results = sampler.sample(rows, [0, 1, 2], [1, 1, 1])
    assert results[1] == Sampled(-1, error=NAN_LOGITS)
    for good in (results[0], results[2]):
        assert good.error is None and good.token in (40, 50) and good.logprobs is not None
    # The failed token was not counted: the slot goes on as if it had not been asked.
    assert sampler.sample(rows[[0]], [1], [1])[0].token == results[0].token


@pytest.mark.parametrize(
    "params",
    [
        sampling(allowed_token_ids=(1,), logit_bias=((1, -inf),)),
        sampling(allowed_token_ids=(2,), bad_words=((2,),)),
        sampling(allowed_token_ids=(0, 1), min_tokens=1, eos_token_ids=(0,), stop_token_ids=(1,), temperature=0.0),
        sampling(allowed_token_ids=(3,), top_k=2, top_p=0.5, logprobs=2),
    ],
)
def test_nothing_left_is_an_error_of_the_row(make_sampler: MakeSampler, params: TokenSampling) -> None:
    assert sample_one(make_sampler, [0.0, 1.0, 2.0, -inf], params) == Sampled(-1, error=NOTHING_LEFT)


def test_infinite_logits_share_all_probability(make_sampler: MakeSampler) -> None:
    logits = [inf, 5.0, inf, -inf]
    drawn = {}
    for position in range(40):
        sampled = sample_one(make_sampler, logits, sampling(logprobs=-1), position=position)
        drawn[sampled.token] = sampled.logprobs
    assert set(drawn) == {0, 2}
    assert drawn[2] is not None
    assert drawn[2].token_ids == (2, 0, 2, 1, 3)
    assert drawn[2].logprobs == pytest.approx((math.log(0.5), math.log(0.5), math.log(0.5), -inf, -inf))
    assert drawn[2].rank == 2
    assert sample_one(make_sampler, logits, sampling(temperature=0.0, logit_bias=((0, -inf),))).token == 2
    assert sample_one(make_sampler, [1.0, 2.0], sampling(logit_bias=((0, inf),))).token == 0


# --- logprobs -------------------------------------------------------------------------------------------------------


def test_logprobs_are_of_the_raw_logits(make_sampler: MakeSampler) -> None:
    logits = [2.0, 1.0, -inf, 2.0, 0.0]
    params = sampling(
        temperature=0.0, logit_bias=((4, 50.0),), repetition_penalty=2.0, allowed_token_ids=(0, 4), logprobs=-1
    )
    sampled = sample_one(make_sampler, logits, params)
    assert sampled.token == 4
    check_logprobs(sampled, logits, -1)
    assert sampled.logprobs is not None
    assert sampled.logprobs.token_ids == (4, 0, 3, 1, 4, 2)
    assert sampled.logprobs.rank == 4
    assert sampled.logprobs.logprobs[-1] == -inf


def test_more_logprobs_than_tokens_gives_all(make_sampler: MakeSampler) -> None:
    sampled = sample_one(make_sampler, [0.0, 1.0, 2.0], sampling(logprobs=20))
    check_logprobs(sampled, [0.0, 1.0, 2.0], -1)


@pytest.mark.parametrize("vocab", [5, 16, 100, 3000])
@pytest.mark.parametrize("num_top", [0, 1, 3, 40, -1])
def test_score_gives_targets_and_the_most_likely(make_sampler: MakeSampler, vocab: int, num_top: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = rng.normal(0, 3, (4, vocab)).astype(np.float32).round(1)  # rounded: ties
    targets = rng.integers(0, vocab, 4).tolist()
    results = make_sampler(1, vocab).score(logits.copy(), targets, num_top)
    assert len(results) == 4
    for row, target, entries in zip(logits, targets, results, strict=True):
        check_logprobs(Sampled(target, entries), row.tolist(), num_top)


def test_scores_equal_sampled_logprobs_to_the_bit(make_sampler: MakeSampler) -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 3, (5, 700)).astype(np.float32)
    sampler = make_sampler(5, 700)
    for slot in range(5):
        sampler.start(slot, sampling(top_p=0.9, logprobs=4), i32([0]), 1)
    sampled = sampler.sample(logits.copy(), range(5), range(5))
    assert sampler.score(logits, [each.token for each in sampled], 4) == [each.logprobs for each in sampled]


def test_unusable_rows_cannot_be_scored(make_sampler: MakeSampler) -> None:
    sampler = make_sampler(1, 4)
    with pytest.raises(EngineError, match="NaN"):
        sampler.score(f32([[0, 0, 0, 0], [0, np.nan, 0, 0]]), [0, 0], 1)
    with pytest.raises(EngineError, match="no token"):
        sampler.score(f32([[-inf] * 4]), [0], 1)
    with pytest.raises(ValueError, match="target"):
        sampler.score(f32([[0.0] * 4]), [4], 1)


def test_no_rows(make_sampler: MakeSampler) -> None:
    sampler = make_sampler(1, 4)
    assert sampler.sample(np.zeros((0, 4), np.float32), [], []) == []
    assert sampler.score(np.zeros((0, 4), np.float32), [], 2) == []


# --- misuse ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        sampling(logit_bias=((5, 1.0),)),
        sampling(logit_bias=((-1, 1.0),)),
        sampling(allowed_token_ids=(0, 5)),
        sampling(bad_words=((0, 5),)),
        sampling(bad_words=((),)),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(make_sampler: MakeSampler, params: TokenSampling) -> None:
    sampler = make_sampler(2, 5)
    with pytest.raises(ValueError, match=r"vocabulary|empty"):
        sampler.start(0, params, i32([0]), 1)


def test_misuse_is_refused_before_anything_changes(make_sampler: MakeSampler) -> None:
    sampler = make_sampler(2, 5)
    with pytest.raises(ValueError, match="slot"):
        sampler.start(2, sampling(), i32([0]), 1)
    with pytest.raises(ValueError, match="slot"):
        sampler.start(-1, sampling(), i32([0]), 1)
    with pytest.raises(ValueError, match="prompt of 2"):
        sampler.start(0, sampling(), i32([0]), 2)
    with pytest.raises(ValueError, match="known tokens"):
        sampler.start(0, sampling(), i32([0, 5]), 2)
    with pytest.raises(ValueError, match="not been started"):
        sampler.stop(0)
    with pytest.raises(ValueError, match="not been started"):
        sampler.extend(0, i32([1]))
    sampler.start(0, sampling(), i32([0]), 1)
    with pytest.raises(ValueError, match="forced tokens: token id 5"):
        sampler.extend(0, i32([1, 5]))
    with pytest.raises(ValueError, match="twice"):
        sampler.sample(np.zeros((2, 5), np.float32), [0, 0], [1, 2])
    with pytest.raises(ValueError, match="not been started"):
        sampler.sample(np.zeros((2, 5), np.float32), [0, 1], [1, 1])
    with pytest.raises(ValueError, match="shape"):
        sampler.sample(np.zeros((1, 6), np.float32), [0], [1])
    with pytest.raises(ValueError, match="shape"):
        sampler.sample(np.zeros((2, 5), np.float32), [0], [1])
    sampler.sample(np.zeros((1, 5), np.float32), [0], [1])
    sampler.stop(0)
    with pytest.raises(ValueError, match="not been started"):
        sampler.sample(np.zeros((1, 5), np.float32), [0], [1])


def test_a_slot_forgets_its_last_sequence(make_sampler: MakeSampler) -> None:
    sampler = make_sampler(1, 3)
    sampler.start(0, sampling(temperature=0.0, presence_penalty=2.0, bad_words=((0,),)), i32([2]), 1)
    assert generate(sampler, 0, [3.0, 2.0, 1.0], 2, first=1) == [1, 2]
    sampler.stop(0)
    sampler.start(0, sampling(temperature=0.0), i32([2]), 1)
    assert generate(sampler, 0, [3.0, 2.0, 1.0], 2, first=1) == [0, 0]


def test_an_instruction_set_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="available: portable"):
        CpuSampler(1, 10, isa="mmx")
