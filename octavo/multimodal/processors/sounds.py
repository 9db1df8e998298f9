"""Processors of sounds: samples to log-mel features, and their places in prompts.

Sources: `Gemma4Processor`, `Gemma4UnifiedAudioFeatureExtractor`, `Phi4MultimodalProcessor`,
`Qwen2AudioProcessor`, `Qwen3ASRFeatureExtractor` and `VoxtralProcessor` of transformers.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from octavo.checkpoints.base import Checkpoint
from octavo.checkpoints.config_json import ConfigJson
from octavo.errors import ModelError, RequestError
from octavo.media.audio import MAX_SECONDS as LONGEST_FILE
from octavo.media.audio import SAMPLE_RATE
from octavo.media.kaldi_mel import KaldiMel
from octavo.media.log_mel import Floats, LogMel
from octavo.media.usm_mel import UsmMel
from octavo.models.blocks import nemo, subsample
from octavo.models.blocks.encoder_input import VectorInputSpec
from octavo.models.blocks.frames import FramesInputSpec
from octavo.models.blocks.spectrogram import CHUNK, SpectrogramInputSpec, num_tokens
from octavo.models.spec import ModelSpec
from octavo.models.towers.gemma4_audio import MAX_TOKENS
from octavo.models.towers.phi4_audio import MAX_SECONDS as PHI4_SECONDS
from octavo.models.towers.whisper import MAX_SECONDS
from octavo.multimodal.items import Item, Part, make_part
from octavo.multimodal.processors.base import Place, Processor, read_token

_FILE, _WHOLE = "preprocessor_config.json", "processor_config.json"
_SAMPLES_OF_FRAME = 640
_FRAMES_ONLY = "Gemma4UnifiedAudioFeatureExtractor"
_TOKENIZER = "tokenizer_config.json"


class SoundProcessor(Processor, ABC):
    """Processor of sounds.

    Args:
        settings: those of preprocessor_config.json, `placeholder` and `embed_token`.

    Raises:
        ModelError: a setting has an impossible value.
    """

    token: str
    """Special token that stands for a sound, and for a row of it."""
    token_id: int | None = None
    """Its id in published tokenizers, if these may give it another name; None: they do not."""
    max_rows = 2**31
    """Most rows of a sound: those of the model's context."""

    @property
    @abstractmethod
    def sampling_rate(self) -> int:
        """Samples a second that it reads."""

    @property
    def max_seconds(self) -> int:
        """Longest sound that the model reads; longer ones are neither decoded nor processed."""
        return LONGEST_FILE

    def check_length(self, seconds: float) -> None:
        """Reject a sound that is too long for the model.

        Raises:
            RequestError: it is.
        """
        if seconds > self.max_seconds:
            raise RequestError(
                f"it has {seconds:.1f} s, and at most {self.max_seconds} s are supported with this "
                "model and its context. Send parts of it."
            )

    def process(self, samples: Floats) -> Item:
        """Return a sound as the encoder reads it.

        Args:
            samples: float32 [samples], finite; at least one.

        Raises:
            RequestError: the sound is too short or too long for the model.
        """
        self.check_length(len(samples) / self.sampling_rate)
        return Item("audio", self.parts(samples))

    def place_of_rows(self, num_rows: int) -> Place | None:
        """Implement `Processor`."""
        return Place((num_rows,), 0)

    @abstractmethod
    def parts(self, samples: Floats) -> tuple[Part, ...]:
        """Return the parts of a sound; see `process`."""


class LogMelProcessor(SoundProcessor):
    """Processor of sounds with the features of Whisper."""

    def __init__(self, settings: ConfigJson) -> None:
        super().__init__(settings)
        self.features = LogMel.from_config(settings.fields, settings.where)

    @property
    def sampling_rate(self) -> int:
        """Samples a second that it reads."""
        return self.features.sampling_rate

    def _frames(self, samples: Floats, num_windows: int = 1) -> Floats:
        """Return the features of windows, float32 [frames, mel bands]."""
        return self.features.compute(samples, num_windows).T


