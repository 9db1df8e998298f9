"""Media that chats name by URL: fetched, decoded in helper processes, and put into prompts."""

from __future__ import annotations

import asyncio
import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any

from octavo.config import ModelConfig
from octavo.errors import ContextLengthError, RequestError
from octavo.frontend.media_embeds import nbytes_of
from octavo.frontend.prompt_media import (
    DATA,
    KWARGS,
    UUIDS,
    FileReader,
    PromptMedia,
    media_key,
)
from octavo.media.content import NAMES, MediaItem, MediaKind, Modality
from octavo.media.fetch import MediaFetcher
from octavo.multimodal.items import Item
from octavo.scheduler.fairness import Tenant
from octavo.system.fair_slots import FairSlots
from octavo.system.offload import offload
from octavo.text.tokenizer import MAX_TOKENS, Tokenizer

# Files in memory that are read; and of hosts, which may answer slowly. In each case the second
# number is the most for a tenant, which leaves a place to the others.
_MOST_FILES, _MOST_OF_HOSTS = (4, 3), (16, 12)
# Bytes that SHA-256 reads in a microsecond.
_DIGEST_SPEED = 500
# Bytes of tensors that are decoded, copied and hashed in a microsecond.
_DECODING_SPEED = 100


class ChatMedia:
    """Reader of the media in the chats of one model.

    Args:
        media: reader of the media in its prompts.
        settings: settings of the model.
        tokenizer: its tokenizer.
        max_model_len: most tokens of prompt and answer together.
    """

    def __init__(
        self, media: PromptMedia, settings: ModelConfig, tokenizer: Tokenizer, max_model_len: int
    ) -> None:
        self._media = media
        self.kinds: Mapping[Modality, MediaKind] = {
            modality: MediaKind(
                reader.processor.placeholder, reader.limit, (reader.processor.embed_token,)
            )
            for modality, reader in media.readers.items()
        }
        """Media that the model reads, for `read_media`."""
        self._tokenizer, self._max_model_len = tokenizer, max_model_len
        self._fetcher = MediaFetcher(
            settings.allowed_media_domains, settings.allowed_local_media_path
        )
        self._files: Mapping[Modality, FileReader] = {
            modality: reader.open_files() for modality, reader in media.readers.items()
        }
        self._slots, self._slots_of_hosts = FairSlots(*_MOST_FILES), FairSlots(*_MOST_OF_HOSTS)
        # A tenant with many large files leaves a helper process to the others.
        self._turns = {
            modality: FairSlots(files.num_processes, max(1, files.num_processes - 1))
            for modality, files in self._files.items()
        }
        self._keeping: set[asyncio.Task[None]] = set()
        # Also without a call.
        self.close = weakref.finalize(self, _close, list(self._files.values()))
        """Function that ends the helper processes. A second call is harmless."""

    def check_settings(self, mm_processor_kwargs: Mapping[str, Any]) -> None:
        """Check settings of the processors.

        Raises:
            RequestError: a name is unknown, or a value is impossible.
        """
        self._media.check_settings(mm_processor_kwargs)

    async def read_prompt(
        self,
        pieces: Sequence[str],
        items: Sequence[MediaItem],
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        add_nbytes: Callable[[int], None] = lambda nbytes: None,
        share: Tenant = None,
        scope: str | None = None,
    ) -> dict[str, Any]:
        """Return the prompt of a chat, with its media.

        The files of a request are read one after the other, so that requests with many of them
        leave the helper processes to others in between; tenants take turns. A file that was read
        before in the same scope, with the same settings, is found in the cache.

        Args:
            pieces: pieces of the rendered chat that are tokenised separately.
            items: its media, in the order of the text.
            mm_processor_kwargs: settings of the processors.
            add_nbytes: called with the bytes of each item that is kept; it may raise an error.
            share: the sender, as the scheduler divides tokens.
            scope: scope of the prefix cache.

        Raises:
            RequestError: a file cannot be had or read, or a setting is wrong.
            ContextLengthError: the items have more tokens than the context.
        """
        text = "".join(pieces)
        prompt: dict[str, Any] = {"prompt": text}
        if len(pieces) > 1:
            prompt["prompt_token_ids"] = await offload(len(text), self._encode, pieces)
        if not items:
            return prompt
        found: dict[Modality, list[object]] = {}
        num_embeds = 0
        for item in items:
            source = item.source
            if isinstance(source, str | Mapping):
                if isinstance(source, str):
                    read = await self._read(item, mm_processor_kwargs or {}, share, scope)
                else:
                    read = await self._read_embeds(item, mm_processor_kwargs or {})
                num_embeds += read.num_embeds
                if num_embeds > self._max_model_len:
                    count = len(found.get(item.modality, ())) + 1
                    raise ContextLengthError(
                        f"The first {count} {NAMES[item.modality]}s have {num_embeds} tokens; the "
                        f"model's context has {self._max_model_len}. Send fewer or smaller ones.",
                        "messages",
                    )
                add_nbytes(read.nbytes)
                source = read
            found.setdefault(item.modality, []).append(source)
        prompt[DATA] = found
        if any(item.uuid is not None for item in items):
            prompt[UUIDS] = {
                modality: [item.uuid for item in items if item.modality == modality]
                for modality in found
            }
        if mm_processor_kwargs:
            prompt[KWARGS] = mm_processor_kwargs
        return prompt

    async def _read(
        self, item: MediaItem, settings: Mapping[str, Any], share: Tenant, scope: str | None
    ) -> Item:
        """Return an item that a chat names by URL."""
        is_of_host = item.source[:4].lower() == "http"
        own = self._media.settings_of(item.modality, settings)
        try:
            async with AsyncExitStack() as places:
                if is_of_host:
                    await places.enter_async_context(self._slots_of_hosts.hold(share))
                    file = await self._fetcher.fetch(item.source, item.name)
                await places.enter_async_context(self._slots.hold(share))
                if not is_of_host:
                    file = await self._fetcher.fetch(item.source, item.name)
                digest = await offload(len(file) // _DIGEST_SPEED, _digest, file)
                key, cache = media_key(scope, digest, item.modality, own), self._media.cache
                found: Item | None = cache.get(key)
                if found is None:
                    await places.enter_async_context(self._turns[item.modality].hold(share))
                    reading = self._files[item.modality].read(file, item.name, own)
                    try:
                        found = await asyncio.wrap_future(reading)
                    except asyncio.CancelledError:
                        if not reading.cancel():
                            self._keep(places.pop_all(), reading)
                        raise
                    cache.put(key, found, found.nbytes, share)
                return found
        except RequestError as error:
            if error.param == item.name:
                error.param = "messages"
                if item.name not in error.message:  # limits of the helper process
                    error.message = f"{item.name}: {error.message}"
                    error.args = (error.message,)
            raise

    async def _read_embeds(self, item: MediaItem, settings: Mapping[str, Any]) -> Item:
        """Return an item for which a chat has the rows of the encoder."""
        own = self._media.settings_of(item.modality, settings)
        await asyncio.sleep(0)  # many small ones leave time for other requests
        try:
            found = await offload(
                nbytes_of(item.source) // _DECODING_SPEED,
                self._media.read_embeds,
                item.source,
                item.modality,
                own,
                1,
            )
            if not found:
                raise RequestError("it has no rows; give those of an item.")
        except RequestError as error:
            raise type(error)(f"{item.name}: {error.message}", "messages") from None
        return found[0]

    def _keep(self, places: AsyncExitStack, reading: Future[Item]) -> None:
        """Keep the places of a file whose client has gone until its helper process is free.

        A process cannot give up a file that it has begun.
        """

        async def wait() -> None:
            async with places:
                await asyncio.wait({finished})
            finished.exception()  # no caller waits for it

        finished = asyncio.wrap_future(reading)
        task = asyncio.create_task(wait())
        self._keeping.add(task)
        task.add_done_callback(self._keeping.discard)

    def read_prompt_now(
        self,
        pieces: Sequence[str],
        items: Sequence[MediaItem],
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return `read_prompt`'s result; for callers with or without an event loop."""
        with ThreadPoolExecutor(1) as thread:
            work = self.read_prompt(pieces, items, mm_processor_kwargs)
            return thread.submit(asyncio.run, work).result()

    def _encode(self, pieces: Sequence[str]) -> list[int]:
        ids, most = list[int](), max(self._max_model_len, MAX_TOKENS)
        for piece in pieces:
            ids += self._tokenizer.encode(piece, False, most)
            if len(ids) > most:
                raise ContextLengthError(
                    f"The text has more than {most} tokens, the limit. Shorten it.", "messages"
                )
        return ids


def _digest(file: bytes) -> bytes:
    return hashlib.sha256(file).digest()


def _close(readers: Sequence[FileReader]) -> None:
    for reader in readers:
        reader.close()
