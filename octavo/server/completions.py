"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, cast

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import RequestError
from octavo.frontend.prompt_embeds import PROMPT_EMBEDS_OFF
from octavo.outputs import CompletionOutput, Logprob, PromptLogprobs, RequestOutput
from octavo.parsers.parts import Text
from octavo.server import generation_answers
from octavo.server.body import read_model
from octavo.server.generation import (
    Generation,
    Prompt,
    Reading,
    Usage,
    finite,
    make_sampling_params,
    prompt_logprobs_json,
    raw,
)
from octavo.server.parts import Delta, fold
from octavo.server.schema import CompletionBody
from octavo.server.state import state_of
from octavo.server.tensor_file import decode_embeds
from octavo.system.offload import offload
from octavo.text.detokenizer import TextStream, make_text_stream
from octavo.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.frontend.async_llm import AsyncLLM

DEFAULT_MAX_TOKENS = 16


async def create_completion(request: Request) -> Response:
    """Continue one or several prompts."""
    limit = state_of(request).config.max_request_bytes
    return await Completion.respond(request, await read_model(request, CompletionBody, limit))


class Completion(Generation[CompletionBody]):
    """One request; its choices are numbered prompt by prompt."""

    id_prefix = "cmpl"
    object_name = "text_completion"
    chunk_object_name = "text_completion"
    prompt_param = "prompt"

    def __init__(self, request: Request, body: CompletionBody) -> None:
        super().__init__(request, body)
        self._num_embeds = len(body.prompt_embeds or ())
        self._only_echo = _only_echoes(body)
        self.usage = Usage(self.reports_cached_tokens, count_completions=not self._only_echo)
        self._sent: dict[int, int] = {}
        """Length of the text of each choice that has been streamed."""
        self._offsets: dict[int, _Offsets] = {}
        self._prompt_logprobs: dict[int, PromptLogprobs] = {}
        self._held: dict[int, list[RequestOutput]] = {}
        """Outputs of echoed prompts that wait for the prompt's logprobs."""
        if not (body.echo or body.return_token_ids or body.logprobs is not None):
            self.text_chunk = b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}'

    @property
    def num_prompts(self) -> int:
        """Number of prompts in this request."""
        return self._num_embeds + len(token_prompts(self.body))

    @property
    def num_answers(self) -> int:
        """Number of answers made to each prompt."""
        return _num_answers(self.body)

    async def read(self, engine: AsyncLLM) -> Reading:
        """Return the request for the engine; see `Generation.read`."""
        reading = await read_completion(self.body, engine, self.context.body_bytes)
        self.body.prompt_embeds = None  # only the decoded tensors are needed
        return reading

    def ready(self, prompt: int, output: RequestOutput) -> list[RequestOutput]:
        """Return the outputs to write now; see `Generation.ready`."""
        if len(output.outputs) > self.n:
            in_order = sorted(output.outputs, key=lambda completion: completion.index)
            best = sorted(in_order, key=_mean_logprob, reverse=True)[: self.n]
            return [replace(output, outputs=[replace(c, index=i) for i, c in enumerate(best)])]
        if not (self.body.stream and self.body.echo and self.body.logprobs is not None):
            return [output]
        # Only the first of n answers has the prompt's logprobs; another answer may arrive earlier.
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[prompt] = output.prompt_logprobs
        self._held.setdefault(prompt, []).append(output)
        return self._held.pop(prompt) if prompt in self._prompt_logprobs else []

    def write(self, delta: Delta) -> Mapping[str, object] | None:
        """Return a choice; see `Generation.write`. The first one has the prompt if it is echoed."""
        body, completion, output, number = self.body, delta.completion, delta.output, delta.index
        text, token_ids = fold(delta.parts).get(Text, ""), completion.token_ids
        first = number not in self._sent
        shows_prompt = first and bool(body.echo or body.return_token_ids)
        reports_tokens = body.logprobs is not None or bool(body.return_token_ids)
        finished = completion.finish_reason is not None
        if body.stream and not (shows_prompt or reports_tokens or finished):
            if not text:
                return None
            self._sent[number] = self._sent.get(number, 0) + len(text)
            return {"index": number, "text": text, "logprobs": None, "finish_reason": None}
        if self._only_echo:
            text, token_ids = "", []
        prompt = self._prompt_text(output) if body.echo and first else None
        end = self._sent.get(number, 0) + len(prompt or "") + len(text)
        self._sent[number] = end
        reason = cast("generation_answers.FinishReason | None", completion.finish_reason)
        choice: generation_answers.CompletionChunkChoice = {
            "index": number,
            "text": (prompt or "") + text,
            "logprobs": None
            if body.logprobs is None
            else self._logprobs(delta, token_ids, prompt, end),
            "finish_reason": "length" if self._only_echo and finished else reason,
            "stop_reason": completion.stop_reason,
        }
        if not body.stream:
            asked = body.prompt_logprobs is not None
            rows = prompt_logprobs_json(output.prompt_logprobs) if asked else None
            cast("generation_answers.CompletionChoice", choice)["prompt_logprobs"] = rows
        if body.return_token_ids:
            choice["token_ids"] = token_ids
            choice["prompt_token_ids"] = output.prompt_token_ids if first else None
        elif not body.stream:
            choice["token_ids"] = choice["prompt_token_ids"] = None
        return choice

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None and self.body.truncate_prompt_tokens is None:
            return output.prompt
        if self.tokenizer is None:
            return ""
        # The prompt is unchanged even if the answer omits special tokens.
        return self.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)

    def _logprobs(
        self, delta: Delta, token_ids: list[int], prompt: str | None, end: int
    ) -> generation_answers.CompletionLogprobs:
        """Return OpenAI's four parallel lists.

        Args:
            delta: new tokens.
            token_ids: new tokens to report.
            prompt: text of the prompt, whose tokens are reported, too; None: no prompt.
            end: length of the choice's text.
        """
        completion, output = delta.completion, delta.output
        rows: Iterable[dict[int, Logprob] | None] = (completion.logprobs or []) if token_ids else []
        if delta.index not in self._offsets:
            known = [] if delta.prompt < self._num_embeds else output.prompt_token_ids
            start = len(prompt or "")
            self._offsets[delta.index] = _Offsets(self.tokenizer, self.body, known, start)
        places = self._offsets[delta.index].place(token_ids)
        if completion.finish_reason is not None:  # the text after a stop text has been cut off
            places = [min(place, end) for place in places]
        if prompt is not None:
            rows = chain(
                self._prompt_logprobs.get(delta.prompt) or output.prompt_logprobs or [], rows
            )
            token_ids = [*output.prompt_token_ids, *token_ids]
            places = _prompt_offsets(self.tokenizer, output.prompt_token_ids, prompt) + places
        tokens: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        for token_id, row in zip(token_ids, rows, strict=True):
            entry = None if row is None else row[token_id]
            tokens.append(self.token_text(token_id, entry))
            logprobs.append(None if entry is None else finite(entry.logprob))
            tops.append(
                None
                if row is None
                else raw({self.token_text(t, e): finite(e.logprob) for t, e in row.items()})
            )
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": tops,
            "text_offset": places,
        }


