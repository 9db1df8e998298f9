"""Conversion of a caller's prompt and parameters into checked requests for the engine core.

All checks of a single request are here. They run on arrival and raise typed errors.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, Protocol, TypedDict

import msgspec
import numpy as np

from octavo.config import ModelConfig
from octavo.errors import ContextLengthError, RequestError, UnsupportedError
from octavo.frontend.activation import activate
from octavo.frontend.core_params import KV_TRANSFER_PARAMS, make_core_params
from octavo.frontend.encoder_prompt import (
    audio_feature,
    encoder_token_ids,
    read_alignment,
    read_features,
    read_parts,
    scoped,
    text_feature,
)
from octavo.frontend.media_embeds import mm_embeds_off
from octavo.frontend.prompt_embeds import PROMPT_EMBEDS_OFF, check_embeds, read_tensor
from octavo.messages import (
    CoreSamplingParams,
    EngineCoreRequest,
    GuardSpec,
    Modality,
    MultiModalFeatureSpec,
    PoolingSpec,
    PromptEmbeds,
    RequestOptions,
)
from octavo.models.blocks.pooler import PoolerSpec, RoleSpec, SentencesSpec
from octavo.pooling_params import PoolingParams
from octavo.sampling_params import MAX_CACHE_SALT_LENGTH, SamplingParams
from octavo.system.offload import pieces
from octavo.text.markers import marker_tokens
from octavo.text.tokenizer import MAX_TOKENS, Tokenizer, is_longer

if TYPE_CHECKING:
    from octavo.checkpoints.base import Checkpoint
    from octavo.frontend.chat_media import ChatMedia
    from octavo.frontend.prompt_media import MediaReader, PromptMedia
    from octavo.models.spec import ModelSpec

# Last tokens of a prompt in which a marker may be.
_MARKER_TOKENS = 32
_MAX_MARKERS = 64


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


class InputSpec(Protocol):
    """Part of a `ModelSpec` that an `InputProcessor` reads."""

    @property
    def architecture(self) -> str:
        """Name of the architecture, for errors."""

    @property
    def generates(self) -> bool:
        """True if the model can generate tokens."""

    @property
    def poolers(self) -> Sequence[PoolerSpec]:
        """Results that the model has in place of tokens."""

    @property
    def sentences(self) -> SentencesSpec:
        """Prompts of a model of vectors."""

    @property
    def sees_all(self) -> bool:
        """True if one step must compute all tokens of a text."""

    @property
    def vocab_size(self) -> int:
        """Number of rows of the embedding and of the output head."""

    @property
    def embed_size(self) -> int:
        """Number of numbers of an embedding; read only for prompts with embeddings."""

    @property
    def eos_token_ids(self) -> Iterable[int]:
        """Tokens that end an answer."""

    @property
    def is_encoder_decoder(self) -> bool:
        """True if a prompt has an input of an encoder. The properties below are of such models."""

    @property
    def encoder_modality(self) -> Modality:
        """Kind of the encoder's inputs: "text" or "audio"."""

    @property
    def encoder_vocab_size(self) -> int:
        """Number of rows of the encoder's embedding."""

    @property
    def encoder_frames(self) -> tuple[int, int]:
        """Shape of a sound: frames, numbers of a frame; -1 frames: any number."""

    def num_encoder_tokens(self, frames: int) -> int:
        """Return the number of tokens of a sound with a number of frames."""

    @property
    def max_encoder_len(self) -> int:
        """Most tokens of an encoder's input."""

    def check_item(self, item: MultiModalFeatureSpec) -> None:
        """Check that an encoder can read an item of a prompt.

        Raises:
            RequestError: no encoder can.
        """

    @property
    def decoder_start_ids(self) -> Sequence[int]:
        """Tokens with which every answer begins."""

    @property
    def bad_words_ids(self) -> Iterable[Sequence[int]]:
        """Sequences of tokens that the model never generates."""


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


