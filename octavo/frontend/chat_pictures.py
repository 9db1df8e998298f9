"""Pictures that chats name by URL: fetched, decoded in helper processes, and put into prompts."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any

from octavo.config import ModelConfig
from octavo.errors import ContextLengthError, RequestError
from octavo.frontend.pictures import Pictures
from octavo.media.content import MediaItem, MediaKind, Modality
from octavo.media.fetch import MediaFetcher
from octavo.multimodal.pictures import PictureReader
from octavo.scheduler.fairness import Tenant
from octavo.system.fair_slots import FairSlots
from octavo.system.offload import offload
from octavo.text.tokenizer import MAX_TOKENS, Tokenizer

# Files in memory that are read; and of hosts, which may answer slowly. Tenants take turns at the
# helper processes, so few files wait for these.
_MOST_FILES, _MOST_OF_HOSTS = 4, 16


class ChatPictures:
    """Reader of the pictures in the chats of one model.

    Args:
        pictures: reader of the pictures in its prompts.
        settings: settings of the model.
        tokenizer: its tokenizer.
        max_model_len: most tokens of prompt and answer together.
    """

    def __init__(
        self, pictures: Pictures, settings: ModelConfig, tokenizer: Tokenizer, max_model_len: int
    ) -> None:
        processor = pictures.processor
        self.kinds: Mapping[Modality, MediaKind] = {
            "image": MediaKind(processor.placeholder, pictures.limit, (processor.embed_token,))
        }
        """Media that the model reads, for `read_media`."""
        self._tokenizer, self._max_model_len = tokenizer, max_model_len
        self._fetcher = MediaFetcher(
            settings.allowed_media_domains, settings.allowed_local_media_path
        )
        self._reader = PictureReader(pictures.kind, processor.settings.fields)
        self._slots, self._slots_of_hosts = FairSlots(_MOST_FILES), FairSlots(_MOST_OF_HOSTS)
        # Also without a call.
        self.close = weakref.finalize(self, self._reader.close)
        """Function that ends the helper processes. A second call is harmless."""

    def check_settings(self, mm_processor_kwargs: Mapping[str, Any]) -> None:
        """Check settings of the processor of pictures.

        Raises:
            RequestError: a name is unknown, or a value is impossible.
        """
        self._reader.processor.changed(mm_processor_kwargs)

    async def read_prompt(
        self,
        pieces: Sequence[str],
        items: Sequence[MediaItem],
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        add_nbytes: Callable[[int], None] = lambda nbytes: None,
        share: Tenant = None,
    ) -> dict[str, Any]:
        """Return the prompt of a chat, with its pictures.

        The pictures of a request are read one after the other, so that requests with many of them
        leave the helper processes to others in between; tenants take turns.

        Args:
            pieces: pieces of the rendered chat that are tokenised separately.
            items: its pictures, in the order of the text.
            mm_processor_kwargs: settings of the processor of pictures.
            add_nbytes: called with the bytes of each picture that is kept; it may raise an error.
            share: the sender, as the scheduler divides tokens.

        Raises:
            RequestError: a picture cannot be had or read, or a setting is wrong.
            ContextLengthError: the pictures have more tokens than the context.
        """
        text = "".join(pieces)
        prompt: dict[str, Any] = {"prompt": text}
        if len(pieces) > 1:
            prompt["prompt_token_ids"] = await offload(len(text), self._encode, pieces)
        if not items:
            return prompt
        images: list[object] = []
        num_embeds = 0
        for item in items:
            image = item.source
            if isinstance(image, str):
                is_of_host = image[:4].lower() == "http"
                try:
                    async with AsyncExitStack() as places:
                        if is_of_host:
                            await places.enter_async_context(self._slots_of_hosts.hold(share))
                            file = await self._fetcher.fetch(image, item.name)
                        await places.enter_async_context(self._slots.hold(share))
                        if not is_of_host:
                            file = await self._fetcher.fetch(image, item.name)
                        reading = self._reader.read(file, item.name, mm_processor_kwargs)
                        image = picture = await asyncio.wrap_future(reading)
                except RequestError as error:
                    if error.param == item.name:
                        error.param = "messages"
                        if item.name not in error.message:  # limits of the helper process
                            error.message = f"{item.name}: {error.message}"
                            error.args = (error.message,)
                    raise
                num_embeds += picture.place.num_embeds
                if num_embeds > self._max_model_len:
                    raise ContextLengthError(
                        f"The first {len(images) + 1} pictures have {num_embeds} tokens; the "
                        f"model's context has {self._max_model_len}. Send fewer or smaller ones.",
                        "messages",
                    )
                add_nbytes(picture.nbytes)
            images.append(image)
        prompt["multi_modal_data"] = {"image": images}
        if any(item.uuid is not None for item in items):
            prompt["multi_modal_uuids"] = {"image": [item.uuid for item in items]}
        if mm_processor_kwargs:
            prompt["mm_processor_kwargs"] = mm_processor_kwargs
        return prompt

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
                    f"The text has more than {most} tokens, the limit. Shorten it.",
                    "messages",
                )
        return ids