class Qwen2AudioProcessor(LogMelProcessor):
    """Sounds of at most one window, which the encoder reads without silence after them."""

    token = "<|AUDIO|>"

    @property
    def max_seconds(self) -> int:
        """A window."""
        return self.features.chunk_length

    def parts(self, samples: Floats) -> tuple[Part, ...]:
        """Return one part; a token of the encoder has two frames, and a row two tokens."""
        num_frames = -(-len(samples) // self.features.hop_length)
        num_tokens = -(-num_frames // 2)
        if num_tokens < 2:
            least = 2 * self.features.hop_length + 1
            raise RequestError(
                f"it has {len(samples)} samples, and the model reads at least {least}."
            )
        # The last token also sees the frame after it.
        frames = self._frames(samples)[: 2 * num_tokens + 1]
        return (_part(frames, num_tokens, num_tokens // 2),)


class VoxtralProcessor(LogMelProcessor):
    """Sounds of any length, in windows that are filled with silence."""

    token = "[AUDIO]"
    _GROUP = 4
    """Tokens of the encoder that become one row."""

    @property
    def max_seconds(self) -> int:
        """The windows whose rows fit into the context; one may be shorter."""
        rows = self.features.num_frames // 2 // self._GROUP
        return min(LONGEST_FILE, self.features.chunk_length * max(1, self.max_rows // rows))

    def parts(self, samples: Floats) -> tuple[Part, ...]:
        """Return a part for each window."""
        features = self.features
        num_windows = -(-len(samples) // features.num_samples)
        frames = self._frames(samples, num_windows).reshape(num_windows, features.num_frames, -1)
        tokens = features.num_frames // 2
        return tuple(_part(window, tokens, tokens // self._GROUP) for window in frames)


class Qwen3ASRProcessor(LogMelProcessor):
    """Sounds of at most two minutes, in chunks of 1 s."""

    token = "<|audio_pad|>"
    _MIN_SAMPLES = 8000

    def __init__(self, settings: ConfigJson) -> None:
        kind = settings.get("feature_extractor_type")
        if kind in (None, "Qwen3ASRFeatureExtractor"):
            settings = settings.replaced("feature_extractor_type", "WhisperFeatureExtractor")
        super().__init__(settings)
        settings.refuse("min_length", self._MIN_SAMPLES, "only this length is supported")
        settings.refuse("n_window", CHUNK // 2, "only this length is supported")
        if self.features.hop_length * CHUNK != self.sampling_rate:
            raise settings.error("hop_length", "a second must have 100 frames")

    @property
    def max_seconds(self) -> int:
        """As the encoder's window."""
        return MAX_SECONDS

    def parts(self, samples: Floats) -> tuple[Part, ...]:
        """Return one part; a short sound is filled with silence."""
        samples = np.pad(samples, (0, max(0, self._MIN_SAMPLES - len(samples))))
        frames = self.features.compute_exactly(samples).T
        count = num_tokens(len(frames))
        return (_part(frames, count, count),)


class Gemma4SoundProcessor(SoundProcessor):
    """Sounds of at most 30 s, between two tokens of their own."""

    token = "<|audio|>"

    def __init__(self, settings: ConfigJson) -> None:
        super().__init__(settings)
        self.features = UsmMel.from_config(settings)

    @property
    def sampling_rate(self) -> int:
        """Samples a second that it reads."""
        return self.features.sampling_rate

    @property
    def max_seconds(self) -> int:
        """Seconds of a sound with the most tokens."""
        return 4 * MAX_TOKENS * self.features.hop_length // self.sampling_rate

    def place_of_rows(self, num_rows: int) -> Place | None:
        """Implement `Processor`."""
        return _marked_place(num_rows, 0)

    def parts(self, samples: Floats) -> tuple[Part, ...]:
        """Return one part."""
        features = self.features
        count = subsample.num_tokens(features.num_frames(len(samples)))
        if not count:
            least = features.frame_length // 2 + 1
            raise RequestError(
                f"it has {len(samples)} samples, and the model reads at least {least}."
            )
        return (_marked_part(features.compute(samples), count),)


class Gemma4UnifiedSoundProcessor(SoundProcessor):
    """Sounds of at most 30 s, whose samples the model reads in frames of 40 ms."""

    token = "<|audio|>"
    sampling_rate = SAMPLE_RATE

    def __init__(self, settings: ConfigJson) -> None:
        super().__init__(settings)
        settings.refuse("feature_extractor_type", _FRAMES_ONLY, f"only {_FRAMES_ONLY} is supported")
        settings.refuse("sampling_rate", SAMPLE_RATE, f"only {SAMPLE_RATE} is supported")
        self._frame = settings.integer(
            "audio_samples_per_token", default=_SAMPLES_OF_FRAME, most=SAMPLE_RATE
        )

    @property
    def max_seconds(self) -> int:
        """Seconds of a sound with the most tokens."""
        return MAX_TOKENS * self._frame // self.sampling_rate

    def place_of_rows(self, num_rows: int) -> Place | None:
        """Implement `Processor`."""
        return _marked_place(num_rows, 0)

    def parts(self, samples: Floats) -> tuple[Part, ...]:
        """Return one part; silence fills the last frame."""
        filled = np.pad(samples, (0, -len(samples) % self._frame))
        frames = filled.reshape(-1, self._frame)
        return (_marked_part(frames, len(frames)),)


def _marked_part(frames: Floats, count: int) -> Part:
    """Return a sound of Gemma 4, between its two tokens."""
    data = {"input_features": np.ascontiguousarray(frames)}
    return make_part(_marked_place(count, count), data)


def _marked_place(num_rows: int, num_tokens: int) -> Place:
    return Place(("<|audio>", num_rows, "<audio|>"), num_tokens)


class Phi4SoundProcessor(SoundProcessor):
    """Sounds of Phi-4 multimodal; a row stands for 80 ms."""

    token = "<|endoftext11|>"
    token_id = 200011
    beside = "image"

    def __init__(self, settings: ConfigJson) -> None:
        super().__init__(settings)
        self.features = KaldiMel.from_config(settings)

    @property
    def sampling_rate(self) -> int:
        """Samples a second that it reads."""
        return self.features.sampling_rate

    @property
    def max_seconds(self) -> int:
        """Seconds whose rows fit into the context, and that the encoder reads."""
        of_row = nemo.REDUCTION * self.features.hop_length
        return min(PHI4_SECONDS, max(1, self.max_rows * of_row // self.sampling_rate))

    def parts(self, samples: Floats) -> tuple[Part, ...]:
        """Return one part."""
        features = self.features
        count = nemo.num_tokens(features.num_frames(len(samples)))
        if not count:
            raise RequestError(
                f"it has {len(samples)} samples, and the model reads at least "
                f"{features.win_length}."
            )
        return (_part(features.compute(samples), nemo.with_filling(count), count),)


def _part(frames: Floats, num_tokens: int, num_rows: int) -> Part:
    data = {"input_features": np.ascontiguousarray(frames)}
    return make_part(Place((num_rows,), num_tokens), data)


PROCESSORS: Mapping[str, type[SoundProcessor]] = {
    "gemma4": Gemma4SoundProcessor,
    "gemma4_unified": Gemma4UnifiedSoundProcessor,
    "phi4_multimodal": Phi4SoundProcessor,
    "phi4mm": Phi4SoundProcessor,
    "qwen2_audio": Qwen2AudioProcessor,
    "qwen3_asr": Qwen3ASRProcessor,
    "voxtral": VoxtralProcessor,
}
"""model_type -> processor."""


def read_sound_processor(checkpoint: Checkpoint) -> SoundProcessor | None:
    """Return a model's processor of sounds; None: it has none here.

    Raises:
        ModelError: a file of the model is missing or wrong.
    """
    make = PROCESSORS.get(str(checkpoint.config.get("model_type")))
    if make is None:
        return None
    return make(_read_settings(checkpoint, _read_token(checkpoint, make)))


def _read_token(checkpoint: Checkpoint, kind: type[SoundProcessor]) -> str:
    """Return the token that stands for a sound; the tokenizer of Phi-4 may have another name."""
    if kind.token_id is None:
        return kind.token
    tokenizer = ConfigJson(_read_object(checkpoint, _TOKENIZER) or {}, _TOKENIZER)
    audio = checkpoint.config.section("audio_config")
    token_id = audio.integer("audio_token_id", default=kind.token_id, least=0)
    return read_token(tokenizer, "audio", kind.token, token_id)


def read_feature_settings(checkpoint: Checkpoint) -> ConfigJson | None:
    """Return the settings of a model's sounds; None: the model has none.

    Raises:
        ModelError: a file is not a JSON object.
    """
    found = _read_object(checkpoint, _FILE)
    if found is None or "feature_extractor_type" not in found:
        # transformers 5 writes one file for all; the other may be that of pictures.
        whole = _read_object(checkpoint, _WHOLE) or {}
        for name in ("feature_extractor", "audio_processor"):  # the second is that of Phi-4
            if isinstance(section := whole.get(name), dict):
                return ConfigJson(section, _WHOLE)
    return None if found is None else ConfigJson(found, _FILE)


def check_frames(checkpoint: Checkpoint, spec: ModelSpec) -> None:
    """Check that a model's sounds have the bands, or the samples of a frame, of its encoder.

    Raises:
        ModelError: they have others.
    """
    encoder, found = spec.encoder("audio"), read_feature_settings(checkpoint)
    if encoder is None or found is None:
        return
    inputs, name, what = encoder.inputs, "feature_size", "bands"
    match inputs:
        case FramesInputSpec():
            size, default, field = inputs.frame_size, LogMel.feature_size, "num_mel_bins"
        case SpectrogramInputSpec():
            size, default, field = inputs.bands, LogMel.feature_size, "num_mel_bins"
        case subsample.SubsampleInputSpec():
            size, default, field = inputs.bands, UsmMel.feature_size, "subsampling_conv_channels"
        case nemo.NemoInputSpec():
            size, default, field = inputs.bands, KaldiMel.feature_size, "input_size"
        case VectorInputSpec():
            size, default, field = inputs.size, _SAMPLES_OF_FRAME, "audio_embed_dim"
            name, what = "audio_samples_per_token", "samples of a frame"
        case _:
            return
    if found.integer(name, default=default) != size:
        raise found.filled({name: default}).error(
            name,
            f"the encoder reads {size} {what} ({field} in "
            f"{checkpoint.config_file.name}); use the files of one model",
        )


def _read_settings(checkpoint: Checkpoint, token: str) -> ConfigJson:
    found = read_feature_settings(checkpoint)
    if found is None:
        raise ModelError(
            f"{checkpoint.path / _FILE} is missing: it has the settings of the model's sounds; "
            "download it, or start with --language-model-only."
        )
    return ConfigJson({**found.fields, "placeholder": token, "embed_token": token}, found.where)


def _read_object(checkpoint: Checkpoint, name: str) -> dict[str, Any] | None:
    text = checkpoint.read_text(name)
    try:
        found = None if text is None else json.loads(text)
    except ValueError as error:
        raise ModelError(f"{checkpoint.path / name} is not valid JSON: {error}.") from None
    if found is not None and not isinstance(found, dict):
        raise ModelError(f"{checkpoint.path / name} is not a JSON object; download it again.")
    return found
