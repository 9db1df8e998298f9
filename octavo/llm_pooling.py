"""Offline vectors and scores: the methods of vLLM's `LLM` for pooling models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from octavo.errors import RequestError
from octavo.frontend.adapters import LoRARequests
from octavo.frontend.llm_engine import LLMEngine
from octavo.frontend.pooling import (
    find_comparison,
    pooling_output,
    windows_output,
    with_result,
)
from octavo.frontend.prompts import Prompt
from octavo.messages import AdapterRef
from octavo.models.blocks.pooler import PoolerSpec
from octavo.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from octavo.pooling_params import PoolingParams
from octavo.text.tokenizer import Tokenizer

Params = PoolingParams | Sequence[PoolingParams] | None


class PoolingMethods(ABC):
    """Methods of `LLM` that return vectors or scores instead of answers."""

    llm_engine: LLMEngine
    _chat_template: str | None

    @abstractmethod
    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer."""

    @abstractmethod
    def _run(self, starts: Sequence[Callable[[], str]], *, use_tqdm: Any) -> list[RequestOutput]:
        """Start requests, each by a call that returns its id, and wait for all of them."""

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: Params = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequests = None,
        pooling_task: str | None = None,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the result of each text, in the order of the texts.

        Args:
            prompts: one prompt or a list: texts, or dicts with "prompt" or "prompt_token_ids". A
                "text_pair" beside "prompt" is the second text of a pair.
            pooling_params: one for all or one for each; None: the defaults.
            use_tqdm: True for a progress bar, or a function that makes one, as `tqdm` does.
            lora_request: an adapter for all texts, or one for each (None: the model alone); with
                `enable_lora`.
            pooling_task: one of `PoolingTask`; None: that of the parameters, or the model's first.
            truncate_prompt_tokens: as in `PoolingParams`, for all texts.
            tokenization_kwargs: `truncate_prompt_tokens` and `add_special_tokens`.

        Raises:
            RequestError: a prompt or a parameter is wrong, or a request fails.
        """
        texts = as_list(prompts)
        given = pooling_params or PoolingParams()
        params = [given] * len(texts) if isinstance(given, PoolingParams) else list(given)
        if len(params) != len(texts):
            raise ValueError(
                f"There are {len(texts)} prompts and {len(params)} pooling parameters; give one "
                "for all or one for each."
            )
        options = dict(tokenization_kwargs or {})
        special = bool(options.pop("add_special_tokens", True))
        keep = options.pop("truncate_prompt_tokens", truncate_prompt_tokens)
        if options:
            raise RequestError(
                f"tokenization_kwargs has {', '.join(options)}; only truncate_prompt_tokens and "
                "add_special_tokens are supported.",
                "tokenization_kwargs",
            )
        changes = {"task": pooling_task, "truncate_prompt_tokens": keep}
        changes = {name: value for name, value in changes.items() if value is not None}
        params = _changed(params, **changes)
        whole = _changed(params, windows=False)
        passed = {id(its): its.as_sampling_params() for its in whole}
        poolers: list[PoolerSpec] = []

        adapters = self.llm_engine.adapters.resolve_each(lora_request, len(texts))

        def start(prompt: Prompt, its_params: PoolingParams, adapter: AdapterRef | None) -> str:
            request, pooler = self.llm_engine.process_pooling(
                prompt, its_params, add_special_tokens=special, adapter=adapter
            )
            poolers.append(pooler)
            return self.llm_engine.start(request, passed[id(its_params)], None)

        divide = self.llm_engine.input_processor.pooling.windows
        parts: list[list[tuple[Prompt, int]]] = [
            [*divide(text, its, add_special_tokens=special)] if its.windows else [(text, 1)]
            for text, its in zip(texts, params, strict=True)
        ]
        starts = [
            partial(start, part, its, adapter)
            for its_parts, its, adapter in zip(parts, whole, adapters, strict=True)
            for part, _ in its_parts
        ]
        outputs = self._run(starts, use_tqdm=use_tqdm)
        for output in outputs:
            if output.pooled is None:
                raise RequestError(str(output.outputs[0].stop_reason))
        results, rest = [], iter(zip(outputs, poolers, strict=True))
        for its_parts, its in zip(parts, params, strict=True):
            found = [next(rest) for _ in its_parts]
            (first, pooler), weights = found[0], [weight for _, weight in its_parts]
            if its.windows:
                results.append(windows_output([o for o, _ in found], weights, pooler, its))
            else:
                results.append(pooling_output(first, pooler, its))
        return results

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: Params = None,
        lora_request: LoRARequests = None,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the vector of each text; arguments and errors as for `encode`."""
        outputs = self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task="embed",
            truncate_prompt_tokens=truncate_prompt_tokens,
            tokenization_kwargs=tokenization_kwargs,
        )
        return [with_result(it, EmbeddingOutput(it.outputs.data.tolist())) for it in outputs]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: Params = None,
        lora_request: LoRARequests = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Return the scores of the classes for each text; arguments and errors as for `encode`."""
        outputs = self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task="classify",
            tokenization_kwargs=tokenization_kwargs,
        )
        return [with_result(it, ClassificationOutput(it.outputs.data.tolist())) for it in outputs]

    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        /,
        pooling_params: Params = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequests = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the rewards of each text, of all tokens if the model scores tokens.

        Arguments and errors as for `encode`.
        """
        tasks = [pooler.task for pooler in self.llm_engine.spec.poolers]
        task = "token_classify" if "token_classify" in tasks else "classify"
        return self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task=task,
            tokenization_kwargs=tokenization_kwargs,
        )

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequests = None,
        chat_template: str | None = None,
        instruction: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return the score of each pair of texts.

        A reranker reads both texts together, in its template if it has one. The score of a model of
        vectors is the similarity of the two vectors that its files name, the cosine by default;
        that of a late-interaction model is MaxSim of their tokens' vectors.

        Args:
            data_1: one text for all of `data_2`, or as many texts.
            data_2: one text or several.
            truncate_prompt_tokens: as in `PoolingParams`.
            pooling_params: parameters of all pairs.
            use_tqdm: as for `encode`.
            lora_request: an adapter for all texts.
            chat_template: a template, or its file, for messages of the roles query and document;
                None: that of `LLM`, or the model's.
            instruction: task of the reranker, for its template; None: the template's own.

        Raises:
            RequestError: the numbers of texts do not fit, this model has no scores of pairs, or no
                template for an instruction.
        """
        first = [data_1] if isinstance(data_1, str) else list(data_1)
        second = [data_2] if isinstance(data_2, str) else list(data_2)
        if len(first) == 1:
            first *= len(second)
        if len(first) != len(second) or not second:
            raise RequestError(
                f"There are {len(first)} and {len(second)} texts; give one for all or one for "
                "each, and at least one.",
                "data_1",
            )
        spec = self.llm_engine.spec
        options: dict[str, Any] = {
            "use_tqdm": use_tqdm,
            "lora_request": lora_request,
            "truncate_prompt_tokens": truncate_prompt_tokens,
        }
        scorer = spec.pooler("classify")
        if scorer is not None and scorer.size == 1:
            pairs = self._pairs(first, second, chat_template, instruction)
            outputs = self.encode(pairs, pooling_params, pooling_task="classify", **options)
            return [with_result(it, ScoringOutput(float(it.outputs.data[0]))) for it in outputs]
        comparison = find_comparison(spec.poolers, spec.sentences)
        if comparison is None:
            can = ", ".join(pooler.task for pooler in spec.poolers) or "generate"
            raise RequestError(
                f"This model ({spec.architecture}) has no scores of pairs. It can: {can}."
            )
        if instruction is not None:
            raise _without_template("is a model of vectors")
        task, compare, roles = comparison
        params = pooling_params or PoolingParams()
        named = [params.prompt_name or role for role in roles]
        pairs_of_texts = [
            ((a, named[0]), (b, named[1])) for a, b in zip(first, second, strict=True)
        ]
        texts = list(dict.fromkeys(text for pair in pairs_of_texts for text in pair))
        each = [msgspec.structs.replace(params, prompt_name=name) for _, name in texts]
        outputs = self.encode([text for text, _ in texts], each, pooling_task=task, **options)
        vectors = dict(zip(texts, outputs, strict=True))
        results = []
        for a, b in pairs_of_texts:
            left, right = vectors[a], vectors[b]
            ids = left.prompt_token_ids + right.prompt_token_ids
            score = ScoringOutput(compare(left.outputs.data, right.outputs.data))
            results.append(with_result(right, score, ids))
        return results

    def _pairs(
        self,
        first: Sequence[str],
        second: Sequence[str],
        chat_template: str | None,
        instruction: str | None,
    ) -> list[Prompt]:
        """Return the prompts of pairs for a reranker."""
        from octavo.text.pair_template import PairTemplate  # imports Jinja

        template = PairTemplate.find(self.get_tokenizer(), chat_template or self._chat_template)
        pairs = zip(first, second, strict=True)
        if template is None:
            if instruction is not None:
                raise _without_template("has no template with the roles query and document")
            return [{"prompt": a, "text_pair": b} for a, b in pairs]
        return [text.result() for text in [template.submit(a, b, instruction) for a, b in pairs]]


def _without_template(why: str) -> RequestError:
    return RequestError(f"instruction: this model {why}; leave it out.", "instruction")


def _changed(params: Sequence[PoolingParams], **changes: Any) -> list[PoolingParams]:
    """Return changed copies; parameters that are one object stay one."""
    given = {id(its): its for its in params}
    copies = {key: msgspec.structs.replace(its, **changes) for key, its in given.items()}
    return [copies[id(its)] for its in params]


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or several as a list: a string, a dict and a list of token ids are one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(
            f"prompts is a {type(prompts).__name__}; give a text, a list of token ids, a dict, or "
            "a list of these.",
            "prompts",
        )
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]  # a list of ids: mypy cannot narrow it
    return list(prompts)  # type: ignore[arg-type]  # nor that these are prompts
