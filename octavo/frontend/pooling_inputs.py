"""Conversion of a caller's text and parameters into requests for pooling models."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from octavo.errors import ContextLengthError, RequestError, UnsupportedError
from octavo.frontend.activation import activate
from octavo.frontend.input_spec import InputSpec
from octavo.frontend.prompt_tokens import PromptTokens
from octavo.frontend.prompts import Prompt, TokensPrompt, read_prompt
from octavo.frontend.request_options import complete_options
from octavo.messages import CoreSamplingParams, EngineCoreRequest, PoolingSpec, RequestOptions
from octavo.models.blocks.pooler import PoolerSpec, RoleSpec
from octavo.pooling_params import PoolingParams
from octavo.text.tokenizer import MAX_TOKENS, is_longer


class PoolingInputs:
    """Checker of requests for a model that returns vectors or scores; adds token ids.

    Args:
        spec: the model.
        tokens: encoder and checker of its tokens.
    """

    def __init__(self, spec: InputSpec, tokens: PromptTokens) -> None:
        self._spec, self._tokens = spec, tokens

    def process(
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
        pooler, limit = self._find_pooler(params), self._tokens.max_model_len
        passed = params.as_sampling_params()
        options = complete_options(options, prompt, passed, options.priority)
        text, ids = read_prompt(prompt)
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
            ids = ids[self._tokens.kept(len(ids), passed)]
        self._tokens.check_ids("prompt", ids)
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
            pooling=PoolingSpec(pooler.task, reads_all, self._spec.sees_all, second, params.bare),
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
        text, ids = read_prompt(prompt)
        pair = isinstance(prompt, Mapping) and prompt.get("text_pair") is not None
        if text is None or ids is not None or pair or pooler.task != "embed":
            raise RequestError(
                "windows is for the vectors of single texts; leave it out, or give a text.",
                "windows",
            )
        tokenizer = self._tokens.tokenizer
        if tokenizer is None:
            raise RequestError(
                "windows needs a tokenizer, and none is loaded (skip_tokenizer_init).", "windows"
            )
        text = self._with_prompt(text, pooler, params)
        assert text is not None
        content = tokenizer.encode(text, False, MAX_TOKENS)
        first, last = tokenizer.special_ends() if add_special_tokens else ([], [])
        size = self._tokens.max_model_len - len(first) - len(last)
        if size < 1:
            raise RequestError(
                f"windows: the context of {self._tokens.max_model_len} tokens has no room for a "
                "text.",
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
        size = min(role.max_tokens, self._tokens.max_model_len)
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
        tokenizer, limit = self._tokens.require_tokenizer(), self._tokens.max_model_len
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
