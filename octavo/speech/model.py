"""Facts of a speech model besides its layers: features, special tokens, forbidden tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.base import Checkpoint
from octavo.errors import ModelError, RequestError
from octavo.media.log_mel import LogMel
from octavo.models.spec import ModelSpec
from octavo.multimodal.processors.sounds import read_feature_settings
from octavo.speech.tokens import WhisperTokens
from octavo.text.tokenizer import Tokenizer


def hears(spec: ModelSpec) -> bool:
    """Return True if a model writes what is said in a sound."""
    if spec.is_encoder_decoder:
        return spec.encoder_modality == "audio"
    return spec.architecture in _DECODERS and spec.encoder("audio") is not None


_DECODERS = ("Qwen3ASRForConditionalGeneration", "VoxtralForConditionalGeneration")
"""Models of sounds and texts that have a prompt for transcripts."""


@dataclass(frozen=True)
class SpeechModel:
    """Facts of Whisper, or of a model that is used in the same way."""

    features: LogMel
    tokens: WhisperTokens
    max_tokens: int
    """Most tokens of a prompt and its answer."""
    suppress: tuple[int, ...]
    """Tokens that no answer contains."""
    begin_suppress: tuple[int, ...]
    """Tokens with which no answer begins."""
    max_initial: int | None
    """Largest first timestamp, in units of 0.02 s."""
    encode: Callable[[str], list[int]]
    """Returns the tokens of a text, without special tokens."""
    decode: Callable[[list[int]], str]
    """Returns the text of tokens."""
    alignment_heads: tuple[tuple[int, int], ...] = ()
    """Layers and heads whose cross attention tells when a token is spoken."""

    @classmethod
    def open(
        cls,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        tokenizer: Tokenizer | None,
        max_tokens: int,
    ) -> SpeechModel:
        """Read the files of a model, if it writes what is said.

        Raises:
            RequestError: the model does not hear, or its tokenizer is not loaded.
            ModelError: as for `read`.
        """
        if not hears(spec):
            raise RequestError(
                f"This model ({spec.architecture}) does not transcribe sounds. Choose a model of "
                "speech, such as openai/whisper-base, or octavo/spoken-words for spoken digits.",
                "model",
                "unsupported_task",
            )
        if tokenizer is None:
            raise RequestError(
                "No tokenizer is loaded (skip_tokenizer_init), which transcripts need.", "model"
            )
        model = cls.read(checkpoint, tokenizer, max_tokens)
        return replace(model, alignment_heads=_alignment_heads(checkpoint, spec))

    @classmethod
    def read(cls, checkpoint: Checkpoint, tokenizer: Tokenizer, max_tokens: int) -> SpeechModel:
        """Read the files of a model folder.

        Args:
            checkpoint: the folder.
            tokenizer: its tokenizer.
            max_tokens: most tokens of a prompt and its answer.

        Raises:
            ModelError: a file is missing, or has a wrong value.
        """
        settings = read_feature_settings(checkpoint)
        if settings is None:
            raise ModelError(
                f"{checkpoint.path / 'preprocessor_config.json'} is missing: it has the settings "
                "of the model's features."
            )
        features = LogMel.from_config(settings.fields, settings.where)
        generation = _generation(checkpoint)
        is_multilingual = generation.get("is_multilingual")
        if is_multilingual is None:  # English only: the end is the last token of the text
            is_multilingual = tokenizer.token_to_id("<|endoftext|>") != _ENGLISH_END
        tokens = WhisperTokens.read(tokenizer.token_to_id, bool(is_multilingual))
        return cls(
            features,
            tokens,
            max_tokens,
            _ids(generation, "suppress_tokens", tokens),
            _ids(generation, "begin_suppress_tokens", tokens),
            _max_initial(generation),
            lambda text: tokenizer.encode(text, add_special_tokens=False),
            tokenizer.decode,
        )

    def compute(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the features of a window, float32 [frames, mel bands]."""
        return np.ascontiguousarray(self.features.compute(samples).T)


_ENGLISH_END = 50256


def _generation(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the settings of generation_config.json; empty: it is missing."""
    name = "generation_config.json"
    text = checkpoint.read_text(name)
    return {} if text is None else _parse(text, str(checkpoint.path / name))


def _alignment_heads(checkpoint: Checkpoint, spec: ModelSpec) -> tuple[tuple[int, int], ...]:
    """Return the heads that generation_config.json names.

    Without them: all heads in the upper half of the layers, as in OpenAI's Whisper. This holds also
    if a head is of another model: distilled models have fewer layers, and some keep the list of the
    model that they come from.
    """
    sizes = [cache.num_kv_heads for cache in spec.cross_caches]
    given = _generation(checkpoint).get("alignment_heads") or []
    listed = given if isinstance(given, list) else [given]
    pairs = [pair for pair in listed if isinstance(pair, list) and len(pair) == 2]
    if len(pairs) != len(listed) or any(type(n) is not int or n < 0 for p in pairs for n in p):
        raise ModelError(
            f"generation_config.json: alignment_heads={str(given)[:100]} is not a list of pairs of "
            "a layer and a head."
        )
    if pairs and all(layer < len(sizes) and head < sizes[layer] for layer, head in pairs):
        return tuple((layer, head) for layer, head in pairs)
    half = len(sizes) // 2
    return tuple((i, head) for i in range(half, len(sizes)) for head in range(sizes[i]))


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ModelError(f"{where} is not valid JSON: {error}.") from None
    if not isinstance(data, dict):
        raise ModelError(f"{where} is not a JSON object.")
    return data


def _ids(generation: dict[str, Any], name: str, tokens: WhisperTokens) -> tuple[int, ...]:
    """Return a list of tokens; those that the model does not have are left out."""
    found = generation.get(name) or []
    if not isinstance(found, list) or not all(isinstance(token, int) for token in found):
        raise ModelError(f"generation_config.json: {name}={found!r} is not a list of token ids.")
    return tuple(token for token in found if 0 <= token < tokens.first_timestamp)


def _max_initial(generation: dict[str, Any]) -> int | None:
    found = generation.get("max_initial_timestamp_index")
    if found is not None and (not isinstance(found, int) or found < 0):
        raise ModelError(
            f"generation_config.json: max_initial_timestamp_index={found!r} is not a whole number."
        )
    return found
