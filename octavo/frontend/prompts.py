"""Forms of a caller's prompt, and its text and token ids."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NotRequired, TypedDict

import numpy as np

from octavo.errors import RequestError, UnsupportedError
from octavo.sampling_params import SamplingParams
from octavo.system.offload import pieces


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]
    """Scope of the prefix cache, as in `SamplingParams.cache_salt`."""
    multi_modal_data: NotRequired[Mapping[str, Any]]
    """Media, in order of their placeholders in the prompt: {"image": one or a list}. With
    `enable_mm_embeds` an item may be the rows of the model's encoder, see `read_embeds`."""
    mm_processor_kwargs: NotRequired[Mapping[str, Any]]
    """Settings of the processors of media for this prompt."""
    multi_modal_uuids: NotRequired[Mapping[str, Any]]
    """Names of the media, {"image": [...]}: a later prompt may have the name with None in place of
    the item, see `MediaCache`."""


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[Mapping[str, Any]]
    """As in `TextPrompt`; each item has one placeholder."""
    mm_processor_kwargs: NotRequired[Mapping[str, Any]]
    multi_modal_uuids: NotRequired[Mapping[str, Any]]


class EmbedsPrompt(TypedDict):
    """A prompt as embeddings, with `enable_prompt_embeds`."""

    prompt_embeds: Any
    """A torch tensor, or a numpy array, [tokens, hidden size] of floating-point numbers."""
    prompt: NotRequired[str]
    """Text of the prompt, which outputs repeat."""
    cache_salt: NotRequired[str]


class EncoderDecoderPrompt(TypedDict):
    """A prompt of an encoder-decoder with both of its parts; other prompts are the encoder's."""

    encoder_prompt: Any
    """A text, token ids, or a dict with "prompt" or "prompt_token_ids"; of a model that hears, a
    dict with "input_features", numbers [frames, size of a frame]."""
    decoder_prompt: NotRequired[Any]
    """First tokens of the answer, in the same forms; the token with which all answers begin is
    added. None: that token alone, and the one that the model forces after it."""
    cache_salt: NotRequired[str]


Prompt = (
    str
    | Sequence[int]
    | TextPrompt
    | TokensPrompt
    | EmbedsPrompt
    | EncoderDecoderPrompt
    | Mapping[str, object]
)


def with_processor_kwargs(
    prompts: Sequence[Prompt], settings: Mapping[str, Any] | None
) -> Sequence[Prompt]:
    """Return prompts with settings of the processors of media; those without media unchanged.

    The settings of a prompt itself precede.

    Raises:
        UnsupportedError: no prompt has media.
    """
    if not settings:
        return prompts
    found: list[Prompt] = []
    for prompt in prompts:
        if isinstance(prompt, Mapping) and prompt.get("multi_modal_data"):
            given = dict(prompt)
            if isinstance(own := given.get("mm_processor_kwargs") or {}, Mapping):
                given["mm_processor_kwargs"] = {**settings, **own}
            found.append(given)
        else:
            found.append(prompt)
    if all(prompt is given for prompt, given in zip(prompts, found, strict=True)):
        raise UnsupportedError(
            f"mm_processor_kwargs={settings!r} is for media, and no prompt has some; leave it out.",
            "mm_processor_kwargs",
        )
    return found


def processing_time(prompt: Prompt, params: SamplingParams) -> int:
    """Estimate the microseconds that `InputProcessor.process` takes."""
    if isinstance(prompt, Mapping) and (encoder := prompt.get("encoder_prompt")) is not None:
        if isinstance(encoder, Mapping):
            names = ("input_features", "prompt", "prompt_token_ids")
            encoder = next((encoder[name] for name in names if name in encoder), None)
        length = len(encoder) if isinstance(encoder, Sequence) else 0
        return length + int(getattr(encoder, "nbytes", 0)) // 1000
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    embeds = prompt.get("prompt_embeds") if isinstance(prompt, Mapping) else None
    chars = len(text) if isinstance(text, str) else 0
    lists = (prompt, params.stop_token_ids, params.allowed_token_ids, params.logit_bias)
    tokens = sum(len(ids) for ids in lists if ids is not None)
    nbytes = getattr(embeds, "nbytes", 0)
    if isinstance(prompt, Mapping) and prompt.get("multi_modal_data"):
        nbytes += 10**8  # pictures may have to be scaled, and sounds resampled
    return chars + sum(map(len, params.bad_words or ())) + tokens // 2 + nbytes // 1000


def read_prompt(prompt: Prompt) -> tuple[str | None, list[int] | None]:
    """Return the text and the token ids of a prompt; None for a missing one.

    Raises:
        RequestError: the prompt has neither, or a value of a wrong type.
    """
    if isinstance(prompt, Mapping):
        text, ids = read_text(prompt), prompt.get("prompt_token_ids")
        if text is None and ids is None:
            raise RequestError(
                "A prompt dict needs 'prompt', 'prompt_token_ids' or 'prompt_embeds'.", "prompt"
            )
        return text, None if ids is None else _int_list(ids)
    if isinstance(prompt, str):
        return prompt, None
    return None, _int_list(prompt)


def read_text(prompt: Mapping[str, object]) -> str | None:
    """Return the text in a prompt's dict; None: it has no text.

    Raises:
        RequestError: the value is no text.
    """
    text = prompt.get("prompt")
    if text is not None and not isinstance(text, str):
        raise RequestError(f"'prompt' is a {type(text).__name__}, not a text.", "prompt")
    return text


def _int_list(ids: object) -> list[int]:
    """Return token ids as a new list of plain ints."""
    if isinstance(ids, np.ndarray):
        ids = ids.tolist()
    if isinstance(ids, Sequence) and not isinstance(ids, str | bytes):
        listed = list(ids)
        if all(set(map(type, piece)) == {int} for piece in pieces(listed)):
            return listed
        if not any(isinstance(i, bool) for i in listed):
            try:
                return [int(operator.index(i)) for i in listed]  # numpy integers
            except TypeError:
                pass
    raise RequestError("A prompt is a text or a list of token ids (integers).", "prompt")


def check_unicode(name: str, texts: Iterable[str]) -> None:
    """Reject lone surrogates, which no message can contain.

    Raises:
        RequestError: a text has one; `name` is its field.
    """
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RequestError(
                f"{name} is not valid Unicode (it holds a lone surrogate); send valid UTF-8.",
                name,
                "invalid_unicode",
            ) from None
