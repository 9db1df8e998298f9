"""Beam search: the best continuations by the sum of their tokens' logprobs.

`BeamSearch` makes the decisions, independently of engines. Its caller requests one token of each
live beam from the engine, step by step (`beam_requests`), and passes the candidates to
`BeamSearch.step`. These are ordinary requests: they queue like all others, and end after their
token, so no resources are held between two steps. The prefix cache holds the common prefix of a
beam and its parent, except the last block: each beam computes up to a block's tokens in each step.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from heapq import nlargest
from typing import Any, TypeVar

import msgspec

from octavo.errors import SleepError
from octavo.frontend.request_memory import request_nbytes
from octavo.messages import EngineCoreRequest
from octavo.models.spec import ModelSpec
from octavo.outputs import CompletionOutput, FlatLogprobs, RequestOutput
from octavo.sampling.logits_processors.repeated_ngrams import KEY as NGRAM_KEY
from octavo.sampling.logits_processors.repeated_ngrams import NGrams
from octavo.sampling_params import (
    BeamSearchParams,
    RequestOutputKind,
    SamplingParams,
    fill_defaults,
)
from octavo.text.detokenizer import IncrementalDetokenizer
from octavo.text.tokenizer import Tokenizer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Beam:
    """Continuation of the prompt."""

    token_ids: list[int]
    """Tokens, including the end-of-sequence token that ended the beam."""
    cum_logprob: float
    rows: list[FlatLogprobs]
    """Candidates of each token: one position each."""
    finish_reason: str | None = None
    """"stop" or "length"; None while the beam is live."""


@dataclass(frozen=True)
class BeamRules:
    """Rules of the tokens of beams, as in transformers: they change no other token's logprob."""

    prompt_token_ids: tuple[int, ...] = ()
    """Tokens before the beams, which sequences of tokens may not repeat either."""
    num_counted: int = 0
    """Number of the last of them that count in the length of a beam."""
    min_tokens: int = 0
    """Least tokens of a beam that ends."""
    no_repeat_ngram_size: int = 0
    """Tokens of a sequence that occurs once only; 0: all may occur again."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that no beam contains."""
    forced_eos_token_id: int | None = None
    """Token with which a beam that has the most tokens ends; as in transformers, the beam's only
    candidate there, with the logprob 0."""

    def banned(self, token_ids: Sequence[int], eos_token_ids: Collection[int]) -> set[int]:
        """Return the tokens that may not continue a beam.

        Args:
            token_ids: tokens of the beam.
            eos_token_ids: tokens that end a beam.
        """
        found = set(eos_token_ids) if len(token_ids) < self.min_tokens else set[int]()
        if self.no_repeat_ngram_size:
            known = [*self.prompt_token_ids, *token_ids]
            found.update(NGrams(self.no_repeat_ngram_size, known).banned().tolist())
        for *before, last in self.bad_words:
            start = len(token_ids) - len(before)
            if start >= 0 and before == token_ids[start:]:
                found.add(last)
        return found

    def most_banned(self, max_tokens: int, num_eos: int) -> int:
        """Return the maximum number of tokens that `banned` returns."""
        repeated = len(self.prompt_token_ids) + max_tokens if self.no_repeat_ngram_size else 0
        return len(self.bad_words) + repeated + (num_eos if self.min_tokens else 0)


