"""Sounds in prompts: samples, as the encoder reads them."""

from __future__ import annotations

import struct
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.base import Checkpoint
from octavo.config import ModelConfig
from octavo.errors import RequestError
from octavo.frontend.prompt_media import MediaReader
from octavo.media.audio import AudioReader
from octavo.models.encoder import EncoderSpec
from octavo.multimodal.items import Item
from octavo.multimodal.processors.sounds import SoundProcessor, read_sound_processor
from octavo.multimodal.sounds import SoundReader

_FORM = "give (samples, sampling_rate), with samples as an array of floats [samples]"
# Rates that the resampler takes.
_MIN_RATE, _MAX_RATE = 1000, 768_000


class Sounds(MediaReader[SoundProcessor]):
    """Reader of the sounds in the prompts of one model.

    A sound is (samples, sampling_rate), or samples at the model's own rate. Others are resampled by
    FFmpeg's libraries, as the sounds of files are.

    Args:
        processor: the model's processor.
        encoder: the encoder of its sounds.
        limit: most sounds of a prompt.
    """

    modality = "audio"

    def __init__(self, processor: SoundProcessor, encoder: EncoderSpec, limit: int) -> None:
        super().__init__(processor, encoder, limit)
        self._resampler = AudioReader()
        weakref.finalize(self, self._resampler.close)

    @classmethod
    def of_model(
        cls,
        checkpoint: Checkpoint,
        settings: ModelConfig,
        encoder: EncoderSpec,
        max_model_len: int,
    ) -> Sounds | None:
        """Return the reader of a model's sounds; None: there is no processor for them here.

        Args:
            checkpoint: folder of the model.
            settings: settings of the model.
            encoder: the encoder of its sounds.
            max_model_len: most tokens of a prompt and its answer, which bound a sound.

        Raises:
            ModelError: a file of the model is missing or wrong.
        """
        processor = read_sound_processor(checkpoint)
        if processor is None:
            return None
        processor.max_rows = max_model_len
        return cls(processor, encoder, settings.limit("audio"))

    def open_files(self) -> SoundReader:
        """Implement `MediaReader`."""
        return SoundReader(self.processor)

    def items_of(self, data: object) -> Sequence[object]:
        """Implement `MediaReader`."""
        is_one = isinstance(data, tuple) and len(data) == 2 and _is_number(data[1])
        return list(data) if isinstance(data, list | tuple) and not is_one else [data]

    def process(self, processor: SoundProcessor, source: Any) -> Item:
        """Implement `MediaReader`."""
        samples, rate = source, processor.sampling_rate
        if isinstance(source, tuple):
            if len(source) != 2 or not _is_number(source[1]):
                raise RequestError(f"it is a tuple of {len(source)} values; {_FORM}.")
            samples, rate = source
        if not isinstance(samples, np.ndarray):
            raise RequestError(f"it is a {type(samples).__name__}; {_FORM}.")
        if samples.ndim != 1 or not np.issubdtype(samples.dtype, np.floating):
            raise RequestError(f"it is an array {samples.dtype} {list(samples.shape)}; {_FORM}.")
        if not len(samples):
            raise RequestError("it has no samples.")
        if not _MIN_RATE <= rate <= _MAX_RATE or rate != int(rate):
            raise RequestError(
                f"its sampling rate is {rate!r}; give a whole number from {_MIN_RATE} to "
                f"{_MAX_RATE}."
            )
        processor.check_length(len(samples) / rate)
        samples = samples.astype(np.float32)
        if not np.isfinite(samples).all():
            raise RequestError("it has samples that are not finite numbers.")
        if rate != processor.sampling_rate:
            samples = self._resampled(samples, int(rate))
        return processor.process(samples)

    def _resampled(self, samples: NDArray[np.float32], rate: int) -> NDArray[np.float32]:
        data = samples.tobytes()
        kind = struct.pack("<HHIIHH", 3, 1, rate, 4 * rate, 4, 32)
        body = b"WAVEfmt " + struct.pack("<I", len(kind)) + kind
        body += b"data" + struct.pack("<I", len(data)) + data
        file = b"RIFF" + struct.pack("<I", len(body)) + body
        return self._resampler.submit(file, "the sound").result()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)
