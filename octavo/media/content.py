"""Media in the messages of a chat: each becomes an item, in the order of the text.

The chat template writes a *placeholder* for each item, such as "<image>". A user may write the same
text, and that must never stand for an item. So `read_media` puts a secret mark into such texts,
which `Chat.split` removes from the rendered chat: the pieces around it are tokenised separately,
and a placeholder that was cut in two is ordinary text. Texts that may become a placeholder when
the template joins them, such as "<ima" and "ge>", get the mark at their seam.
"""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from octavo.errors import RequestError, UnsupportedError

Modality: TypeAlias = Literal["image", "audio", "video"]

MEDIA_PARTS: Mapping[str, Modality] = {
    "image_url": "image",
    "input_image": "image",
    "image_pil": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
    "image_embeds": "image",
    "audio_embeds": "audio",
}
"""Types of parts that hold media."""
HTTP_PARTS = frozenset(MEDIA_PARTS) - {"image_pil"}
"""Types of parts that JSON can hold."""
_EMBEDS = ("image_embeds", "audio_embeds")
"""Types of parts that hold rows of the model's encoder."""
NAMES: Mapping[Modality, str] = {"image": "picture", "audio": "sound", "video": "video"}
_DETAILS = ("auto", "low", "high", "original")
MAX_UUID_CHARS = 256
UNKNOWN_UUID = "unknown_uuid"
"""Code of the error of a uuid without its item."""
_FORMAT = re.compile(r"[\w.+-]{1,32}", re.ASCII)


@dataclass(frozen=True)
class MediaItem:
    """One item of a request."""

    modality: Modality
    source: Any
    """URL as text; for rows of the model's encoder a dict, such as {"image_embeds": ...}; of an
    offline caller also an image of Pillow; None: it was sent before, with the same uuid."""
    uuid: str | None
    """Name that the client gives to its content."""
    name: str
    """Name for errors, such as "picture 2"."""


@dataclass(frozen=True)
class MediaKind:
    """Properties of one modality that a model needs."""

    placeholder: str
    """Text that stands for an item, in a rendered chat."""
    limit: int
    """Maximum number of items of a request (`limit_mm_per_prompt`)."""
    reserved: tuple[str, ...] = ()
    """Further texts that only the model's processor may write."""


@dataclass(frozen=True)
class Chat:
    """Messages without media, and the media."""

    messages: list[Any]
    """Each part with media is {"type": modality}."""
    items: list[MediaItem]
    """The media, in the order of the text."""
    reserved: tuple[str, ...]
    """Texts that only the model's template and processor may write."""
    mark: str
    """Secret mark, which cuts reserved texts of users in two."""

    def protect(self, value: Any) -> Any:
        """Return JSON data with the mark inside of each reserved text, wherever it is.

        Raises:
            RequestError: the data are nested too deeply.
        """
        if not self.reserved:
            return value
        try:
            return self._mark(value)
        except RecursionError:
            raise RequestError("The chat is nested too deeply.", "messages") from None

    def _mark(self, value: Any) -> Any:
        if isinstance(value, str):
            for text in self.reserved:
                if text in value:
                    value = value.replace(text, text[:1] + self.mark + text[1:])
            begin = value.rstrip()  # a template may strip texts
            if any(begin.endswith(text[:i]) for text in self.reserved for i in range(1, len(text))):
                value = begin + self.mark + value[len(begin) :]
            return value
        if isinstance(value, Mapping):
            return {self._mark(key): self._mark(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._mark(item) for item in value]
        return value

    def split(self, rendered: str) -> list[str]:
        """Return the pieces of the rendered chat that are to be tokenised separately.

        Only marks inside of reserved texts divide it, so that other texts stay whole.
        """
        pieces = rendered.split(self.mark)
        if len(pieces) == 1:
            return pieces
        longest = max(map(len, self.reserved)) - 1
        text, end = "".join(pieces), 0
        parts, begin = list[str](), 0
        for piece in pieces[:-1]:
            end += len(piece)
            left = text[max(0, end - longest) : end]
            around = left + text[end : end + longest]
            if any(
                -1 < around.find(name, max(0, len(left) + 1 - len(name))) < len(left)
                for name in self.reserved
            ):
                parts.append(text[begin:end])
                begin = end
        return [*parts, text[begin:]]


def read_media(messages: Sequence[Any], kinds: Mapping[Modality, MediaKind]) -> Chat:
    """Take the media out of the messages of a chat.

    Args:
        messages: OpenAI's messages, as plain data; they are not changed.
        kinds: the modalities that the model reads; empty for a text model.

    Raises:
        UnsupportedError: there is a modality that the model does not read.
        RequestError: a part is malformed, or there are too many items.
    """
    found: list[Any] = []
    items: list[MediaItem] = []
    counts = Counter[Modality]()
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple) or not any(map(_is_media, content)):
            found.append(message)
            continue
        parts: list[Any] = []
        for j, part in enumerate(content):
            if not _is_media(part):
                parts.append(part)
                continue
            where = f"messages[{i}].content[{j}]"
            if part["type"] not in MEDIA_PARTS:
                raise UnsupportedError(
                    f"{where} is of type {part['type']!r}; send image_url, input_audio or "
                    "video_url.",
                    "messages",
                )
            modality = MEDIA_PARTS[part["type"]]
            known = kinds.get(modality)
            if known is None:
                *others, last = ["text", *(f"{NAMES[kind]}s" for kind in kinds)]
                reads = f"{', '.join(others)} and {last}" if others else last
                raise UnsupportedError(
                    f"{where} is of type {part['type']!r}, which is not supported here; send "
                    f"{reads} only.",
                    "messages",
                )
            counts[modality] += 1
            name = NAMES[modality]
            if counts[modality] > known.limit:
                raise RequestError(
                    f"messages have more than {known.limit} {name}s, the limit of this server "
                    "(--limit-mm-per-prompt).",
                    "messages",
                )
            source, uuid = _read_part(part, where)
            items.append(MediaItem(modality, source, uuid, f"{name} {counts[modality]}"))
            parts.append({"type": modality})
        found.append({**message, "content": parts})
    reserved = {text for kind in kinds.values() for text in (kind.placeholder, *kind.reserved)}
    chat = Chat(found, items, tuple(sorted(reserved)), f"octavo{secrets.token_hex(16)}")
    return replace(chat, messages=chat.protect(found))


