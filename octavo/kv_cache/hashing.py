"""Chained block hashes: equal hashes mean equal tokens from the beginning of the prompt."""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence

from octavo.messages import MultiModalFeatureSpec, RequestOptions
from octavo.request import BlockHasher, Request

# Functions that return the data besides token ids that determine a block's KV (such as the hashes
# of media), for the positions from the first argument up to the second.
BlockKeys = Callable[[int, int], Sequence[bytes]]
ExtraKeys = Callable[[Request], BlockKeys]


def root_hash(cache_salt: str | None, cache_scope: str | None = None) -> bytes:
    """Return the parent hash of a request's first block.

    Salt and scope are only used here: every later hash depends on them through the chain.
    """
    salt = b"" if cache_salt is None else b"salt:" + cache_salt.encode()
    root = hashlib.sha256(b"octavo-kv:" + salt).digest()
    if cache_scope is None:
        return root
    return hashlib.sha256(b"octavo-kv-scope:" + root + cache_scope.encode()).digest()


def hash_block(parent: bytes, token_ids: Sequence[int], extra_keys: Sequence[bytes] = ()) -> bytes:
    """Return SHA-256 of the parent's hash, the token ids (int64, little-endian) and the extra keys.

    The number of tokens follows from the parent or is that of a block, and each extra key is
    preceded by its length, so no two inputs have the same encoding.
    """
    message = parent + struct.pack(f"<{len(token_ids)}q", *token_ids)
    for key in extra_keys:
        message += struct.pack("<q", len(key)) + key
    return hashlib.sha256(message).digest()


def adapter_keys(options: RequestOptions, start: int, end: int) -> list[bytes]:
    """Return the extra key of the block in which a request's adapter begins; [] for other blocks.

    Blocks before it are those of the model alone, and later ones depend on it through the chain.
    """
    adapter, begin = options.adapter, options.adapter_begin
    if adapter is None or not start <= begin < end:
        return []
    return [f"adapter from {begin}: {adapter.key}".encode()]


def prompt_embeds_keys(request: Request, start: int, end: int) -> list[bytes]:
    """Return the extra key of a block: a digest of the embeddings that replace tokens."""
    embeds = request.prompt_embeds
    if embeds is None or start >= embeds.num_tokens:
        return []
    digest = hashlib.sha256(embeds.dtype.encode() + b":")
    digest.update(embeds.rows(start, end))
    return [digest.digest()]


def encoder_keys(request: Request, start: int, end: int) -> list[bytes]:
    """Return the extra keys of a block: the encoder's inputs, in the first one.

    All tokens attend to them. Later blocks depend on them through the chain.
    """
    if start:
        return []
    return [
        b"encoder: " + item.identifier.encode()
        for item in request.mm_features
        if not item.mm_position.length
    ]


class MediaKeys:
    """Extra keys of the blocks of a prompt with items: their content, and the places of their rows.

    If texts and items see each other in a range, the block in which the range begins also has a
    digest of the whole range as a key. Later blocks depend on it through the chain.

    Args:
        options: options of the request.
        features: items, in order of their places, which do not overlap.
        tokens: tokens of the prompt.
    """

    def __init__(
        self,
        options: RequestOptions,
        features: Sequence[MultiModalFeatureSpec],
        tokens: Sequence[int],
    ) -> None:
        self._options, self._features, self._tokens = options, features, tokens
        self._ends = [feature.mm_position.end for feature in features]
        self._ranges = sorted({pair for it in features if it.reaches_text for pair in it.ranges})

    def of_block(self, start: int, end: int) -> list[bytes]:
        """Implement `BlockKeys`."""
        first, stop = (bisect_left(self._ranges, (at,)) for at in (start, end))
        keys = [b"range: " + self._hash_range(*pair) for pair in self._ranges[first:stop]]
        for feature in self._within(start, end):
            place = feature.mm_position
            key = f"item {feature.identifier} at {place.offset - start}:".encode()
            if place.is_embed is not None:
                begin = max(start - place.offset, 0)
                key += place.is_embed[begin : end - place.offset]
            keys.append(key)
        return keys

    def _hash_range(self, begin: int, end: int) -> bytes:
        """Return a digest of all that determines the KV of tokens that see each other."""
        keys = adapter_keys(self._options, begin, end)
        for feature in self._within(begin, end):
            place = feature.mm_position
            keys.append(f"{feature.identifier} at {place.offset}, {place.length}".encode())
            keys.append(b"" if place.is_embed is None else place.is_embed)
        return hash_block(struct.pack("<qq", begin, end), self._tokens[begin:end], keys)

    def _within(self, begin: int, end: int) -> Iterator[MultiModalFeatureSpec]:
        """Yield the items that have tokens from `begin` up to, but not including, `end`."""
        for i in range(bisect_right(self._ends, begin), len(self._features)):
            if self._features[i].mm_position.offset >= end:
                break
            yield self._features[i]


def input_keys(request: Request) -> BlockKeys:
    """Implement `ExtraKeys`: all that replaces the embeddings of tokens."""
    media: MediaKeys | None = None

    def of_block(start: int, end: int) -> list[bytes]:
        nonlocal media
        keys = prompt_embeds_keys(request, start, end)
        keys += encoder_keys(request, start, end)
        if start < request.mm_end:
            if media is None:
                media = MediaKeys(request.options, request.mm_features, request.all_token_ids)
            keys += media.of_block(start, end)
        return keys

    return of_block


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
        parent = hashes[-1] if hashes else root_hash(salt, scope)
        new = []
        keys_of = None if extra_keys is None else extra_keys(request)
        for begin in range(start, len(tokens) - block_size + 1, block_size):
            end = begin + block_size
            extra = adapter_keys(request.options, begin, end)
            if keys_of is not None:
                extra += keys_of(begin, end)
            parent = hash_block(parent, tokens[begin:end], extra)
            new.append(parent)
        return new

    return hash_new_blocks
