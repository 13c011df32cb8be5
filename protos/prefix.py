"""The rule that names a block of tokens by all tokens up to its end.

Router and worker must compute the same names, so the rule is part of the contract:

- a chain starts at a root: BLAKE2b-128 of the cache salt, personalised with this rule's version;
- the name of a full block is XXH3-128 of its parent's name (or the root) followed by the block's token ids as
  little-endian uint32, seeded with the first eight bytes of the root;
- a partial block has no name.

XXH3 is fast, not cryptographic; the seed keeps the names of one salt from being predicted without it.
"""

import hashlib

import xxhash

HASH_VERSION = b"quire-prefix-1"
TOKEN_BYTES = 4


def chain_root(cache_salt: bytes) -> bytes:
    """The 16-byte root of the hash chain for one salt; the public salt is empty."""
    return hashlib.blake2b(cache_salt, digest_size=16, person=HASH_VERSION).digest()


def extend_chain(parent: bytes, root: bytes, tokens: bytes | bytearray | memoryview, block_size: int) -> list[bytes]:
    """The 16-byte names of the full blocks in ``tokens`` (packed little-endian uint32); ``parent`` is before them."""
    stride = block_size * TOKEN_BYTES
    seed = int.from_bytes(root[:8], "little")
    digest = xxhash.xxh3_128_digest
    data = bytes(tokens)
    names = []
    for start in range(0, len(data) - stride + 1, stride):
        parent = digest(parent + data[start : start + stride], seed)
        names.append(parent)
    return names


def block_hashes(tokens: bytes | bytearray | memoryview, block_size: int, cache_salt: bytes = b"") -> list[bytes]:
    """The 16-byte names of all full blocks of a prompt (packed little-endian uint32)."""
    root = chain_root(cache_salt)
    return extend_chain(root, root, tokens, block_size)
