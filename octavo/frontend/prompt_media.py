"""Media in prompts: from `multi_modal_data` to the items that encoders read."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import msgspec

from octavo.errors import ContextLengthError, RequestError, UnsupportedError
from octavo.frontend.media_cache import MediaCache, MediaKey
from octavo.frontend.media_embeds import is_embeds, mm_embeds_off, read_embeds
from octavo.frontend.shared_media import SharedMedia
from octavo.media.content import MAX_UUID_CHARS, NAMES, UNKNOWN_UUID, Modality, is_uuid
from octavo.messages import MultiModalFeatureSpec, RequestOptions
from octavo.models.encoder import EncoderSpec
from octavo.multimodal.items import Item
from octavo.multimodal.processors.base import Processor
from octavo.multimodal.prompt import Placeholders, arrange_prefix, expand_prompt
from octavo.system.limited_process import Buffer
from octavo.text.tokenizer import Tokenizer

DATA, KWARGS, UUIDS = "multi_modal_data", "mm_processor_kwargs", "multi_modal_uuids"
"""Keys in a prompt's dict."""

P = TypeVar("P", bound=Processor)


class FileReader(Protocol):
    """Reader of the files of one modality, in helper processes."""

    @property
    def num_processes(self) -> int:
        """Most helper processes."""

    def read(
        self, file: Buffer, param: str, mm_processor_kwargs: Mapping[str, Any] | None = None
    ) -> Future[Item]:
        """Start to read a file.

        Args:
            file: the file's content.
            param: field of the request that has the file, for errors.
            mm_processor_kwargs: other values of the processor's settings.

        Raises:
            RequestError: mm_processor_kwargs is wrong.

        The future's errors:
            RequestError: the file cannot be read within the limits.
            UnsupportedError: its format is not supported, or a library is not installed.
        """

    def close(self) -> None:
        """End the helper processes."""


class MediaReader(ABC, Generic[P]):
    """Reader of the media of one modality in the prompts of a model.

    Args:
        processor: the model's processor.
        encoder: the encoder of the items.
        limit: most items of a prompt.
    """

    modality: ClassVar[Modality]

    def __init__(self, processor: P, encoder: EncoderSpec, limit: int) -> None:
        self.processor, self.encoder, self.limit = processor, encoder, limit

    @property
    def name(self) -> str:
        """Name of an item, for errors."""
        return NAMES[self.modality]

    @abstractmethod
    def open_files(self) -> FileReader:
        """Return a new reader of files."""

    @abstractmethod
    def items_of(self, data: object) -> Sequence[object]:
        """Return the items in the value of `multi_modal_data`: one item, or a list."""

    @abstractmethod
    def process(self, processor: P, source: Any) -> Item:
        """Return an item that a caller gives.

        Raises:
            RequestError: it is of a wrong kind, or the model cannot read it.
            UnsupportedError: a library is not installed.
        """

    def read(self, source: object, settings: Mapping[str, Any], index: int) -> Item:
        """Return an item as the encoder reads it.

        Args:
            source: what a caller gives, or what a reader of files has read.
            settings: other values of the processor's settings.
            index: its number among the items of the prompt.

        Raises:
            RequestError: the item, or a setting, is wrong.
            UnsupportedError: a library is not installed.
        """
        processor = self.processor.changed(settings)
        try:
            item = source if isinstance(source, Item) else self.process(processor, source)
            for part in item.parts:
                self.check_size(part.place.num_encoder_tokens)
        except RequestError as error:
            raise self.named(error, index, source) from None
        return item

    def check_size(self, num_tokens: int) -> None:
        """Check the number of tokens of a part in the layers of the encoder.

        Raises:
            RequestError: the encoder reads fewer.
        """
        most = self.encoder.max_num_tokens
        if num_tokens > most:
            raise RequestError(
                f"it is cut into {num_tokens} patches, and the model's encoder reads at most "
                f"{most}. Make it smaller."
            )

    def named(self, error: RequestError, index: int, source: object) -> RequestError:
        """Return an error that names an item by its index."""
        where = "" if isinstance(source, Item) else f"{DATA}: "  # the first are of chats
        return type(error)(f"{where}{self.name} {index + 1}: {error.message}", DATA)


