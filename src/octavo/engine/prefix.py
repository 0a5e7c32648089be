"""Keys of the prefix cache: a chain of SHA-256 digests, one per full block of tokens.

The key of a block is the digest of its parent's key and its own token ids, so equal keys mean equal tokens from position 0 on. The chain
starts from the model's namespace (weights, arithmetic, KV format) and the request's (cache salt, adapter), each preceded by its length
so that no pair of them can be mistaken for another. A cryptographic digest, because clients choose the tokens: a weaker hash would let one
of them collide with another's prompt on purpose (CVE-2025-25183).

This module does not know blocks or requests.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import sha256

_FORMAT = b"octavo prefix chain 1"
"""Names this way of making keys; changes with it."""


class PrefixHasher:
    """Makes the chains of one model. `namespace` stands for everything that decides the bits of KV content besides tokens."""

    def __init__(self, namespace: bytes, block_size: int) -> None:
        self.block_size = block_size
        self._namespace = namespace
        self._tokens = struct.Struct(f"<{block_size}I")

    def chain(self, namespace: bytes) -> HashChain:
        """An empty chain within a request's namespace."""
        root = sha256(_FORMAT + struct.pack("<I", self.block_size))
        for part in (self._namespace, namespace):
            root.update(struct.pack("<Q", len(part)) + part)
        return HashChain(root.digest(), self.block_size, self._tokens)


class HashChain:
    """Keys of the full blocks of one growing token sequence; each is computed once."""

    __slots__ = ("_block_size", "_root", "_tokens", "keys")

    def __init__(self, root: bytes, block_size: int, tokens: struct.Struct) -> None:
        self.keys: list[bytes] = []
        self._root = root
        self._block_size = block_size
        self._tokens = tokens

    def extend(self, token_ids: Sequence[int], num_blocks: int) -> None:
        """Makes sure the first `num_blocks` keys exist. `token_ids` is the sequence from its start; what is hashed must not change."""
        keys = self.keys
        parent = keys[-1] if keys else self._root
        for index in range(len(keys), num_blocks):
            begin = index * self._block_size
            parent = sha256(parent + self._tokens.pack(*token_ids[begin : begin + self._block_size])).digest()
            keys.append(parent)

    def tail_key(self, token_ids: Sequence[int], num_tokens: int) -> bytes:
        """Key of the block that the first `num_tokens` tokens end in the midst of: made as that of a full block, of fewer tokens, whose
        number follows the digest.
        """
        num_full = num_tokens // self._block_size
        self.extend(token_ids, num_full)
        tail = token_ids[num_full * self._block_size : num_tokens]
        parent = self.keys[num_full - 1] if num_full else self._root
        return sha256(parent + struct.pack(f"<{len(tail)}I", *tail)).digest() + struct.pack("<I", len(tail))


def is_tail(key: bytes) -> bool:
    """Whether a key is of a block that is not full."""
    return len(key) > sha256().digest_size
