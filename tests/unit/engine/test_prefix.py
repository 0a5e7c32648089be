"""Keys of the prefix cache: what they hold apart (O-29), and that each block is hashed once."""

from __future__ import annotations

from octavo.engine.prefix import PrefixHasher


def keys(tokens: list[int], *, model: bytes = b"m", namespace: bytes = b"", block_size: int = 2) -> list[bytes]:
    chain = PrefixHasher(model, block_size).chain(namespace)
    chain.extend(tokens, len(tokens) // block_size)
    return chain.keys


def test_equal_beginnings_have_equal_keys() -> None:
    assert keys([1, 2, 3, 4, 5, 6])[:2] == keys([1, 2, 3, 4, 9, 9])[:2]
    assert keys([1, 2, 3, 4, 5, 6])[2] != keys([1, 2, 3, 4, 9, 9])[2]


def test_a_key_holds_all_tokens_before_it() -> None:
    assert keys([1, 2, 3, 4])[1] != keys([9, 2, 3, 4])[1]
    assert keys([3, 4])[0] != keys([1, 2, 3, 4])[1]


def test_a_key_holds_model_namespace_and_block_size() -> None:
    variants = [
        keys([1, 2, 3, 4]),
        keys([1, 2, 3, 4], model=b"other"),
        keys([1, 2, 3, 4], namespace=b"salt"),
        keys([1, 2, 3, 4], block_size=4),
        # The same bytes, cut differently between model and request.
        keys([1, 2, 3, 4], model=b"ms", namespace=b"alt"),
        keys([1, 2, 3, 4], model=b"", namespace=b"m"),
    ]
    firsts = {variant[0] for variant in variants}
    assert len(firsts) == len(variants)


def test_tokens_are_not_confused_by_their_width() -> None:
    assert keys([1, 256])[0] != keys([257, 0])[0]


def test_a_chain_grows_without_hashing_again() -> None:
    chain = PrefixHasher(b"m", 2).chain(b"")
    chain.extend([1, 2, 3, 4], 1)
    first = chain.keys[0]
    # The tokens of a block that has a key are not looked at any more.
    chain.extend([0, 0, 3, 4], 2)
    assert chain.keys[0] is first
    assert chain.keys == keys([1, 2, 3, 4])