class BeamSearch:
    """Beams of one prompt, chosen as transformers' `generate(num_beams=...)` does.

    The best `beam_width` unfinished continuations of the live beams stay live. A finished one is
    kept if it is among the best `beam_width` of all continuations. The kept ones with the highest
    scores remain. The score is the sum of logprobs / number of tokens ** `length_penalty`.

    Args:
        params: parameters of the search.
        max_tokens: maximum tokens of a beam; at least 1.
        eos_token_ids: tokens that end a beam.
        vocab_size: width of the model's logits.
        rules: rules of the beams' tokens.
    """

    def __init__(
        self,
        params: BeamSearchParams,
        max_tokens: int,
        eos_token_ids: Collection[int],
        vocab_size: int,
        rules: BeamRules = BeamRules(),
    ) -> None:
        self.width = params.beam_width
        self._length_penalty = params.length_penalty
        self._early_stopping = params.early_stopping
        self._max_tokens = max_tokens
        self._eos_token_ids = frozenset(eos_token_ids)
        self._vocab_size, self._rules = vocab_size, rules
        self.live = [Beam([], 0.0, [])]
        """Beams to continue, the best first; empty when the search is over."""
        self._banned = self._find_banned()
        """Tokens that may not continue each of them."""
        self._finished: list[tuple[float, Beam]] = []
        """Pairs (score, beam), the best first."""

    @property
    def beams(self) -> list[Beam]:
        """Finished beams, the one with the highest score first."""
        return [beam for _, beam in self._finished]

    @property
    def num_logprobs(self) -> int:
        """Number of candidates that `step` needs of each live beam."""
        return self._count(max(map(len, self._banned), default=0))

    @property
    def max_num_logprobs(self) -> int:
        """Maximum of `num_logprobs` in all steps."""
        return self._count(self._rules.most_banned(self._max_tokens, len(self._eos_token_ids)))

    def _count(self, num_banned: int) -> int:
        # No more of one beam can be among the best that continue, or among the best of all.
        return min(self.width + len(self._eos_token_ids) + num_banned, self._vocab_size)

    def _find_banned(self) -> list[set[int]]:
        return [self._rules.banned(beam.token_ids, self._eos_token_ids) for beam in self.live]

    def step(self, rows: Sequence[FlatLogprobs]) -> None:
        """Continue each live beam by a token.

        Args:
            rows: one position for each of `live`, in order, with the `num_logprobs` most probable
                tokens.
        """
        width, length = self.width, len(self.live[0].token_ids) + 1
        forced = self._rules.forced_eos_token_id
        if forced in self._eos_token_ids and length == self._max_tokens:
            found = [(beam.cum_logprob, -i, -forced) for i, beam in enumerate(self.live)]
            rows = [_certain(forced, row) for row in rows]
        else:
            found = [
                (beam.cum_logprob + logprob, -i, -token_id)
                for i, (beam, row) in enumerate(zip(self.live, rows, strict=True))
                for token_id, logprob in zip(*row.candidates(0), strict=True)
                if token_id not in self._banned[i]
            ]
        live: list[Beam] = []
        # Upper bound of the needed candidates, if all that may end do.
        num_needed = width * (1 + len(self._eos_token_ids))
        for place, (cum_logprob, i, token_id) in enumerate(nlargest(num_needed, found)):
            token_id, parent, row = -token_id, self.live[-i], rows[-i]
            reason = None
            if token_id in self._eos_token_ids:
                reason = "stop"
            elif length == self._max_tokens:
                reason = "length"
            if reason is None and len(live) == width:
                break
            if reason is not None and place >= width:
                continue
            beam = Beam([*parent.token_ids, token_id], cum_logprob, [*parent.rows, row], reason)
            if reason is None:
                live.append(beam)
            else:
                self._finished.append((self._score(cum_logprob, length), beam))
        self._finished.sort(key=lambda item: -item[0])  # of equal scores the earlier stays first
        del self._finished[width:]
        self.live = [] if self._is_over(live, length) else live
        self._banned = self._find_banned()

    def _is_over(self, live: list[Beam], length: int) -> bool:
        """Return True if no live beam can improve the result."""
        if not live:
            return True
        if len(self._finished) < self.width:
            return False
        if self._early_stopping is True:
            return True
        if self._early_stopping == "never" and self._length_penalty > 0:
            length = self._max_tokens  # the length of the best possible score
        return self._score(live[0].cum_logprob, length) <= self._finished[-1][0]

    def _score(self, cum_logprob: float, length: int) -> float:
        return cum_logprob / math.pow(length + self._rules.num_counted, self._length_penalty)


def _certain(token_id: int, row: FlatLogprobs) -> FlatLogprobs:
    """Return one position whose only candidate is a token, with the texts of `row`."""
    certain = FlatLogprobs(row.text_of)
    certain.append_rows(
        array("i", [token_id]).tobytes(), array("f", [0.0]).tobytes(), array("i", [1]).tobytes()
    )
    return certain


def prompt_params(params: BeamSearchParams, spec: ModelSpec) -> SamplingParams:
    """Return the parameters for processing the prompt; see `InputProcessor.process`.

    The model's rules of its answers apply to beams, too.
    """
    rules = {k: v for k, v in spec.generation_config.items() if k in ("min_tokens", "extra_args")}
    given = {
        "temperature": 0.0,
        "max_tokens": params.max_tokens,
        "ignore_eos": params.ignore_eos,
        "include_stop_str_in_output": params.include_stop_str_in_output,
    }
    return SamplingParams(**fill_defaults(given, rules))


