"""Prompts of encoder-decoders: an input of the encoder, and the decoder's first tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.errors import ContextLengthError, RequestError, UnsupportedError
from octavo.frontend.input_spec import InputSpec
from octavo.frontend.prompt_tokens import PromptTokens
from octavo.frontend.prompts import Prompt, read_prompt
from octavo.messages import (
    ALIGNMENT,
    AlignmentSpec,
    Modality,
    MultiModalFeatureSpec,
    PlaceholderRange,
    PoolingSpec,
    RequestOptions,
    TensorData,
)
from octavo.sampling_params import SamplingParams
from octavo.text.tokenizer import MAX_TOKENS, is_longer

PARTS = ("encoder_prompt", "decoder_prompt")
"""Keys of a prompt with both parts."""


@dataclass(frozen=True, slots=True)
class EncoderDecoderPrompt:
    """Parts of a prompt, each a text, token ids or a dict with one of them."""

    encoder: Any
    decoder: Any
    """None: only the tokens with which every answer begins."""


def read_parts(prompt: Any) -> EncoderDecoderPrompt:
    """Return the parts of a prompt; a prompt without parts is the encoder's.

    Raises:
        RequestError: a part is missing, or keys are unknown.
    """
    if not isinstance(prompt, Mapping) or not any(key in prompt for key in PARTS):
        return EncoderDecoderPrompt(prompt, None)
    others = [key for key in prompt if key not in (*PARTS, "cache_salt")]
    if others:
        raise RequestError(
            f"A prompt with 'encoder_prompt' has no {others[0]!r}; put it into one of its parts.",
            "prompt",
        )
    if prompt.get("encoder_prompt") is None:
        raise RequestError(
            "'encoder_prompt' is missing: the encoder needs an input.", "encoder_prompt"
        )
    return EncoderDecoderPrompt(prompt["encoder_prompt"], prompt.get("decoder_prompt"))


class EncoderPrompts:
    """Reader of the prompts of an encoder-decoder.

    Args:
        spec: the model.
        tokens: encoder and checker of its tokens.
    """

    def __init__(self, spec: InputSpec, tokens: PromptTokens) -> None:
        self._spec, self._tokens = spec, tokens

    def read(
        self,
        prompt: Prompt,
        params: SamplingParams,
        options: RequestOptions,
        add_special_tokens: bool,
    ) -> tuple[str | None, list[int], list[MultiModalFeatureSpec]]:
        """Return the text of an encoder's input, the decoder's first tokens, and the input.

        Args:
            prompt: the encoder's input, or an `EncoderDecoderPrompt`.
            params: the parameters of the answer.
            options: the options of the request; the input has their scope of the prefix cache.
            add_special_tokens: True to let the tokenizer add its special tokens to a text.

        Raises:
            RequestError: a part is wrong, or the model reads no such part.
            ContextLengthError: a part is too long.
        """
        parts, start = read_parts(prompt), list(self._spec.decoder_start_ids)
        for part in (parts.encoder, parts.decoder):
            if isinstance(part, Mapping) and part.get("multi_modal_data"):
                raise UnsupportedError(
                    f"multi_modal_data: this model ({self._spec.architecture}) reads "
                    f"{self._spec.encoder_modality} only here; leave it out. A sound is given as "
                    "its 'input_features'; LLM.transcribe reads files.",
                    "multi_modal_data",
                )
        text, feature = self._read_encoder(parts.encoder, params, options, add_special_tokens)
        if parts.decoder is None:
            return text, start, [feature]
        of_decoder, ids = read_prompt(parts.decoder)
        if ids is None:
            assert of_decoder is not None
            ids = self._tokens.encode(of_decoder, params, add_special_tokens=False)
        self._tokens.check_ids("decoder_prompt", ids)
        if ids[:1] != start[:1]:  # as in transformers
            ids = start[:1] + ids
        return text, ids, [feature]

    def _read_encoder(
        self,
        prompt: Any,
        params: SamplingParams,
        options: RequestOptions,
        add_special_tokens: bool,
    ) -> tuple[str | None, MultiModalFeatureSpec]:
        """Return the text of an encoder's input, if it is one, and the input."""
        limit, salt = self._spec.max_encoder_len, options.cache_salt
        features = prompt.get("input_features") if isinstance(prompt, Mapping) else None
        if (self._spec.encoder_modality == "audio") != (features is not None):
            raise RequestError(
                f"The encoder of this model ({self._spec.architecture}) reads "
                f"{self._spec.encoder_modality}; give it as "
                + ("'input_features'." if features is None else "text or token ids."),
                "encoder_prompt",
            )
        if features is not None:
            shape, count = self._spec.encoder_frames, self._spec.num_encoder_tokens
            feature = audio_feature(features, shape, count, salt)
            self._spec.check_item(feature)
            return None, feature
        text, ids = read_prompt(prompt)
        if ids is None:
            assert text is not None
            keep = params.truncate_prompt_tokens
            if keep is None and is_longer(text, limit):
                raise self._too_long(f"your text of {len(text)} characters is longer")
            tokenizer = self._tokens.require_tokenizer()
            ids = tokenizer.encode(text, add_special_tokens, max(limit, MAX_TOKENS))
        if (keep := params.truncate_prompt_tokens) is not None:
            keep = limit if keep == -1 else keep
            ids = ids[-keep:] if params.truncation_side == "left" else ids[:keep]
        self._tokens.check_ids("encoder_prompt", ids, self._spec.encoder_vocab_size)
        if not ids:
            raise RequestError("The encoder's prompt is empty; give at least one token.", "prompt")
        if len(ids) > limit:
            raise self._too_long(f"your prompt has {len(ids)}")
        return text, text_feature(ids, salt)

    def _too_long(self, found: str) -> ContextLengthError:
        return ContextLengthError(
            f"The encoder of this model reads at most {self._spec.max_encoder_len} tokens; "
            f"{found}. Shorten it or set truncate_prompt_tokens.",
            "prompt",
        )


