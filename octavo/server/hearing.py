"""Checks and steps that all requests with sounds share."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from octavo.media.audio import AudioReader
from octavo.speech.interface import SpeechToText
from octavo.speech.registry import open_speech_model

if TYPE_CHECKING:
    from octavo.frontend.async_llm import AsyncLLM


class Hearing:
    """Processes that read sounds, and the facts of the speech model."""

    def __init__(self) -> None:
        self.reader = AudioReader()
        self._model: SpeechToText | None = None

    async def model(self, engine: AsyncLLM) -> SpeechToText:
        """Return the speech model.

        Raises:
            RequestError: the engine's model does not hear.
            ModelError: a file of the model is missing or wrong.
        """
        if self._model is None:
            self._model = await asyncio.to_thread(
                open_speech_model,
                engine.checkpoint,
                engine.spec,
                engine.tokenizer,
                engine.max_model_len,
            )
        return self._model

    async def close(self) -> None:
        """End the processes."""
        await asyncio.to_thread(self.reader.close)
