"""Philox4x32-10, a counter-based generator: the same key and counter give the same words, whatever was drawn before.

J. Salmon, M. Moraes, R. Dror, D. Shaw: Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011).
"""

from __future__ import annotations

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF

Words = tuple[int, int, int, int]


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Four 32-bit words of the 128-bit counter under the 64-bit key, both given as 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (product1 >> 32) ^ c1 ^ k0, product1 & _MASK, (product0 >> 32) ^ c3 ^ k1, product0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def sampling_noise(seed: int, position: int, choice: int) -> float:
    """The sampler's number in (0, 1) for the token at `position`: see `octavo.backends.base.Sampler`."""
    word = philox4x32((position & _MASK, choice & _MASK, 0, 0), (seed & _MASK, (seed >> 32) & _MASK))[0]
    return (word + 0.5) / 2**32