def text_feature(token_ids: list[int], cache_salt: str | None) -> MultiModalFeatureSpec:
    """Return the item of an encoder of texts.

    Args:
        token_ids: tokens of the text; at least one.
        cache_salt: scope of the prefix cache.
    """
    ids = np.array(token_ids, np.int64)
    return _feature("text", {"input_ids": ids}, len(ids), cache_salt)


def audio_feature(
    features: Any,
    shape: tuple[int, int],
    num_tokens: Callable[[int], int],
    cache_salt: str | None,
) -> MultiModalFeatureSpec:
    """Return the item of an encoder of sound.

    Args:
        features: numbers [frames, size of a frame].
        shape: the shape that the encoder reads; -1 frames: any number.
        num_tokens: returns the number of the encoder's tokens for a number of frames.
        cache_salt: scope of the prefix cache.

    Raises:
        RequestError: they are no finite numbers of this shape.
    """
    try:
        array = np.ascontiguousarray(np.asarray(features), np.float32)
    except (TypeError, ValueError):
        raise RequestError("'input_features' are no array of numbers.", "encoder_prompt") from None
    if array.ndim != 2 or array.shape[1] != shape[1] or shape[0] not in (-1, len(array)):
        raise RequestError(
            f"'input_features' has the shape {array.shape}, and the encoder reads {shape}: frames, "
            "and numbers of a frame. Fill a short sound with silence; divide a long one.",
            "encoder_prompt",
        )
    if not np.isfinite(array).all():
        raise RequestError("'input_features' has numbers that are not finite.", "encoder_prompt")
    return _feature("audio", {"input_features": array}, num_tokens(len(array)), cache_salt)


def read_features(feature: MultiModalFeatureSpec) -> NDArray[np.float32]:
    """Return the numbers of a sound: float32 [frames, size of a frame]."""
    tensor = feature.data["input_features"]
    return np.frombuffer(tensor.data, np.float32).reshape(tensor.shape)


def encoder_token_ids(features: list[MultiModalFeatureSpec]) -> list[int] | None:
    """Return the tokens of the text that the encoder reads; None: it reads no text."""
    for feature in features:
        if not feature.mm_position.length and "input_ids" in feature.data:
            ids: list[int] = np.frombuffer(feature.data["input_ids"].data, np.int64).tolist()
            return ids
    return None


def read_alignment(
    extra_args: Mapping[str, Any] | None, features: list[MultiModalFeatureSpec], *, hears: bool
) -> PoolingSpec | None:
    """Return the result that a request asks for with `ALIGNMENT`; None: it asks for tokens.

    Args:
        extra_args: those of the request.
        features: its items.
        hears: True if the model is an encoder-decoder that reads sounds.

    Raises:
        RequestError: the value is wrong, the encoder has fewer rows, or `hears` is False.
    """
    given = (extra_args or {}).get(ALIGNMENT)
    if given is None:
        return None
    if not hears:
        raise RequestError(
            f"extra_args.{ALIGNMENT} is for encoder-decoders that read sounds; leave it out.",
            "extra_args",
        )
    try:
        asked = msgspec.convert(given, AlignmentSpec)
    except msgspec.ValidationError as error:
        raise RequestError(f"extra_args.{ALIGNMENT}: {error}.", "extra_args") from None
    rows = sum(feature.num_rows for feature in features)
    heads = asked.heads
    # Each head takes time, so that none may be asked for twice.
    are_heads = 0 < len(heads) == len(set(heads)) and min(map(min, heads)) >= 0
    if not are_heads or not 0 < asked.num_rows <= rows:
        raise RequestError(
            f"extra_args.{ALIGNMENT} needs different heads, and 1 to {rows} rows: "
            f"{str(given)[:100]}.",
            "extra_args",
        )
    return PoolingSpec(ALIGNMENT, reads_all=True, whole=True, alignment=asked)


def scoped(feature: MultiModalFeatureSpec, cache_salt: str | None) -> MultiModalFeatureSpec:
    """Return an item in another scope of the prefix cache."""
    return msgspec.structs.replace(feature, identifier=_identify(feature.data, cache_salt))


def _feature(
    modality: Modality, arrays: dict[str, NDArray[Any]], num_tokens: int, cache_salt: str | None
) -> MultiModalFeatureSpec:
    data = {
        name: TensorData(str(array.dtype), array.shape, array.tobytes())
        for name, array in arrays.items()
    }
    return MultiModalFeatureSpec(
        modality=modality,
        identifier=_identify(data, cache_salt),
        mm_position=PlaceholderRange(0, 0),
        data=data,
        num_encoder_tokens=num_tokens,
    )


def _identify(data: dict[str, TensorData], cache_salt: str | None) -> str:
    salt = (cache_salt or "").encode()
    digest = hashlib.sha256(b"octavo-encoder:%d:%b" % (len(salt), salt))
    for name, tensor in data.items():
        digest.update(f"{name}:{tensor.dtype}:{tensor.shape}:".encode() + tensor.data)
    return digest.hexdigest()