async def read_completion(body: CompletionBody, engine: AsyncLLM, num_bytes: int) -> Reading:
    """Convert a body of `num_bytes` bytes to a request for an engine.

    Raises:
        RequestError: the body cannot be turned into a request for this engine.
    """
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    prompt_logprobs = body.prompt_logprobs
    if body.echo and prompt_logprobs is None:
        prompt_logprobs = body.logprobs
    logprobs, num_answers = body.logprobs, _num_answers(body)
    if logprobs is None and num_answers > (1 if body.n is None else body.n):
        logprobs = 0  # to choose the best; reported only on request
    if body.logprob_token_ids:
        logprobs = None
    params = await make_sampling_params(
        body,
        num_bytes,
        engine.spec.generation_config,
        n=num_answers,
        max_tokens=1 if _only_echoes(body) else max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        detokenize=engine.tokenizer is not None,
    )
    prompts = [*await _read_embeds(body.prompt_embeds, engine), *token_prompts(body)]
    return Reading(prompts, params, body.add_special_tokens is not False)


async def _read_embeds(tensors: list[str] | None, engine: AsyncLLM) -> list[Prompt]:
    if tensors is None:
        return []
    if not engine.config.model.enable_prompt_embeds:
        raise RequestError(PROMPT_EMBEDS_OFF, "prompt_embeds")
    read = await offload(
        sum(map(len, tensors)) // 100, lambda: [decode_embeds(tensor) for tensor in tensors]
    )
    return [{"prompt_embeds": embeds} for embeds in read]


