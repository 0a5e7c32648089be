"""Beam search over a made-up distribution, against trying everything."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from octavo.errors import InvalidRequestError
from octavo.frontend.beams import BeamSearch, BeamSearchParams, BeamSearchSequence
from octavo.frontend.outputs import Logprob

EOS = 4
PROMPT = [9, 9, 9]


def logprobs(tokens: list[int]) -> dict[int, Logprob]:
    """What follows these tokens: five tokens with made-up probabilities."""
    rng = random.Random(str(tokens))
    weights = [rng.random() ** 3 + 1e-6 for _ in range(5)]
    return {token: Logprob(math.log(weight / sum(weights)), None, None) for token, weight in enumerate(weights)}


def search(**fields: object) -> list[BeamSearchSequence]:
    params = BeamSearchParams(**fields)  # type: ignore[arg-type]
    running = BeamSearch(PROMPT, params, {EOS})
    while running.live:
        running.extend([logprobs(beam.tokens) for beam in running.live])
    return running.best()


def everything(max_tokens: int, ignore_eos: bool, length_penalty: float) -> list[tuple[float, list[int]]]:
    """Score and tokens of all sequences that end with end-of-sequence or are of full length."""
    found = []
    for length in range(1, max_tokens + 1):
        for tail in itertools.product(range(5), repeat=length):
            ended = not ignore_eos and tail[-1] == EOS
            if (not ignore_eos and EOS in tail[:-1]) or (length < max_tokens and not ended):
                continue
            tokens, total = list(PROMPT), 0.0
            for token in tail:
                total += logprobs(tokens)[token].logprob
                tokens.append(token)
            found.append((total / (len(tokens) - ended) ** length_penalty, tokens))
    return sorted(found, key=lambda pair: -pair[0])


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.5])
def test_a_wide_search_finds_the_best(ignore_eos: bool, length_penalty: float) -> None:
    best = search(beam_width=64, max_tokens=3, ignore_eos=ignore_eos, length_penalty=length_penalty)
    expected = everything(3, ignore_eos, length_penalty)
    assert [beam.tokens for beam in best[:10]] == [tokens for _, tokens in expected[:10]]
    for beam in best:
        ended = not ignore_eos and beam.tokens[-1] == EOS
        assert (beam.finish_reason, beam.stop_reason) == (("stop", EOS) if ended else ("length", None))
        steps = [entry[token].logprob for entry, token in zip(beam.logprobs, beam.tokens[3:], strict=True)]
        assert beam.cum_logprob == pytest.approx(sum(steps))


def test_a_beam_of_one_is_greedy() -> None:
    (best,) = search(beam_width=1, max_tokens=6, ignore_eos=True)
    tokens = list(PROMPT)
    for _ in range(6):
        tokens.append(max(logprobs(tokens).items(), key=lambda item: item[1].logprob)[0])
    assert best.tokens == tokens


def test_the_number_of_sequences_is_the_width() -> None:
    assert len(search(beam_width=3, max_tokens=4)) == 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"beam_width": 0, "max_tokens": 1}, "beam_width"),
        ({"beam_width": 65, "max_tokens": 1}, "beam_width"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens"),
        ({"beam_width": 2, "max_tokens": 1, "temperature": 0.5}, "temperature"),
        ({"beam_width": 2, "max_tokens": 1, "length_penalty": math.nan}, "length_penalty"),
        ({"beam_width": 2, "max_tokens": 1, "ignore_eos": 1}, "ignore_eos"),
    ],
)
def test_wrong_parameters_are_named(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        BeamSearchParams(**fields)  # type: ignore[arg-type]
    assert refused.value.param == param
