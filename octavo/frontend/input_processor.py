"""Conversion of a caller's prompt and parameters into checked requests for the engine core.

A request is checked on arrival; what is wrong raises typed errors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from octavo.config import ModelConfig
from octavo.errors import ContextLengthError, RequestError, UnsupportedError
from octavo.frontend.activation import activate
from octavo.frontend.core_params import make_core_params
from octavo.frontend.encoder_prompt import (
    EncoderPrompts,
    encoder_token_ids,
    read_alignment,
    read_features,
    scoped,
)
from octavo.frontend.guards import Guards
from octavo.frontend.input_spec import InputSpec
from octavo.frontend.media_embeds import mm_embeds_off
from octavo.frontend.pooling_inputs import PoolingInputs
from octavo.frontend.prompt_embeds import PROMPT_EMBEDS_OFF, check_embeds, read_tensor
from octavo.frontend.prompt_tokens import PromptTokens
from octavo.frontend.prompts import Prompt, check_unicode, read_prompt, read_text
from octavo.frontend.request_options import complete_options
from octavo.messages import (
    EngineCoreRequest,
    MultiModalFeatureSpec,
    PromptEmbeds,
    RequestOptions,
)
from octavo.sampling_params import SamplingParams
from octavo.system.offload import pieces
from octavo.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.frontend.prompt_media import PromptMedia


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
        self._spec, self._max_model_len = spec, max_model_len
        self._tokens = PromptTokens(tokenizer, spec.vocab_size, max_model_len)
        self._encoder_prompts = EncoderPrompts(spec, self._tokens)
        self._guards = Guards(tokenizer)
        self.pooling = PoolingInputs(spec, self._tokens)
        """Checker of requests for vectors and scores."""
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
            options: the envelope; `complete_options` adds the options in the prompt and the
                parameters.
            add_special_tokens: True to let the tokenizer add its special tokens to a text prompt;
                False for a rendered chat template.

        Raises:
            RequestError: the request is bad, or this model does not support it.
            ContextLengthError: the prompt leaves no room for an answer, or for `min_tokens`.
        """
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params is a {type(params).__name__}, not SamplingParams.")
        if not self._spec.generates:
            tasks = ", ".join(pooler.task for pooler in self._spec.poolers) or "nothing"
            raise RequestError(
                f"This model ({self._spec.architecture}) generates no text. It can: {tasks}.",
                "model",
            )
        self._check_params(params)
        options = complete_options(options, prompt, params, params.priority)
        features: list[MultiModalFeatureSpec] = []
        bad_words = self._encode_bad_words(params.bad_words or [])
        embeds = self._read_embeds(prompt, params)
        if self._spec.is_encoder_decoder:
            text, ids, features = self._encoder_prompts.read(
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
            text, ids = read_text(prompt), [0] * embeds.num_tokens
        else:
            text, given = read_prompt(prompt)
            if given is None:
                assert text is not None
                given = self._tokens.encode(text, params, add_special_tokens)
            for piece in pieces(given):
                self._tokens.check_ids("prompt", piece)
            ids = given[self._tokens.kept(len(given), params)]
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
                guard=self._guards.make(params, ids),
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
        kept = self._tokens.kept(embeds.num_tokens, params)
        if kept != slice(None):
            start, stop, _ = kept.indices(embeds.num_tokens)
            embeds = msgspec.structs.replace(embeds, data=bytes(embeds.rows(start, stop)))
        check_embeds(embeds, self._spec.embed_size, self._max_model_len)
        return embeds

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
        check_unicode("stop", params.stop)
        check_unicode("bad_words", params.bad_words or [])
        self._check_num_logprobs("logprobs", params.logprobs)
        self._check_num_logprobs("prompt_logprobs", params.prompt_logprobs)
        self._tokens.check_ids("stop_token_ids", params.stop_token_ids)
        self._tokens.check_ids("logprob_token_ids", params.logprob_token_ids or ())
        self._tokens.check_ids("logit_bias", params.logit_bias or ())
        self._tokens.check_ids("allowed_token_ids", params.allowed_token_ids or ())
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

    def _encode_bad_words(self, words: list[str]) -> list[list[int]]:
        """Return the token sequences of each word, at the start of a text and after a space."""
        if not words:
            return []
        assert self._tokenizer is not None  # checked before
        bare = [word.lstrip() or word for word in words]
        forms = [form for word in bare for form in (word, " " + word)]
        sequences = dict.fromkeys(tuple(ids) for ids in self._tokenizer.encode_all(forms) if ids)
        for ids in sequences:
            self._tokens.check_ids("bad_words", ids)
        return [list(ids) for ids in sequences]

    def _derive_seed(self, request_id: str) -> int:
        """Return the seed of a request without one; it depends only on id and model seed."""
        digest = hashlib.blake2b(f"{self._seed}:{request_id}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1
