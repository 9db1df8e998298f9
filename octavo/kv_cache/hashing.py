"""Chained block hashes: equal hashes mean equal tokens from the beginning of the prompt."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence

from octavo.messages import AdapterRef
from octavo.request import BlockHasher, Request

# Functions that return the data besides token ids that determine a block's KV (such as the hashes
# of media), for the positions from the second argument up to the third.
ExtraKeys = Callable[[Request, int, int], Sequence[bytes]]


def root_hash(
    cache_salt: str | None, cache_scope: str | None = None, adapter: AdapterRef | None = None
) -> bytes:
    """Return the parent hash of a request's first block.

    Salt, scope and adapter are only used here: every later hash depends on them through the chain.
    """
    salt = b"" if cache_salt is None else b"salt:" + cache_salt.encode()
    root = hashlib.sha256(b"octavo-kv:" + salt).digest()
    if adapter is not None:
        root = hashlib.sha256(b"octavo-kv-adapter:" + root + adapter.content_hash.encode()).digest()
    if cache_scope is None:
        return root
    return hashlib.sha256(b"octavo-kv-scope:" + root + cache_scope.encode()).digest()


def hash_block(parent: bytes, token_ids: Sequence[int], extra_keys: Sequence[bytes] = ()) -> bytes:
    """Return SHA-256 of the parent's hash, the token ids (int64, little-endian) and the extra keys.

    Parent and tokens have a fixed length and each extra key is preceded by its own, so no two
    inputs have the same encoding.
    """
    message = parent + struct.pack(f"<{len(token_ids)}q", *token_ids)
    for key in extra_keys:
        message += struct.pack("<q", len(key)) + key
    return hashlib.sha256(message).digest()


def prompt_embeds_keys(request: Request, start: int, end: int) -> list[bytes]:
    """Implement `ExtraKeys`: a digest of the embeddings that replace tokens."""
    embeds = request.prompt_embeds
    if embeds is None or start >= embeds.num_tokens:
        return []
    digest = hashlib.sha256(embeds.dtype.encode() + b":")
    digest.update(embeds.rows(start, end))
    return [digest.digest()]


def make_block_hasher(block_size: int, extra_keys: ExtraKeys | None = None) -> BlockHasher:
    """Make the function that hashes a request's full blocks of known tokens.

    Each call hashes only the blocks missing in `request.block_hashes`, so no block is hashed twice.
    """

    def hash_new_blocks(request: Request) -> list[bytes]:
        tokens = request.all_token_ids
        hashes = request.block_hashes
        start = len(hashes) * block_size
        if len(tokens) - start < block_size:
            return []
        salt, scope = request.options.cache_salt, request.cache_scope
        parent = hashes[-1] if hashes else root_hash(salt, scope, request.options.adapter)
        new = []
        for end in range(start + block_size, len(tokens) + 1, block_size):
            extra = extra_keys(request, end - block_size, end) if extra_keys is not None else ()
            parent = hash_block(parent, tokens[end - block_size : end], extra)
            new.append(parent)
        return new

    return hash_new_blocks