def _num_answers(body: CompletionBody) -> int:
    """Return the number of answers to each prompt, of which the best n are returned."""
    if body.best_of is not None:
        return body.best_of
    return 1 if body.n is None else body.n


def _only_echoes(body: CompletionBody) -> bool:
    return bool(body.echo) and body.max_tokens == 0


class _Offsets:
    """Offsets of an answer's tokens in its text, which may arrive in pieces.

    Args:
        tokenizer: tokenizer of the model; None: the answer has no text.
        body: body of the request.
        prompt_token_ids: tokens before the answer.
        start: length of the text before the answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        body: CompletionBody,
        prompt_token_ids: list[int],
        start: int,
    ) -> None:
        self._at = start
        self._stream: TextStream | None = None
        if tokenizer is not None:
            self._stream = make_text_stream(
                tokenizer, prompt_token_ids, body.skip_special_tokens is not False
            )

    def place(self, token_ids: list[int]) -> list[int]:
        """Return the offsets of the next tokens.

        A token that only completes a character has that character's offset. A token that is left
        out of the text has the offset of the next token.
        """
        places: list[int] = []
        for token_id in token_ids:
            places.append(self._at)
            if self._stream is not None:
                self._at += len(self._stream.push(token_id))
        return places


def _mean_logprob(completion: CompletionOutput) -> float:
    """Return the log probability per token, by which OpenAI's `best_of` chooses."""
    assert completion.cumulative_logprob is not None
    return completion.cumulative_logprob / max(1, len(completion.token_ids))


def _prompt_offsets(tokenizer: Tokenizer | None, token_ids: list[int], text: str) -> list[int]:
    """Return the offsets of a prompt's tokens in its text.

    Special tokens may occur in the text if the client wrote them. A tokenizer that changes the
    text (case, accents) shifts the later offsets, at most to the end.
    """
    if tokenizer is None:
        return [0] * len(token_ids)
    stream = make_text_stream(tokenizer, [], skip_special_tokens=False)
    places: list[int] = []
    at = 0
    for token_id in token_ids:
        places.append(at)
        if token_id in tokenizer.all_special_ids:
            piece = tokenizer.token_text(token_id)
            at += len(piece) if text.startswith(piece, at) else 0
        else:
            new = stream.push(token_id)
            # A tokenizer may add a space at the start of a text and after a special token.
            if not text.startswith(new, at) and new[:1] == " " and text.startswith(new[1:], at):
                new = new[1:]
            at = min(len(text), at + len(new))
    return places


def token_prompts(body: CompletionBody) -> list[Prompt]:
    """Return the prompts of `prompt`, one or several, as a list."""
    prompt = body.prompt
    # OpenAI's client requires a prompt; with prompt_embeds it sends an empty one.
    if prompt is None or not (prompt or body.prompt_embeds is None):
        return []
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [cast(Prompt, prompt)]
    return cast(list[Prompt], prompt)
