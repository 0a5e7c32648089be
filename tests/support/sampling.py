"""What the `Sampler` contract allows, computed in exact and float64 arithmetic, token by token, apart from any implementation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

from octavo.contracts import TokenSampling

PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
TOLERANCE = 1e-5
"""Share of probability by which float32 exponentials may shift a boundary."""


def noise(seed: int, position: int, choice: int) -> float:
    """u of the contract: first word of Philox4x32-10."""
    counter, key = [position, choice, 0, 0], [seed % 2**32, seed // 2**32 % 2**32]
    for _ in range(10):
        high0, low0 = divmod(PHILOX_MULTIPLIERS[0] * counter[0], 2**32)
        high1, low1 = divmod(PHILOX_MULTIPLIERS[1] * counter[2], 2**32)
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return (counter[0] + 0.5) / 2**32


def treated_logits(
    logits: Sequence[float], sampling: TokenSampling, tokens: Sequence[int], num_prompt: int
) -> list[float]:
    """Logits after masks, bias and penalties."""
    allowed = set(range(len(logits)) if sampling.allowed_token_ids is None else sampling.allowed_token_ids)
    result = [logit if token in allowed else -math.inf for token, logit in enumerate(logits)]
    for token, bias in sampling.logit_bias:
        result[token] += bias
    for *before, last in sampling.bad_words:
        if list(tokens[len(tokens) - len(before) :]) == before:
            result[last] = -math.inf
    generated = list(tokens[num_prompt:])
    if len(generated) < sampling.min_tokens:
        for token in sampling.eos_token_ids + sampling.stop_token_ids:
            result[token] = -math.inf
    for token in set(tokens):
        result[token] *= 1 / sampling.repetition_penalty if result[token] > 0 else sampling.repetition_penalty
        if token in generated:
            result[token] -= sampling.frequency_penalty * generated.count(token) + sampling.presence_penalty
    return result


def acceptable_tokens(
    logits: Sequence[float], sampling: TokenSampling, tokens: Sequence[int], num_prompt: int, position: int
) -> set[int]:
    """Every token that a sampler may choose: nearly always one; more where a boundary is within `TOLERANCE`."""
    treated = treated_logits(logits, sampling, tokens, num_prompt)
    largest = max(treated)
    order = sorted(
        (token for token in range(len(treated)) if treated[token] > -math.inf), key=lambda t: (-treated[t], t)
    )
    if sampling.temperature < 1e-5:
        return {order[0]}
    p = {token: math.exp((treated[token] - largest) / sampling.temperature) for token in order}
    if sampling.top_k > 0:
        order = order[: sampling.top_k]
    u = noise(sampling.seed, position, sampling.choice)
    acceptable: set[int] = set()
    shifts = (-TOLERANCE, TOLERANCE)
    for top_p_shift, min_p_shift in product(
        shifts if sampling.top_p < 1 else (0.0,), shifts if sampling.min_p > 0 else (0.0,)
    ):
        kept = _keep_top_p(order, p, sampling.top_p + top_p_shift)
        kept = sorted(token for token in kept if p[token] >= sampling.min_p * (1 + min_p_shift) or token == order[0])
        total = math.fsum(p[token] for token in kept)
        reached = 0.0
        for token in kept:
            before, reached = reached, reached + p[token] / total
            if before - TOLERANCE <= u <= reached + TOLERANCE:
                acceptable.add(token)
    return acceptable


def _keep_top_p(order: Sequence[int], p: dict[int, float], top_p: float) -> list[int]:
    target = top_p * math.fsum(p[token] for token in order)
    kept: list[int] = []
    reached = 0.0
    for token in order:
        kept.append(token)
        reached += p[token]
        if reached >= target and top_p < 1:
            break
    return kept


def exact_logprobs(logits: Sequence[float]) -> list[float]:
    """log softmax in float64."""
    largest = max(logits)
    log_sum = largest + math.log(math.fsum(math.exp(logit - largest) for logit in logits))
    return [logit - log_sum for logit in logits]
