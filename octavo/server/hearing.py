"""Checks and steps that all requests with sounds share."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from octavo.media.audio import AudioReader, Samples
from octavo.server.realtime_shares import SessionPlaces, SoundMemory
from octavo.speech.interface import SpeechToText
from octavo.speech.registry import open_speech_model
from octavo.system.fair_slots import FairShares, FairSlots
from octavo.system.limited_process import Buffer

if TYPE_CHECKING:
    from octavo.frontend.async_llm import AsyncLLM

# Requests of a tenant at a time for each request of another one.
_MULTIPLE = 2
# Windows whose features are computed at a time; a tenant leaves one place to the others.
_WINDOWS = 2


class Hearing:
    """Processes that read sounds, and the facts of the speech model."""

    def __init__(self) -> None:
        self.reader = AudioReader()
        count = self.reader.num_processes
        # A tenant with many long sounds leaves a process to the others.
        self._turns = FairSlots(count, count - 1)
        self._reading: set[asyncio.Task[Samples]] = set()
        self.feature_turns = FairSlots(_WINDOWS, _WINDOWS - 1)
        """Turns of the features of windows, each of which takes some milliseconds."""
        self.places, self.sound_memory = SessionPlaces(), SoundMemory()
        self.requests = FairShares(_MULTIPLE)
        """Requests for the engine, of which a sound has one for each of its windows at least."""
        self.message_turns = FairSlots(1)
        """Turns of the messages of sessions."""
        self._model: SpeechToText | None = None

    async def read(self, data: Buffer, tenant: Hashable) -> Samples:
        """Read a sound when it is its tenant's turn; return float32 [samples] at 16 kHz.

        A process cannot give up a sound that it has begun, so that one keeps its place, even if
        this call is cancelled.

        Args:
            data: the file.
            tenant: sender of the file.

        Raises:
            OctavoError: see `AudioReader.read`.
        """
        begun: Future[Samples] | None = None

        async def work() -> Samples:
            nonlocal begun
            async with self._turns.hold(tenant):
                begun = self.reader.submit(data)
                return await asyncio.wrap_future(begun)

        task = asyncio.create_task(work())
        self._reading.add(task)
        task.add_done_callback(self._note_end)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if begun is None or begun.cancel():
                task.cancel()
            raise

    def _note_end(self, task: asyncio.Task[Samples]) -> None:
        self._reading.discard(task)
        if not task.cancelled():
            task.exception()  # its client may be gone

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
