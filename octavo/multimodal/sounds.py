"""Reading of a model's sounds: files to encoder inputs, in helper processes."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from octavo.errors import RequestError
from octavo.media.audio import AudioReader, Samples
from octavo.multimodal.items import Item
from octavo.multimodal.processors.sounds import SoundProcessor
from octavo.system.limited_process import Buffer


class SoundReader:
    """Reader of the sounds of one model.

    Args:
        processor: the model's processor.
    """

    def __init__(self, processor: SoundProcessor) -> None:
        self._processor, self._files = processor, AudioReader()

    @property
    def num_processes(self) -> int:
        """Most helper processes."""
        return self._files.num_processes

    def read(
        self, file: Buffer, param: str, mm_processor_kwargs: Mapping[str, Any] | None = None
    ) -> Future[Item]:
        """Start to read a sound.

        Args:
            file: in a format of `AudioReader`.
            param: field of the request that has the sound, for errors.
            mm_processor_kwargs: other values of the processor's settings.

        Raises:
            RequestError: mm_processor_kwargs is wrong.

        The future's errors:
            RequestError: the sound cannot be read within the limits, or by the model.
            UnsupportedError: PyAV is not installed.
        """
        processor = self._processor.changed(mm_processor_kwargs or {})

        def make(samples: Samples) -> Item:
            try:
                return processor.process(samples)
            except RequestError as error:
                raise type(error)(f"{param}: {error.message}", param) from None

        return self._files.read(file, make, param, processor.max_seconds)

    def close(self) -> None:
        """End the helper processes."""
        self._files.close()
