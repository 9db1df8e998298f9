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
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from heapq import nlargest
from typing import Any, TypeVar

import msgspec

from octavo.errors import SleepError
from octavo.frontend.request_memory import request_nbytes
from octavo.messages import EngineCoreRequest
from octavo.outputs import CompletionOutput, FlatLogprobs, RequestOutput
from octavo.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
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
    """

    def __init__(
        self,
        params: BeamSearchParams,
        max_tokens: int,
        eos_token_ids: Collection[int],
        vocab_size: int,
    ) -> None:
        self.width = params.beam_width
        self._length_penalty = params.length_penalty
        self._early_stopping = params.early_stopping
        self._max_tokens = max_tokens
        self._eos_token_ids = frozenset(eos_token_ids)
        # No more of one beam can be among the best that continue, or among the best of all.
        self.num_logprobs = min(self.width + len(self._eos_token_ids), vocab_size)
        """Number of candidates that `step` needs of each live beam."""
        self.live = [Beam([], 0.0, [])]
        """Beams to continue, the best first; empty when the search is over."""
        self._finished: list[tuple[float, Beam]] = []
        """Pairs (score, beam), the best first."""

    @property
    def beams(self) -> list[Beam]:
        """Finished beams, the one with the highest score first."""
        return [beam for _, beam in self._finished]

    def step(self, rows: Sequence[FlatLogprobs]) -> None:
        """Continue each live beam by a token.

        Args:
            rows: one position for each of `live`, in order, with the `num_logprobs` most probable
                tokens.
        """
        width, length = self.width, len(self.live[0].token_ids) + 1
        found = [
            (beam.cum_logprob + logprob, -i, -token_id)
            for i, (beam, row) in enumerate(zip(self.live, rows, strict=True))
            for token_id, logprob in zip(*row.candidates(0), strict=True)
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
        return cum_logprob / math.pow(length, self._length_penalty)


def prompt_params(params: BeamSearchParams) -> SamplingParams:
    """Return the parameters for processing the prompt; see `InputProcessor.process`."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=params.max_tokens,
        ignore_eos=params.ignore_eos,
        include_stop_str_in_output=params.include_stop_str_in_output,
    )


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
    params: BeamSearchParams, request: EngineCoreRequest, vocab_size: int
) -> BeamSearch:
    """Return the search for the continuations of a processed prompt."""
    core = request.sampling_params
    return BeamSearch(params, core.max_tokens, core.all_stop_token_ids, vocab_size)


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
    core = msgspec.structs.replace(request.sampling_params, logprobs=search.num_logprobs)
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