class PromptMedia:
    """Reader of all media in the prompts of one model.

    Args:
        readers: readers of the modalities that it reads.
        tokenizer: its tokenizer.
        max_num_embeds: most tokens of the items of a prompt.
        cache_nbytes: most bytes of the items that are kept by their uuids and files.
        enable_mm_embeds: accept the rows of encoders in place of items.
        shared: items that several front ends keep by their uuids; None: this one keeps its own.

    Raises:
        RequestError: a placeholder is not one token.
    """

    def __init__(
        self,
        readers: Sequence[MediaReader[Any]],
        tokenizer: Tokenizer,
        max_num_embeds: int,
        cache_nbytes: int = 0,
        *,
        enable_mm_embeds: bool = False,
        shared: SharedMedia | None = None,
    ) -> None:
        self._enable_mm_embeds = enable_mm_embeds
        self.cache = MediaCache(cache_nbytes)
        """Items of files, and, if they are not shared, those that clients sent with a uuid."""
        self._named: MediaCache | SharedMedia = self.cache if shared is None else shared
        self._max_num_embeds = max_num_embeds
        self.readers: Mapping[Modality, MediaReader[Any]] = {
            reader.modality: reader for reader in readers
        }
        self._tokenizer = tokenizer
        self._ids = {
            reader.modality: (
                self._token(reader.processor.placeholder, reader.name),
                self._embed_token(reader),
                reader.processor.around
                and tuple(self._token(text, reader.name) for text in reader.processor.around),
            )
            for reader in readers
        }

    def settings_of(self, modality: Modality, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of a request's `mm_processor_kwargs` that are for one modality.

        A name that no processor knows is for each of them, which refuses it.
        """
        known = {m: reader.processor.request_settings for m, reader in self.readers.items()}
        return {
            name: value
            for name, value in given.items()
            if name in known[modality] or not any(name in names for names in known.values())
        }

    def check_settings(self, given: Mapping[str, Any]) -> None:
        """Check a request's `mm_processor_kwargs`.

        Raises:
            RequestError: a name is unknown, or a value is impossible.
        """
        for modality, reader in self.readers.items():
            reader.processor.changed(self.settings_of(modality, given))

    def expand(
        self, prompt: Mapping[str, Any], token_ids: Sequence[int], options: RequestOptions
    ) -> tuple[list[int], list[MultiModalFeatureSpec]]:
        """Replace the placeholders of a prompt by the tokens of its items.

        Args:
            prompt: a prompt's dict with `multi_modal_data`.
            token_ids: its tokens, with one placeholder for each item.
            options: the envelope. Its `cache_salt` is the scope of the prefix cache: other scopes
                do not share the encoder's results.

        Returns:
            The tokens, and the parts of the items in order of their places.

        Raises:
            RequestError: the items are wrong, or not as many as the placeholders.
            UnsupportedError: the data holds items that the model does not read.
            ContextLengthError: the items have more tokens than the context.
        """
        settings = _settings_of(prompt)
        given = self._given(prompt, settings)
        items: dict[int, list[Item]] = {}
        placeholders: dict[int, Placeholders] = {}
        kept: list[tuple[MediaKey, Item]] = []
        num_embeds = 0
        for modality, sources in given.items():
            reader = self.readers[modality]
            own = self.settings_of(modality, settings)
            placeholder, embed_id, around = self._ids[modality]
            uuids = _uuids_of(prompt.get(UUIDS), modality, reader.name, len(sources))
            read = list[Item]()
            for i, (source, uuid) in enumerate(zip(sources, uuids, strict=True)):
                key = None if uuid is None else media_key(options.cache_salt, uuid, modality, own)
                if key is not None and source is None:
                    read.append(self._recall(key, reader, i))
                else:
                    read.append(reader.read(source, own, i))
                    if key is not None:
                        kept.append((key, read[-1]))
                num_embeds += read[-1].num_embeds
                if num_embeds > self._max_num_embeds:
                    raise ContextLengthError(
                        f"The first {i + 1} {reader.name}s have {num_embeds} tokens; the model's "
                        f"context has {self._max_num_embeds}. Send fewer or smaller ones.",
                        DATA,
                    )
            items[placeholder] = read
            places = [[part.place for part in item.parts] for item in read]
            placeholders[placeholder] = Placeholders(reader.name, embed_id, places, around)
            if read and (end := reader.processor.prefix_end) is not None:
                bos, ends = self._tokenizer.bos_token_id, self._tokenizer.encode(end, False)
                token_ids = arrange_prefix(token_ids, len(read), placeholder, bos, ends)
        ids, ranges = expand_prompt(token_ids, placeholders, self._tokenizer)
        following = {
            token: iter([(i, item, part) for i, item in enumerate(found) for part in item.parts])
            for token, found in items.items()
        }
        features = []
        for token, place in ranges:
            i, item, part = next(following[token])
            reader = self.readers[item.modality]
            if (other := reader.processor.beside) is not None and given.get(other):
                part = part.beside()
            feature = part.feature(
                item.modality, place, _identifier(part.digest, options.cache_salt)
            )
            if (sight := reader.encoder.sight) is not None:
                feature = msgspec.structs.replace(feature, ranges=sight.ranges(place, len(ids)))
            try:
                reader.encoder.check(feature)
            except RequestError as error:
                raise reader.named(error, i, given[item.modality][i]) from None
            features.append(feature)
        for key, item in kept:
            self._named.put(key, item, item.nbytes, options.share)
        return ids, features

    def clear(self) -> None:
        """Forget the media that are kept by their files and uuids."""
        self.cache.clear()
        self._named.clear()

    def read_embeds(
        self, source: Any, modality: Modality, settings: Mapping[str, Any], max_items: int
    ) -> list[Item]:
        """Return the items whose rows a caller gives; see `media_embeds.read_embeds`.

        Args:
            source: rows, or a dict with them.
            modality: modality of the items.
            settings: other values of the processor's settings, those of the modality only.
            max_items: most items.

        Raises:
            RequestError: they are wrong, too many, or not accepted here.
        """
        if not self._enable_mm_embeds:
            raise RequestError(mm_embeds_off(modality), DATA)
        processor = self.readers[modality].processor.changed(settings)
        return read_embeds(source, processor, modality, max_items)

    def _recall(self, key: MediaKey, reader: MediaReader[Any], index: int) -> Item:
        """Return the item that was sent with a uuid before."""
        found: Item | None = self._named.get(key)
        if found is None:
            name = reader.name
            raise RequestError(
                f"{name} {index + 1}: no {name} with the uuid {key.name!r} is kept here for this "
                f"client and these mm_processor_kwargs; send the {name} together with the uuid. "
                "Each server keeps its own, and gives up old ones (--mm-processor-cache-gb).",
                DATA,
                UNKNOWN_UUID,
            )
        return found

    def _given(
        self, prompt: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> dict[Modality, Sequence[object]]:
        """Return the items in a prompt's dict, of all modalities that the model reads.

        Args:
            prompt: the dict.
            settings: its mm_processor_kwargs.
        """
        data = prompt[DATA]
        names = [repr(modality) for modality in self.readers]
        if not isinstance(data, Mapping):
            raise RequestError(
                f"{DATA} is a {type(data).__name__}; give a dict such as {{{names[0]}: [...]}}.",
                DATA,
            )
        others = [name for name in data if name not in self.readers and not _is_none(data[name])]
        if others:
            raise UnsupportedError(
                f"{DATA}: {others[0]!r} is not supported by this model; give {' or '.join(names)}.",
                DATA,
            )
        found: dict[Modality, Sequence[object]] = {}
        for modality, reader in self.readers.items():
            value = data.get(modality)
            items: list[object] = []
            if value is not None:
                sources = [value] if is_embeds(value, modality) else reader.items_of(value)
                for source in sources:
                    if is_embeds(source, modality):
                        own = self.settings_of(modality, settings)
                        items += self._named_embeds(reader, source, own, len(items))
                    else:
                        items.append(source)
            if len(items) > reader.limit:
                raise RequestError(
                    f"The prompt has {len(items)} {reader.name}s; at most {reader.limit} are "
                    "allowed (limit_mm_per_prompt).",
                    DATA,
                )
            found[modality] = items
        return found

    def _named_embeds(
        self, reader: MediaReader[Any], source: object, own: Mapping[str, Any], index: int
    ) -> list[Item]:
        """Return `read_embeds`; an error names the index of the first item."""
        try:
            return self.read_embeds(source, reader.modality, own, reader.limit)
        except RequestError as error:
            raise reader.named(error, index, source) from None

    def _embed_token(self, reader: MediaReader[Any]) -> int:
        """Return the token that rows replace.

        Any token will do: it is that of the placeholder if the tokenizer lacks the model's own, as
        in published GGUF files of Gemma 3.
        """
        processor = reader.processor
        ids = self._tokenizer.encode(processor.embed_token, False)
        return ids[0] if len(ids) == 1 else self._token(processor.placeholder, reader.name)

    def _token(self, text: str, name: str) -> int:
        ids = self._tokenizer.encode(text, False)
        if len(ids) != 1:
            raise RequestError(
                f"{text!r}, the placeholder of {name}s, is not one token of this tokenizer. Name "
                "that of the model (--tokenizer), or start with --language-model-only.",
                DATA,
            )
        return ids[0]


def media_key(
    scope: str | None, name: str | bytes, modality: Modality, settings: Mapping[str, Any]
) -> MediaKey:
    """Return the key of an item.

    Args:
        scope: scope of the prefix cache.
        name: see `MediaKey`.
        modality: modality of the item.
        settings: other values of the processor's settings, those of the modality only.
    """
    return MediaKey(scope, name, json.dumps([modality, settings], sort_keys=True))


def _settings_of(prompt: Mapping[str, Any]) -> Mapping[str, Any]:
    settings = prompt.get(KWARGS) or {}
    if not isinstance(settings, Mapping):
        raise RequestError(f"{KWARGS} is a {type(settings).__name__}, not a dict.", KWARGS)
    return settings


def _uuids_of(uuids: object, modality: Modality, name: str, count: int) -> Sequence[str | None]:
    """Return the names that a client gives to its items; None for those without one.

    They do not identify an item: its content does.
    """
    if uuids is None or (isinstance(uuids, Mapping) and not count and modality not in uuids):
        return [None] * count
    names = uuids.get(modality) if isinstance(uuids, Mapping) else uuids
    names = [names] if isinstance(names, str) else names
    if (
        not isinstance(names, list | tuple)
        or len(names) != count
        or not all(name is None or is_uuid(name) for name in names)
    ):
        raise RequestError(
            f"{UUIDS} must have a text of 1 to {MAX_UUID_CHARS} characters, or None, for each of "
            f"the {count} {name}s, as {{{modality!r}: [...]}}.",
            UUIDS,
        )
    return names


def _identifier(digest: str, salt: str | None) -> str:
    """Return the identifier of a part in a scope of the prefix cache."""
    if salt is None:
        return digest
    return hashlib.sha256(msgspec.msgpack.encode((digest, salt))).hexdigest()


def _is_none(items: object) -> bool:
    """Return True if the value of a modality has no items."""
    return items is None or (isinstance(items, list | tuple) and not items)
