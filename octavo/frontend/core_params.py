"""Conversion of a caller's checked `SamplingParams` to the parameters for the engine core."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from octavo.messages import (
    ALIGNMENT,
    NO_TOKEN,
    BadWordsTokenIds,
    CoreSamplingParams,
    GrammarSpec,
    GuardSpec,
)
from octavo.sampling_params import (
    GrammarBackendName,
    SamplingParams,
    StructuredOutputsParams,
)

KV_TRANSFER_PARAMS = "kv_transfer_params"
"""Key of `SamplingParams.extra_args` for the KV connector, as in vLLM."""


# Fields of both classes: `make_core_params` copies them unless it packs them.
_SHARED_FIELDS = {*CoreSamplingParams.__struct_fields__} & {*SamplingParams.__struct_fields__}


def make_core_params(
    params: SamplingParams,
    *,
    vocab_size: int,
    seed: int,
    max_tokens: int,
    all_stop_token_ids: Collection[int] = (),
    bad_words_token_ids: Sequence[Sequence[int]] = (),
    grammar_backend: GrammarBackendName = "auto",
    additional_properties: bool = False,
    guard: GuardSpec | None = None,
) -> CoreSamplingParams:
    """Complete and pack the parameters of one request.

    Args:
        params: parameters with token ids inside the vocabulary.
        vocab_size: width of the model's logits.
        seed: seed of the request, or one derived for it.
        max_tokens: maximum tokens of the answer.
        all_stop_token_ids: all tokens that end the answer.
        bad_words_token_ids: `params.bad_words` as token sequences, none empty.
        grammar_backend: backend for a request that names none.
        additional_properties: for JSON that follows a schema, as in `GrammarSpec`.
        guard: limits of reasoning and repetition.
    """
    bias, wanted, extra = params.logit_bias, params.structured_outputs, params.extra_args or {}
    fields: dict[str, Any] = {name: getattr(params, name) for name in _SHARED_FIELDS}
    fields |= {
        "top_k": 0 if params.top_k >= vocab_size else params.top_k,
        "seed": seed,
        "max_tokens": max_tokens,
        "logprobs": params.num_logprobs,
        "logprob_token_ids": None
        if params.logprob_token_ids is None
        else np.asarray(params.logprob_token_ids, np.int32).tobytes(),
        "stop_token_ids": frozenset(params.stop_token_ids),
        "all_stop_token_ids": frozenset(all_stop_token_ids),
        "allowed_token_ids": None
        if params.allowed_token_ids is None
        else _bitmask(params.allowed_token_ids, vocab_size),
        "logit_bias": None
        if not bias
        else (
            np.fromiter(bias.keys(), np.int32).tobytes(),
            np.fromiter(bias.values(), np.float32).tobytes(),
        ),
        "bad_words": _pack(bad_words_token_ids) if bad_words_token_ids else None,
        "grammar": None
        if wanted is None
        else _grammar_spec(wanted, grammar_backend, additional_properties),
        "guard": guard,
        "extra_args": {k: v for k, v in extra.items() if k not in (KV_TRANSFER_PARAMS, ALIGNMENT)}
        or None,
    }
    return CoreSamplingParams(**fields)


def _grammar_spec(
    wanted: StructuredOutputsParams,
    default_backend: GrammarBackendName,
    additional_properties: bool,
) -> GrammarSpec:
    kind = wanted.kind
    given = getattr(wanted, kind)
    text: str = json.dumps(given, ensure_ascii=False) if kind == "choice" else given
    return GrammarSpec(
        kind,
        "" if kind == "json_object" else text,
        default_backend if wanted.backend == "auto" else wanted.backend,
        any_whitespace=not wanted.disable_any_whitespace,
        additional_properties=additional_properties,
        strict=wanted.strict,
    )


def _bitmask(token_ids: Sequence[int], vocab_size: int) -> bytes:
    """Return the bits of the given ids, in whole words of 32."""
    allowed = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    allowed[np.asarray(token_ids, np.int64)] = True
    return np.packbits(allowed, bitorder="little").tobytes()


def _pack(words: Sequence[Sequence[int]]) -> BadWordsTokenIds:
    longest = max(map(len, words))
    prefixes = np.full((len(words), longest - 1), NO_TOKEN, np.int32)
    for i, word in enumerate(words):
        prefixes[i, longest - len(word) :] = word[:-1]
    last = np.asarray([word[-1] for word in words], np.int32)
    return BadWordsTokenIds(prefixes.tobytes(), last.tobytes())
