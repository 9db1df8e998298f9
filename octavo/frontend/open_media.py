"""Readers of media for the prompts and chats of a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.config import ModelConfig
from octavo.errors import UnsupportedError
from octavo.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.checkpoints.base import Checkpoint
    from octavo.frontend.chat_media import ChatMedia
    from octavo.frontend.prompt_media import MediaReader, PromptMedia
    from octavo.models.spec import ModelSpec


def open_media(
    checkpoint: Checkpoint,
    settings: ModelConfig,
    spec: ModelSpec,
    tokenizer: Tokenizer | None,
    max_model_len: int,
    shared: Path | None = None,
) -> PromptMedia | None:
    """Return the reader of the media in a model's prompts; None: the model reads none.

    Args:
        checkpoint: folder of the model.
        settings: its settings.
        spec: the model.
        tokenizer: its tokenizer.
        max_model_len: most tokens of prompt and answer together.
        shared: folder in which several front ends keep media by their uuids; None: there is one.

    Raises:
        ModelError: a file of the model is missing or wrong.
        RequestError: a setting of `mm_processor_kwargs` is wrong.
    """
    if not spec.encoders or spec.is_encoder_decoder or tokenizer is None:
        return None
    # Few models read media.
    from octavo.frontend.pictures import Pictures
    from octavo.frontend.prompt_media import PromptMedia
    from octavo.frontend.shared_media import SharedMedia
    from octavo.frontend.sounds import Sounds
    from octavo.frontend.videos import Videos

    readers: list[MediaReader[Any] | None] = []
    if (encoder := spec.encoder("image")) is not None:
        readers.append(Pictures.of_model(checkpoint, settings, encoder))
    if (encoder := spec.encoder("video")) is not None and settings.limit("video"):
        readers.append(Videos.of_model(checkpoint, settings, encoder, tokenizer))
    if (encoder := spec.encoder("audio")) is not None:
        readers.append(Sounds.of_model(checkpoint, settings, encoder, max_model_len))
    found = [reader for reader in readers if reader is not None]
    if not found:
        return None
    cache_nbytes = int(settings.mm_processor_cache_gb * 2**30)
    return PromptMedia(
        found,
        tokenizer,
        max_model_len,
        cache_nbytes,
        enable_mm_embeds=settings.enable_mm_embeds,
        shared=None if shared is None else SharedMedia(shared, cache_nbytes),
    )


def open_chat_media(
    media: PromptMedia | None,
    settings: ModelConfig,
    tokenizer: Tokenizer | None,
    max_model_len: int,
) -> ChatMedia | None:
    """Return the reader of the media in a model's chats; None: the model reads none."""
    if media is None or tokenizer is None:
        return None
    from octavo.frontend.chat_media import ChatMedia  # few models read media

    return ChatMedia(media, settings, tokenizer, max_model_len)


def check_processor_kwargs(media: ChatMedia | None, settings: Mapping[str, Any] | None) -> None:
    """Check `mm_processor_kwargs` of a chat, with or without media.

    Raises:
        UnsupportedError: the model reads text only.
        RequestError: a setting is wrong.
    """
    if not settings:
        return
    if media is None:
        raise UnsupportedError(
            "mm_processor_kwargs is not supported by this model, which reads text only; leave it "
            "out.",
            "mm_processor_kwargs",
        )
    media.check_settings(settings)