class InputProcessor:
    """Checker of requests for one model; adds defaults and token ids.

    Args:
        model_config: settings of the model; the processor reads `max_logprobs`, `seed`,
            `guided_decoding_backend`, `allow_additional_properties`, `enable_prompt_embeds` and
            `enable_mm_embeds`.
        spec: vocabulary size, end-of-sequence ids and size of the embeddings of the model.
        tokenizer: encodes prompts; None if prompts are token ids only (`skip_tokenizer_init`).
        max_model_len: most tokens of prompt and answer together.
        media: reader of media; None: the model reads none.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        spec: InputSpec,
        tokenizer: Tokenizer | None,
        max_model_len: int,
        media: PromptMedia | None = None,
    ) -> None:
        self._media = media
        self._tokenizer = tokenizer
        self._spec, self._sees_all = spec, spec.sees_all
        self._max_model_len = max_model_len
        self._vocab_size = spec.vocab_size
        self._max_logprobs = model_config.max_logprobs
        self._seed = model_config.seed
        self._grammar_backend = model_config.guided_decoding_backend
        self._additional_properties = model_config.allow_additional_properties
        self._enable_prompt_embeds = model_config.enable_prompt_embeds
        self._enable_mm_embeds = model_config.enable_mm_embeds
        eos = set(spec.eos_token_ids)
        if tokenizer is not None and tokenizer.eos_token_id is not None:
            eos.add(tokenizer.eos_token_id)
        self._markers: dict[tuple[str, str], tuple[tuple[int, ...], tuple[int, ...]]] = {}
        """Results of `_find_markers`."""
        self._eos_token_ids = sorted(i for i in eos if 0 <= i < spec.vocab_size)

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        options: RequestOptions,
        *,
        add_special_tokens: bool = True,
    ) -> tuple[EngineCoreRequest, str | None]:
        """Make the core request of a prompt; return it with the prompt's text, if it has one.

        `params` is never changed.

        Args:
            request_id: an id that no live request has.
            prompt: text, token ids, or a dict with one of "prompt", "prompt_token_ids" and
                "prompt_embeds"; for an encoder-decoder its encoder's input, or an
                `EncoderDecoderPrompt`.
            params: the parameters of the answer.
            options: the envelope; `_complete` adds the options in the prompt and the parameters.
            add_special_tokens: True to let the tokenizer add its special tokens to a text prompt;
                False for a rendered chat template.

        Raises:
            RequestError: the request is bad, or this model does not support it.
            ContextLengthError: the prompt leaves no room for an answer, or for `min_tokens`.
        """
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params is a {type(params).__name__}, not SamplingParams.")
        if not self._spec.generates:
            raise RequestError(
                f"This model ({self._spec.architecture}) generates no text. It can: "
                f"{self._tasks()}.",
                "model",
            )
        self._check_params(params)
        options = _complete(options, prompt, params, params.priority)
        features: list[MultiModalFeatureSpec] = []
        bad_words = self._encode_bad_words(params.bad_words or [])
        embeds = self._read_embeds(prompt, params)
        if self._spec.is_encoder_decoder:
            text, ids, features = self._read_encoder_decoder(
                prompt, params, options, add_special_tokens
            )
            bad_words += [list(word) for word in self._spec.bad_words_ids]
        elif embeds is not None:
            assert isinstance(prompt, Mapping)
            if prompt.get("multi_modal_data"):
                raise UnsupportedError(
                    "A prompt of both prompt_embeds and multi_modal_data is not supported; send "
                    "token ids or text with the media.",
                    "multi_modal_data",
                )
            text, ids = _read_text(prompt), [0] * embeds.num_tokens
        else:
            text, given = self._read_prompt(prompt)
            if given is None:
                assert text is not None
                given = self._encode(text, params, add_special_tokens)
            for piece in pieces(given):
                self._check_ids("prompt", piece)
            ids = given[self._kept(len(given), params)]
            if isinstance(prompt, Mapping) and prompt.get("multi_modal_data"):
                ids, features = self._read_media(prompt, given, params, options)
        options = activate(options, None if embeds is not None else ids)
        max_tokens = self._max_tokens(len(ids), params)
        seed = self._derive_seed(request_id) if params.seed is None else params.seed
        stop_ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids.update(self._eos_token_ids)
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=ids,
            sampling_params=make_core_params(
                params,
                vocab_size=self._vocab_size,
                seed=seed,
                max_tokens=max_tokens,
                all_stop_token_ids=stop_ids,
                bad_words_token_ids=bad_words,
                grammar_backend=self._grammar_backend,
                additional_properties=self._additional_properties,
                guard=self._make_guard(params, ids),
            ),
            options=options,
            n=params.n,
            prompt_embeds=embeds,
            mm_features=features,
            pooling=read_alignment(
                params.extra_args,
                features,
                hears=self._spec.is_encoder_decoder and self._spec.encoder_modality == "audio",
            ),
        )
        return request, text

    def process_pooling(
        self,
        request_id: str,
        prompt: Prompt,
        params: PoolingParams,
        options: RequestOptions,
        *,
        add_special_tokens: bool = True,
    ) -> tuple[EngineCoreRequest, PoolerSpec]:
        """Make the core request of a text for a pooling model; return it with its pooler.

        Args:
            request_id: an id that no live request has.
            prompt: text, token ids, or a dict with "prompt" or "prompt_token_ids". "text_pair"
                beside a text is the second text of a pair.
            params: the parameters of the result.
            options: the envelope.
            add_special_tokens: True to let the tokenizer add its special tokens.

        Raises:
            RequestError: the request is bad, or this model does not support it.
            ContextLengthError: the text is longer than the model's context.
        """
        if not isinstance(params, PoolingParams):
            raise RequestError(f"params is a {type(params).__name__}, not PoolingParams.")
        if isinstance(prompt, Mapping) and prompt.get("multi_modal_data"):
            raise UnsupportedError(
                "multi_modal_data: results of pooling are of texts only here; leave it out.",
                "multi_modal_data",
            )
        pooler, limit = self._find_pooler(params), self._max_model_len
        passed = params.as_sampling_params()
        options = _complete(options, prompt, passed, options.priority)
        text, ids = self._read_prompt(prompt)
        text = self._with_prompt(text if ids is None else None, pooler, params)
        pair = prompt.get("text_pair") if isinstance(prompt, Mapping) else None
        second = 0
        if ids is None:
            assert text is not None
            role = pooler.role(params.prompt_name)
            if role is None:
                ids, second = self._encode_text(text, pair, params, add_special_tokens)
            else:
                ids = self._encode_role(text, pair, role, params, add_special_tokens)
        elif (keep := params.truncate_prompt_tokens) is not None:
            passed = msgspec.structs.replace(
                passed, truncate_prompt_tokens=limit if keep == -1 else keep
            )
            ids = ids[self._kept(len(ids), passed)]
        self._check_ids("prompt", ids)
        if not ids:
            raise RequestError("The text is empty; give at least one token.", "prompt")
        if len(ids) > limit:
            raise ContextLengthError(
                f"This model's maximum context length is {limit} tokens; your text has {len(ids)} "
                "tokens. Shorten it or set truncate_prompt_tokens.",
                "prompt",
            )
        options = activate(options, ids)
        reads_all = pooler.reads_all or params.skip_reading_prefix_cache is True
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=ids,
            sampling_params=CoreSamplingParams(temperature=0.0, max_tokens=1),
            options=options,
            pooling=PoolingSpec(pooler.task, reads_all, self._sees_all, second, params.bare),
        )
        return request, pooler

    def windows(
        self, prompt: Prompt, params: PoolingParams, *, add_special_tokens: bool = True
    ) -> list[tuple[TokensPrompt, int]]:
        """Return the parts of a text that fit the model's context, each with its number of tokens.

        Each part has the tokenizer's special tokens, which do not count.

        Raises:
            RequestError: the prompt is no single text, or the task returns no vector.
            ContextLengthError: the text is longer than any context.
        """
        pooler = self._find_pooler(params)
        text, ids = self._read_prompt(prompt)
        pair = isinstance(prompt, Mapping) and prompt.get("text_pair") is not None
        if text is None or ids is not None or pair or pooler.task != "embed":
            raise RequestError(
                "windows is for the vectors of single texts; leave it out, or give a text.",
                "windows",
            )
        if self._tokenizer is None:
            raise RequestError(
                "windows needs a tokenizer, and none is loaded (skip_tokenizer_init).", "windows"
            )
        text = self._with_prompt(text, pooler, params)
        assert text is not None
        content = self._tokenizer.encode(text, False, MAX_TOKENS)
        first, last = self._tokenizer.special_ends() if add_special_tokens else ([], [])
        size = self._max_model_len - len(first) - len(last)
        if size < 1:
            raise RequestError(
                f"windows: the context of {self._max_model_len} tokens has no room for a text.",
                "windows",
            )
        parts = [content[i : i + size] for i in range(0, len(content), size)] or [[]]
        return [({"prompt_token_ids": first + part + last}, len(part)) for part in parts]

    def _with_prompt(
        self, text: str | None, pooler: PoolerSpec, params: PoolingParams
    ) -> str | None:
        """Return a text after the prompt that the request, or the model, names."""
        sentences, name = self._spec.sentences, params.prompt_name
        if text is not None and pooler.role(name) is not None:
            return text
        if name is None and text is not None and "embed" in pooler.task:
            name = sentences.default_prompt_name
        if not name:
            return text
        prompts = dict(sentences.prompts)
        if name not in prompts or text is None or "embed" not in pooler.task:
            known = ", ".join([*prompts, *(role.name for role in pooler.roles)]) or "no prompts"
            raise RequestError(
                f"prompt_name={name!r}: prompts are for the vectors of texts, and this model has "
                f"{known}; leave it out.",
                "prompt_name",
            )
        return prompts[name] + text

    def _tasks(self) -> str:
        return ", ".join(pooler.task for pooler in self._spec.poolers) or "nothing"

    def _find_pooler(self, params: PoolingParams) -> PoolerSpec:
        """Return the pooler of a request's task; check the parameters that depend on it."""
        poolers, model = self._spec.poolers, self._spec.architecture
        if params.task is None and poolers:
            pooler = poolers[0]
        else:
            found = next((p for p in poolers if p.task == params.task), None)
            if found is None:
                can = [*(["generate"] if self._spec.generates else []), *(p.task for p in poolers)]
                raise RequestError(
                    f"task={params.task!r}: this model ({model}) cannot do that. It can: "
                    f"{', '.join(can)}.",
                    "task",
                )
            pooler = found
        if (wanted := params.dimensions) is not None:
            if "embed" not in pooler.task:
                raise RequestError(
                    f"dimensions={wanted}: the task {pooler.task} returns no vectors; leave it "
                    "out.",
                    "dimensions",
                )
            if (reason := pooler.refusal(wanted)) is not None:
                raise RequestError(f"dimensions={wanted}: {reason}", "dimensions")
        if params.bare and pooler.task != "token_embed":
            raise RequestError(
                f"bare=True: the task {pooler.task} has no vectors of tokens; leave it out.", "bare"
            )
        if params.step_tag_id is not None and pooler.pooling != ("all",):
            raise RequestError(
                f"step_tag_id={params.step_tag_id}: the task {pooler.task} has one result for all "
                "tokens; leave it out.",
                "step_tag_id",
            )
        if params.returned_token_ids and max(params.returned_token_ids) >= pooler.size:
            raise RequestError(
                f"returned_token_ids={params.returned_token_ids}: the task {pooler.task} has "
                f"{pooler.size} classes.",
                "returned_token_ids",
            )
        return pooler

    def _encode_role(
        self,
        text: str,
        pair: object,
        role: RoleSpec,
        params: PoolingParams,
        add_special_tokens: bool,
    ) -> list[int]:
        """Return the tokens of a text of a role, cut to the role's length."""
        if pair is not None:
            raise RequestError(
                f"prompt_name={role.name!r} is for single texts; leave out 'text_pair'.",
                "prompt_name",
            )
        marker = [] if role.marker is None else [role.marker]
        size = min(role.max_tokens, self._max_model_len)
        most, keep = size - len(marker), params.truncate_prompt_tokens
        keep = most if keep is None or keep == -1 else min(keep, most)
        params = msgspec.structs.replace(params, truncate_prompt_tokens=keep)
        ids, _ = self._encode_text(text, None, params, add_special_tokens)
        ids[1:1] = marker
        return ids if role.mask is None else ids + [role.mask] * (size - len(ids))

    def _encode_text(
        self, text: str, pair: object, params: PoolingParams, add_special_tokens: bool
    ) -> tuple[list[int], int]:
        """Return the tokens of a text, or of a pair, and the index of the second text's first one.

        Truncation keeps the special tokens.
        """
        tokenizer, limit = self._tokenizer, self._max_model_len
        if tokenizer is None:
            raise RequestError(
                "No tokenizer is loaded (skip_tokenizer_init); give the prompt as token ids.",
                "prompt",
            )
        if pair is not None and not isinstance(pair, str):
            raise RequestError(f"'text_pair' is a {type(pair).__name__}, not a text.", "prompt")
        keep = params.truncate_prompt_tokens
        if keep is not None and keep > limit:
            raise RequestError(
                f"truncate_prompt_tokens={keep} is more than the model's context of {limit} "
                "tokens.",
                "truncate_prompt_tokens",
            )
        if keep is None and is_longer(text + (pair or ""), limit):
            raise ContextLengthError(
                f"This model's maximum context length is {limit} tokens; your text of "
                f"{len(text)} characters is longer. Shorten it or set truncate_prompt_tokens.",
                "prompt",
            )
        return tokenizer.encode_text(
            text,
            pair,
            add_special_tokens,
            max_tokens=None if keep is None else limit if keep == -1 else keep,
            truncation_side=params.truncation_side,
        )

    def renew(
        self, request: EngineCoreRequest, params: SamplingParams, arrival_time: float
    ) -> EngineCoreRequest:
        """Return a request of another engine as a request for this one, without deadlines.

        Args:
            request: the result of `process` there; its seed and its `max_tokens` are kept.
            params: the parameters of the answer.
            arrival_time: the new time of arrival, by `clock.now`.

        Raises:
            RequestError: this model does not support the request.
        """
        core, embeds = request.sampling_params, request.prompt_embeds
        replace = msgspec.structs.replace
        params = replace(
            params, seed=core.seed, max_tokens=core.max_tokens, truncate_prompt_tokens=None
        )
        prompt: Prompt = {"prompt_token_ids": request.prompt_token_ids}
        if self._spec.is_encoder_decoder:
            encoder: Mapping[str, object] = {"prompt_token_ids": []}
            if (read := encoder_token_ids(request.mm_features)) is not None:
                encoder = {"prompt_token_ids": read}
            elif request.mm_features:
                encoder = {"input_features": read_features(request.mm_features[0])}
            prompt = {"encoder_prompt": encoder, "decoder_prompt": prompt}
        made, _ = self.process(
            request.request_id,
            prompt,
            params,
            RequestOptions(arrival_time),
        )
        if embeds is not None:
            if not self._enable_prompt_embeds:
                raise RequestError(PROMPT_EMBEDS_OFF, "prompt_embeds")
            check_embeds(embeds, self._spec.embed_size, self._max_model_len)
            if embeds.num_tokens > len(made.prompt_token_ids):
                raise RequestError("prompt_embeds holds more than the prompt.", "prompt_embeds")
        options = replace(
            request.options, arrival_time=arrival_time, deadline=None, first_token_deadline=None
        )
        features = request.mm_features
        if self._spec.is_encoder_decoder:
            features = [scoped(feature, options.cache_salt) for feature in made.mm_features]
        else:
            for feature in features:
                self._spec.check_item(feature)
                if feature.is_embeds and not self._enable_mm_embeds:
                    assert feature.modality != "text"
                    raise RequestError(mm_embeds_off(feature.modality), "multi_modal_data")
        return replace(made, options=options, prompt_embeds=embeds, mm_features=features)

    def _read_encoder_decoder(
        self,
        prompt: Prompt,
        params: SamplingParams,
        options: RequestOptions,
        add_special_tokens: bool,
    ) -> tuple[str | None, list[int], list[MultiModalFeatureSpec]]:
        """Return the text of an encoder's input, the decoder's first tokens, and the input."""
        parts, start = read_parts(prompt), list(self._spec.decoder_start_ids)
        for part in (parts.encoder, parts.decoder):
            if isinstance(part, Mapping) and part.get("multi_modal_data"):
                raise UnsupportedError(
                    f"multi_modal_data: this model ({self._spec.architecture}) reads "
                    f"{self._spec.encoder_modality} only here; leave it out. A sound is given as "
                    "its 'input_features'; LLM.transcribe reads files.",
                    "multi_modal_data",
                )
        text, feature = self._read_encoder(parts.encoder, params, options, add_special_tokens)
        if parts.decoder is None:
            return text, start, [feature]
        of_decoder, ids = self._read_prompt(parts.decoder)
        if ids is None:
            assert of_decoder is not None
            ids = self._encode(of_decoder, params, add_special_tokens=False)
        self._check_ids("decoder_prompt", ids)
        if ids[:1] != start[:1]:  # as in transformers
            ids = start[:1] + ids
        return text, ids, [feature]

    def _read_encoder(
        self,
        prompt: Any,
        params: SamplingParams,
        options: RequestOptions,
        add_special_tokens: bool,
    ) -> tuple[str | None, MultiModalFeatureSpec]:
        """Return the text of an encoder's input, if it is one, and the input."""
        limit, salt = self._spec.max_encoder_len, options.cache_salt
        features = prompt.get("input_features") if isinstance(prompt, Mapping) else None
        if (self._spec.encoder_modality == "audio") != (features is not None):
            raise RequestError(
                f"The encoder of this model ({self._spec.architecture}) reads "
                f"{self._spec.encoder_modality}; give it as "
                + ("'input_features'." if features is None else "text or token ids."),
                "encoder_prompt",
            )
        if features is not None:
            shape, count = self._spec.encoder_frames, self._spec.num_encoder_tokens
            feature = audio_feature(features, shape, count, salt)
            self._spec.check_item(feature)
            return None, feature
        text, ids = self._read_prompt(prompt)
        if ids is None:
            assert text is not None
            keep = params.truncate_prompt_tokens
            if keep is None and is_longer(text, limit):
                raise self._encoder_too_long(f"your text of {len(text)} characters is longer")
            if self._tokenizer is None:
                raise RequestError(
                    "No tokenizer is loaded (skip_tokenizer_init); give the prompt as token ids.",
                    "prompt",
                )
            ids = self._tokenizer.encode(text, add_special_tokens, max(limit, MAX_TOKENS))
        if (keep := params.truncate_prompt_tokens) is not None:
            keep = limit if keep == -1 else keep
            ids = ids[-keep:] if params.truncation_side == "left" else ids[:keep]
        self._check_ids("encoder_prompt", ids, self._spec.encoder_vocab_size)
        if not ids:
            raise RequestError("The encoder's prompt is empty; give at least one token.", "prompt")
        if len(ids) > limit:
            raise self._encoder_too_long(f"your prompt has {len(ids)}")
        return text, text_feature(ids, salt)

    def _encoder_too_long(self, found: str) -> ContextLengthError:
        return ContextLengthError(
            f"The encoder of this model reads at most {self._spec.max_encoder_len} tokens; "
            f"{found}. Shorten it or set truncate_prompt_tokens.",
            "prompt",
        )

    def reset_mm_cache(self) -> None:
        """Forget the media that are kept by their files and uuids."""
        if self._media is not None:
            self._media.clear()

    def _read_media(
        self,
        prompt: Mapping[str, object],
        ids: list[int],
        params: SamplingParams,
        options: RequestOptions,
    ) -> tuple[list[int], list[MultiModalFeatureSpec]]:
        """Return a prompt's tokens with those of its media, and the parts of the media."""
        if self._media is None:
            raise UnsupportedError(
                f"multi_modal_data: this model ({self._spec.architecture}) reads text only here.",
                "multi_modal_data",
            )
        if params.truncate_prompt_tokens is not None:
            raise RequestError(
                "truncate_prompt_tokens would cut the media of a prompt; leave it out.",
                "truncate_prompt_tokens",
            )
        return self._media.expand(prompt, ids, options)

    def _read_embeds(self, prompt: Prompt, params: SamplingParams) -> PromptEmbeds | None:
        """Return the embeddings of a prompt of embeddings, else None."""
        tensor = prompt.get("prompt_embeds") if isinstance(prompt, Mapping) else None
        if tensor is None:
            return None
        assert isinstance(prompt, Mapping)
        if not self._enable_prompt_embeds:
            raise RequestError(PROMPT_EMBEDS_OFF, "prompt_embeds")
        if prompt.get("prompt_token_ids") is not None:
            raise UnsupportedError(
                "A prompt of both prompt_embeds and prompt_token_ids is not supported; send "
                "embeddings for all of it.",
                "prompt",
            )
        if params.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs is not available with prompt_embeds, which has no tokens. Leave "
                "it out.",
                "prompt_logprobs",
            )
        embeds = read_tensor(tensor)
        kept = self._kept(embeds.num_tokens, params)
        if kept != slice(None):
            start, stop, _ = kept.indices(embeds.num_tokens)
            embeds = msgspec.structs.replace(embeds, data=bytes(embeds.rows(start, stop)))
        check_embeds(embeds, self._spec.embed_size, self._max_model_len)
        return embeds

    def _read_prompt(self, prompt: Prompt) -> tuple[str | None, list[int] | None]:
        """Return the text and the token ids of a prompt; None for a missing one."""
        if isinstance(prompt, Mapping):
            text, ids = _read_text(prompt), prompt.get("prompt_token_ids")
            if text is None and ids is None:
                raise RequestError(
                    "A prompt dict needs 'prompt', 'prompt_token_ids' or 'prompt_embeds'.", "prompt"
                )
            return text, None if ids is None else _int_list(ids)
        if isinstance(prompt, str):
            return prompt, None
        return None, _int_list(prompt)

    def _encode(self, text: str, params: SamplingParams, add_special_tokens: bool) -> list[int]:
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise RequestError(
                "No tokenizer is loaded (skip_tokenizer_init); give the prompt as token ids.",
                "prompt",
            )
        limit = self._max_model_len
        if params.truncate_prompt_tokens is None and is_longer(text, limit):
            raise ContextLengthError(
                f"This model's maximum context length is {limit} tokens; your prompt of "
                f"{len(text)} characters is longer. Shorten it.",
                "prompt",
            )
        return tokenizer.encode(text, add_special_tokens, max(limit, MAX_TOKENS))

    def _kept(self, num_tokens: int, params: SamplingParams) -> slice:
        """Return the range of the prompt's tokens to keep."""
        keep = params.truncate_prompt_tokens
        if keep is not None and keep > self._max_model_len:
            raise RequestError(
                f"truncate_prompt_tokens={keep} is more than the model's context of "
                f"{self._max_model_len} tokens.",
                "truncate_prompt_tokens",
            )
        if keep == -1:
            keep = max(1, self._max_model_len - (params.max_tokens or 1))
        if keep is None or keep >= num_tokens:
            return slice(None)
        return slice(-keep, None) if params.truncation_side == "left" else slice(keep)

    def _max_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Return the most tokens of the answer: `max_tokens`, limited by the context."""
        limit = self._max_model_len
        if num_prompt_tokens == 0:
            raise RequestError("The prompt is empty; give at least one token.", "prompt")
        left = limit - num_prompt_tokens
        if left < 1:
            raise ContextLengthError(
                f"This model's maximum context length is {limit} tokens; your prompt has "
                f"{num_prompt_tokens} tokens, which leaves no room for an answer. Shorten the "
                "prompt or set truncate_prompt_tokens.",
                "prompt",
            )
        if params.min_tokens > left:
            raise ContextLengthError(
                f"This model's maximum context length is {limit} tokens; your prompt has "
                f"{num_prompt_tokens} tokens, which leaves {left}, fewer than "
                f"min_tokens={params.min_tokens}.",
                "min_tokens",
            )
        return left if params.max_tokens is None else min(params.max_tokens, left)

    def _check_params(self, params: SamplingParams) -> None:
        _check_unicode("stop", params.stop)
        _check_unicode("bad_words", params.bad_words or [])
        self._check_num_logprobs("logprobs", params.logprobs)
        self._check_num_logprobs("prompt_logprobs", params.prompt_logprobs)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logprob_token_ids", params.logprob_token_ids or ())
        self._check_ids("logit_bias", params.logit_bias or ())
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        if self._tokenizer is None:
            for name in ("stop", "bad_words", "structured_outputs"):
                if getattr(params, name):
                    raise RequestError(
                        f"{name} needs a tokenizer, and none is loaded (skip_tokenizer_init).", name
                    )

    def _check_num_logprobs(self, name: str, asked: int | None) -> None:
        if asked is None:
            return
        highest = self._vocab_size if self._max_logprobs == -1 else self._max_logprobs
        if (self._vocab_size if asked == -1 else asked) > highest:
            raise RequestError(
                f"{name}={asked} is more than this server allows: {highest} (max_logprobs).", name
            )

    def _check_ids(self, name: str, ids: Iterable[int], vocab_size: int | None = None) -> None:
        """Check token ids; `vocab_size` replaces the model's."""
        vocab_size = vocab_size or self._vocab_size
        highest, lowest = max(ids, default=0), min(ids, default=0)
        if lowest < 0 or highest >= vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise RequestError(
                f"{name} holds the token id {wrong}, which is out of vocabulary: this model has "
                f"{vocab_size} tokens.",
                name,
            )

    def _encode_bad_words(self, words: list[str]) -> list[list[int]]:
        """Return the token sequences of each word, at the start of a text and after a space."""
        if not words:
            return []
        assert self._tokenizer is not None  # checked before
        bare = [word.lstrip() or word for word in words]
        forms = [form for word in bare for form in (word, " " + word)]
        sequences = dict.fromkeys(tuple(ids) for ids in self._tokenizer.encode_all(forms) if ids)
        for ids in sequences:
            self._check_ids("bad_words", ids)
        return [list(ids) for ids in sequences]

    def _make_guard(self, params: SamplingParams, prompt: list[int]) -> GuardSpec | None:
        """Return the limits of an answer's reasoning and repetition; None: it has none."""
        budget, repetition = params.thinking_token_budget, params.repetition_guard or "off"
        if budget is None and repetition == "off":
            return None
        begin: tuple[int, ...] = ()
        end: tuple[int, ...] = ()
        thinks = False
        if params.reasoning_markers is not None and self._tokenizer is not None:
            begin, end = self._find_markers(params.reasoning_markers)
            tail = self._tokenizer.decode(prompt[-_MARKER_TOKENS:]).rstrip()
            thinks = bool(end) and tail.endswith(params.reasoning_markers[0].rstrip())
        if budget is not None and not end:
            reason = (
                "the end of this model's reasoning is no token of its own"
                if params.reasoning_markers is not None
                else "this model's chat template shows no reasoning"
            )
            raise RequestError(
                f"thinking_token_budget={budget} is not available: {reason}. Leave it out, and use "
                "max_tokens.",
                "thinking_token_budget",
            )
        return GuardSpec(begin, end, thinks, budget, repetition)

    def _find_markers(self, markers: tuple[str, str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return `marker_tokens` of the texts before and after reasoning."""
        found = self._markers.get(markers)
        if found is None:
            assert self._tokenizer is not None
            if len(self._markers) >= _MAX_MARKERS:
                self._markers.clear()
            found = self._markers[markers] = marker_tokens(self._tokenizer, markers)
        return found

    def _derive_seed(self, request_id: str) -> int:
        """Return the seed of a request without one; it depends only on id and model seed."""
        digest = hashlib.blake2b(f"{self._seed}:{request_id}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


def _read_text(prompt: Mapping[str, object]) -> str | None:
    """Return the text in a prompt's dict."""
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


def _check_unicode(name: str, texts: Iterable[str]) -> None:
    """Reject lone surrogates, which no message can contain."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RequestError(
                f"{name} is not valid Unicode (it holds a lone surrogate); send valid UTF-8.",
                name,
                "invalid_unicode",
            ) from None


def _complete(
    options: RequestOptions, prompt: Prompt, params: SamplingParams, priority: int
) -> RequestOptions:
    """Return the envelope with the priority, the salt and the transfer parameters of a request.

    The salt of prompt or parameters divides the envelope's existing scope.

    Raises:
        RequestError: the salt or the transfer parameters are bad.
    """
    salt, scope = _read_salt(prompt) or params.cache_salt, options.cache_salt
    if salt and params.cache_salt and salt != params.cache_salt:
        raise RequestError(
            "cache_salt of the prompt and cache_salt of the parameters differ; set only one.",
            "cache_salt",
        )
    _check_salts([scope or "", salt or ""])
    return msgspec.structs.replace(
        options,
        priority=priority,
        cache_salt=_join_salts(scope, salt),
        kv_transfer_params=_transfer_params(params),
    )


def _check_salts(salts: list[str]) -> None:
    _check_unicode("cache_salt", salts)
    if (length := max(map(len, salts))) > MAX_CACHE_SALT_LENGTH:
        raise RequestError(
            f"cache_salt has {length} characters; at most {MAX_CACHE_SALT_LENGTH} are allowed.",
            "cache_salt",
        )


def _read_salt(prompt: Prompt) -> str | None:
    """Return the salt in a prompt's dict, or None."""
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    if salt is not None and not isinstance(salt, str):
        raise RequestError(f"cache_salt is a {type(salt).__name__}; give a text.", "cache_salt")
    return salt


def _join_salts(scope: str | None, salt: str | None) -> str | None:
    """Join two salts into one, so that different pairs have different results."""
    if not scope and not salt:
        return None
    scope = scope or ""
    return f"{len(scope)}:{scope}{salt or ''}"


def _transfer_params(params: SamplingParams) -> dict[str, Any] | None:
    """Return the request's parameters for the KV connector, or None.

    Raises:
        RequestError: they are not a dict, or the request has several answers.
    """
    found = (params.extra_args or {}).get(KV_TRANSFER_PARAMS)
    if found is None:
        return None
    if not isinstance(found, dict):
        raise RequestError("kv_transfer_params does not map names to values.", KV_TRANSFER_PARAMS)
    if params.n != 1:
        raise RequestError(
            f"kv_transfer_params supports only one answer, but n={params.n}; leave n out.",
            "n",
        )
    return found
