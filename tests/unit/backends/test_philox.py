"""Philox4x32-10 against the known answers that its authors publish (Random123, kat_vectors)."""

from __future__ import annotations

import pytest

from octavo.backends.numpy.philox import philox4x32, sampling_noise

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]) -> None:
    assert philox4x32(counter, key) == expected  # type: ignore[arg-type]


def test_noise_takes_the_first_word_and_never_0_or_1() -> None:
    assert sampling_noise(seed=0, position=0, choice=0) == (0x6627E8D5 + 0.5) / 2**32
    seed = 0x299F31D0A4093822
    words = philox4x32((5, 3, 0, 0), (0xA4093822, 0x299F31D0))
    assert sampling_noise(seed, position=5, choice=3) == (words[0] + 0.5) / 2**32
    assert sampling_noise(-1, 1, 0) == sampling_noise(2**64 - 1, 1, 0)