def step_params(search: BeamSearch) -> SamplingParams:
    """Return the parameters of `beam_requests`."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        logprobs=search.num_logprobs,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def make_beam_search(
    params: BeamSearchParams, request: EngineCoreRequest, spec: ModelSpec
) -> BeamSearch:
    """Return the search for the continuations of a processed prompt."""
    core = request.sampling_params
    rules = BeamRules()
    if spec.is_encoder_decoder:
        ids = tuple(request.prompt_token_ids)
        rules = BeamRules(
            ids,
            # transformers counts the token after the start, such as a language, if it is forced.
            1 if len(ids) == 2 else 0,
            core.min_tokens,
            (core.extra_args or {}).get(NGRAM_KEY, 0),
            spec.bad_words_ids,
            spec.beams.forced_eos_token_id,
        )
    stops = core.all_stop_token_ids
    return BeamSearch(params, core.max_tokens, stops, spec.vocab_size, rules)


def beam_requests(request: EngineCoreRequest, search: BeamSearch) -> list[EngineCoreRequest]:
    """Return a request for one more token for each live beam.

    The users' limit of candidates (`max_logprobs`) does not apply to these requests.

    Args:
        request: request of the prompt, made with `prompt_params`.
        search: a search that is not over.
    """
    replace, options = msgspec.structs.replace, request.options
    step = len(search.live[0].token_ids)
    if step:
        options = replace(options, first_token_deadline=None)
    params = replace(
        request.sampling_params,
        max_tokens=1,
        logprobs=search.num_logprobs,
        all_stop_token_ids=frozenset(),
        # The search itself applies the rules to the candidates.
        min_tokens=0,
        bad_words=None,
        extra_args=None,
    )
    return [
        replace(
            request,
            # No other request's id has a dot before an underscore.
            request_id=f"{step}.{i}_{request.request_id}",
            prompt_token_ids=request.prompt_token_ids + beam.token_ids,
            sampling_params=params,
            options=replace(options, turn=options.turn + i),
        )
        for i, beam in enumerate(search.live)
    ]


def candidates_of(output: RequestOutput) -> FlatLogprobs:
    """Return the candidates in an answer to one of `beam_requests`, for `BeamSearch.step`.

    Raises:
        SleepError: the engine was put to sleep, which ended the request.
    """
    if output.outputs[0].finish_reason == "abort":
        raise SleepError("The engine was put to sleep before the search was complete.")
    rows = output.outputs[0].logprobs
    assert isinstance(rows, FlatLogprobs)
    return rows


def beam_search_nbytes(request: EngineCoreRequest, search: BeamSearch, vocab_size: int) -> int:
    """Return the maximum bytes of a search: equal numbers of live and finished beams."""
    params = step_params(search)
    core = msgspec.structs.replace(request.sampling_params, logprobs=search.max_num_logprobs)
    whole = msgspec.structs.replace(request, n=2 * search.width, sampling_params=core)
    embeds = request.prompt_embeds
    # Each live beam's request sends the embeddings again.
    sent = 0 if embeds is None else search.width * 2 * embeds.nbytes
    items = (t for feature in request.mm_features for t in feature.data.values())
    sent += search.width * 2 * sum(len(tensor.data) for tensor in items)
    return request_nbytes(whole, params, vocab_size) + sent


async def run_beam_search(
    request: EngineCoreRequest,
    prompt: str | None,
    search: BeamSearch,
    params: SamplingParams,
    tokenizer: Tokenizer | None,
    stream: Callable[[EngineCoreRequest, SamplingParams], AsyncGenerator[RequestOutput, None]],
) -> RequestOutput:
    """Run a search on an engine with asyncio; its cancellation ends all its requests.

    Args:
        request: request of the prompt.
        prompt: the prompt as text, if it was text.
        search: a search without a step.
        params: `prompt_params`.
        tokenizer: None for answers without text.
        stream: sends a request to the engine; closing the stream aborts it.

    Returns:
        The finished beams as answers, the best first.

    Raises:
        RequestError: one of its requests fails.
        EngineDeadError: the engine has ended.
    """
    its_params, num_cached_tokens = step_params(search), 0

    async def last_output(beam: EngineCoreRequest) -> RequestOutput:
        async with aclosing(stream(beam, its_params)) as outputs:
            return [output async for output in outputs][-1]

    while search.live:
        first = not search.live[0].token_ids
        outputs = await _all([last_output(beam) for beam in beam_requests(request, search)])
        if first:
            num_cached_tokens = outputs[0].num_cached_tokens
        search.step([candidates_of(output) for output in outputs])
    completions = []
    for index, beam in enumerate(search.beams):
        detokenizer = IncrementalDetokenizer(tokenizer, request.known_token_ids, params)
        detokenizer.update(beam.token_ids, beam.finish_reason == "stop")
        detokenizer.finish()
        completions.append(
            CompletionOutput(
                index,
                detokenizer.text(),
                beam.token_ids,
                beam.cum_logprob,
                finish_reason=beam.finish_reason,
            )
        )
    return RequestOutput(
        request.request_id,
        prompt,
        request.prompt_token_ids,
        None,
        completions,
        finished=True,
        num_cached_tokens=num_cached_tokens,
    )


async def _all(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of all calls; the first error, or a cancellation, ends all of them."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