def with_media_io(
    settings: Mapping[str, Any] | None, media_io: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """Return `mm_processor_kwargs` with vLLM's `media_io_kwargs`, which choose frames of videos.

    Args:
        settings: mm_processor_kwargs, which precede.
        media_io: such as {"video": {"num_frames": 64, "fps": 2}}.

    Raises:
        RequestError: media_io has another name.
    """
    if not media_io:
        return settings
    for modality, values in media_io.items():
        others = [name for name in values if name not in ("num_frames", "fps")]
        if modality != "video" or others:
            wrong = f"{modality}.{others[0]}" if others else modality
            raise RequestError(
                f"media_io_kwargs.{wrong} is not supported; allowed: video.num_frames and "
                "video.fps.",
                "media_io_kwargs",
            )
    return {**media_io.get("video", {}), **(settings or {})}


def named_media(messages: object) -> Iterator[tuple[Modality, str, bool]]:
    """Yield modality and uuid of each well-formed part with a uuid; True if it has its content.

    Args:
        messages: OpenAI's messages, as plain data; anything else has none.
    """
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else ():
            if not _is_media(part) or part["type"] not in HTTP_PARTS:
                continue
            try:
                source, uuid = _read_part(part, "")
            except RequestError:
                continue
            if uuid is not None:
                yield MEDIA_PARTS[part["type"]], uuid, source is not None


def is_uuid(value: object) -> bool:
    """Return True if a value may be the uuid of an item."""
    return isinstance(value, str) and 0 < len(value) <= MAX_UUID_CHARS


def _is_media(part: Any) -> bool:
    kind = str(part.get("type")) if isinstance(part, Mapping) else ""
    return kind in MEDIA_PARTS or kind in NAMES


def _read_part(part: Mapping[str, Any], where: str) -> tuple[Any, str | None]:
    """Return source and uuid of a part with media.

    Args:
        part: as OpenAI or vLLM defines it: {"type": "image_url", "image_url": {"url": ...}} (or the
            URL itself), input_image, input_audio, audio_url, video_url; image_embeds, audio_embeds;
            image_pil.
        where: name of the part, for errors.

    Raises:
        RequestError: the part is malformed.
    """
    kind = part["type"]
    uuid = part.get("uuid")
    if uuid is not None and not is_uuid(uuid):
        raise RequestError(
            f"{where}.uuid is not allowed; it is a string of 1 to {MAX_UUID_CHARS} characters.",
            "messages",
        )
    value = part.get("image_url" if kind == "input_image" else kind)
    if kind in _EMBEDS:
        if value is None and uuid is None:
            raise RequestError(
                f"{where}.{kind} is missing; give the base64 of a file of torch.save or "
                f'numpy.save, or a dict {{"{kind}": base64, ...}}.',
                "messages",
            )
        is_dict = value is None or isinstance(value, Mapping)
        return value if is_dict else {kind: value}, uuid
    if kind == "image_pil":
        source = value
    elif kind == "input_audio":
        sent_before = value is None and uuid is not None
        source = None if sent_before else _audio_url(value, f"{where}.input_audio")
    else:
        detail = part.get("detail")
        if isinstance(value, Mapping):
            detail = value.get("detail")
            value = value.get("url")
        if detail is not None and detail not in _DETAILS:
            raise RequestError(
                f"{where}: this detail is not allowed; use {', '.join(_DETAILS)}, or leave it out.",
                "messages",
            )
        source = value
    if source is None and uuid is not None:
        return None, uuid
    if kind != "image_pil" and not (isinstance(source, str) and source):
        name = "image_url" if kind == "input_image" else kind
        raise RequestError(
            f'{where}.{name} is not allowed; give {{"url": "..."}}, with a URL of the kind data:, '
            "https:, http: or file:.",
            "messages",
        )
    return source, uuid


def _audio_url(value: object, where: str) -> str:
    """Return OpenAI's `input_audio` as a data: URL."""
    data = value.get("data") if isinstance(value, Mapping) else None
    form = value.get("format") if isinstance(value, Mapping) else None
    if not isinstance(data, str) or not isinstance(form, str) or not _FORMAT.fullmatch(form):
        raise RequestError(
            f'{where} is not allowed; give {{"data": "base64 ...", "format": "wav"}}.', "messages"
        )
    return f"data:audio/{form};base64,{data}"
