"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, cast

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import RequestError
from octavo.frontend.prompt_embeds import PROMPT_EMBEDS_OFF
from octavo.outputs import CompletionOutput, Logprob, PromptLogprobs, RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.server.body import read_model
from octavo.server.generation import (
    Generation,
    Prompt,
    Usage,
    encode,
    finite,
    prompt_logprobs_json,
    raw,
)
from octavo.server.schema import CompletionBody, Prompts
from octavo.server.state import state_of
from octavo.server.tensor_file import decode_embeds
from octavo.system.offload import offload
from octavo.text.detokenizer import TextStream, make_text_stream
from octavo.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.frontend.async_llm import AsyncLLM

DEFAULT_MAX_TOKENS = 16


async def create_completion(request: Request) -> Response:
    """Continues one or several prompts."""
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
        self._prompts: list[Prompt] = []
        """Those of `prompt`; embeddings come before them, once they are read."""
        # OpenAI's client wants a prompt, and gets an empty one.
        if body.prompt is not None and (body.prompt or body.prompt_embeds is None):
            self._prompts = _split(body.prompt)
        self._num_embeds = len(body.prompt_embeds or ())
        self._only_echo = bool(body.echo) and body.max_tokens == 0
        details = self.state.config.enable_prompt_tokens_details
        self.usage = Usage(details, count_completions=not self._only_echo)
        self._sent: dict[int, int] = {}
        """Length of the text of each choice that has been streamed."""
        self._offsets: dict[int, _Offsets] = {}
        self._prompt_logprobs: dict[int, PromptLogprobs] = {}
        self._held: dict[int, list[RequestOutput]] = {}
        """Outputs of prompts to be echoed whose logprobs are not there yet."""

    @property
    def num_prompts(self) -> int:
        """Prompts in this request."""
        return self._num_embeds + len(self._prompts)

    @property
    def num_answers(self) -> int:
        """See `Generation.num_answers`."""
        return self.n if self.body.best_of is None else self.body.best_of

    async def prepare(self, engine: AsyncLLM) -> tuple[Sequence[Prompt], SamplingParams, bool]:
        """See `Generation.prepare`."""
        body = self.body
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        prompt_logprobs = body.prompt_logprobs
        if body.echo and prompt_logprobs is None:
            prompt_logprobs = body.logprobs
        logprobs = body.logprobs
        if logprobs is None and self.num_answers > self.n:
            logprobs = 0  # to choose by; they are not reported unless asked for
        if body.logprob_token_ids:
            logprobs = None
        params = await self.sampling_params(
            engine.spec.generation_config,
            n=self.num_answers,
            max_tokens=1 if self._only_echo else max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            detokenize=engine.tokenizer is not None,
        )
        prompts = [*await self._read_embeds(engine), *self._prompts]
        return prompts, params, body.add_special_tokens is not False

    async def _read_embeds(self, engine: AsyncLLM) -> list[Prompt]:
        tensors = self.body.prompt_embeds
        if tensors is None:
            return []
        if not engine.config.model.enable_prompt_embeds:
            raise RequestError(PROMPT_EMBEDS_OFF, "prompt_embeds")
        self.body.prompt_embeds = None  # what they are decoded to is enough to keep
        size = sum(map(len, tensors))
        read = await offload(size // 100, lambda: list(map(decode_embeds, tensors)))
        return [{"prompt_embeds": embeds} for embeds in read]

    def choices(self, index: int, output: RequestOutput) -> Iterator[dict[str, object]]:
        """See `Generation.choices`."""
        completions = sorted(output.outputs, key=lambda c: c.index)
        if self.num_answers > self.n:
            best = sorted(completions, key=_mean_logprob, reverse=True)[: self.n]
            completions = [replace(c, index=i) for i, c in enumerate(best)]
        for completion in completions:
            yield self._choice(index, output, completion, first=True)

    def chunks(self, index: int, output: RequestOutput) -> list[bytes]:
        """See `Generation.chunks`."""
        if not (self.body.echo and self.body.logprobs is not None):
            return self._chunks(index, output)
        # Of n answers only the first brings them, and another one may come before it.
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[index] = output.prompt_logprobs
        self._held.setdefault(index, []).append(output)
        if index not in self._prompt_logprobs:
            return []
        return [chunk for held in self._held.pop(index) for chunk in self._chunks(index, held)]

    def _chunks(self, index: int, output: RequestOutput) -> list[bytes]:
        body = self.body
        plain = body.logprobs is None and not body.return_token_ids
        chunks = []
        for completion in output.outputs:
            number = index * self.n + completion.index
            first = number not in self._sent
            finished = completion.finish_reason is not None
            if (first and (body.echo or body.return_token_ids)) or finished or not plain:
                choice = self._choice(index, output, completion, first)
                chunks.append(encode(choice))
            elif completion.text:
                chunks.append(
                    b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}'
                    % (number, encode(completion.text))
                )
            self._sent[number] = self._sent.get(number, 0) + len(completion.text)
        return chunks

    def _choice(
        self, index: int, output: RequestOutput, completion: CompletionOutput, first: bool
    ) -> dict[str, object]:
        """A choice, or what is new of it; the first time with the prompt if it is echoed."""
        body = self.body
        number = index * self.n + completion.index
        echo = bool(body.echo) and first
        text, token_ids = completion.text, completion.token_ids
        logprobs: Iterable[dict[int, Logprob] | None] = completion.logprobs or []
        if self._only_echo:
            text, token_ids, logprobs = "", [], []
        prompt = self._prompt_text(output) if echo else ""
        places: list[int] = []
        if body.logprobs is not None:
            if first:
                known = [] if index < self._num_embeds else output.prompt_token_ids
                self._offsets[number] = _Offsets(self.tokenizer, body, known, len(prompt))
            end = self._sent.get(number, 0) + len(prompt) + len(text)
            places = self._offsets[number].place(token_ids)
            if completion.finish_reason is not None:  # text behind a stop text has been cut off
                places = [min(place, end) for place in places]
        if echo:
            self._sent[number] = len(prompt)
            text = prompt + text
            if body.logprobs is not None:
                rows = self._prompt_logprobs.get(index) or output.prompt_logprobs or []
                logprobs = chain(rows, logprobs)
                token_ids = [*output.prompt_token_ids, *token_ids]
                places = _prompt_offsets(self.tokenizer, output.prompt_token_ids, prompt) + places
        choice: dict[str, object] = {
            "index": number,
            "text": text,
            "logprobs": None
            if body.logprobs is None
            else self._logprobs(token_ids, logprobs, places),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if self._only_echo:
            choice["finish_reason"] = None if completion.finish_reason is None else "length"
        if not body.stream:
            asked = body.prompt_logprobs is not None
            choice["prompt_logprobs"] = (
                prompt_logprobs_json(output.prompt_logprobs) if asked else None
            )
        if body.return_token_ids:
            choice["token_ids"] = [] if self._only_echo else completion.token_ids
            choice["prompt_token_ids"] = output.prompt_token_ids if first else None
        elif not body.stream:
            choice["token_ids"] = choice["prompt_token_ids"] = None
        return choice

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None and self.body.truncate_prompt_tokens is None:
            return output.prompt
        if self.tokenizer is None:
            return ""
        # As it is, whatever is left out of the answer.
        return self.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)

    def _logprobs(
        self,
        token_ids: list[int],
        rows: Iterable[dict[int, Logprob] | None],
        offsets: list[int],
    ) -> dict[str, Sequence[object]]:
        """OpenAI's four parallel lists."""
        tokens: list[object] = []
        logprobs: list[object] = []
        tops: list[object] = []
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
            "text_offset": offsets,
        }


class _Offsets:
    """Where the tokens of an answer begin in its text, which may come piece by piece.

    Args:
        tokenizer: None if there is no text.
        body: of the request.
        prompt_token_ids: what is before the answer.
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
        """Where each of the next tokens begins.

        A token that only completes a character begins where that does; one that is left out of
        the text begins where the next one does.
        """
        places: list[int] = []
        for token_id in token_ids:
            places.append(self._at)
            if self._stream is not None:
                self._at += len(self._stream.push(token_id))
        return places


def _mean_logprob(completion: CompletionOutput) -> float:
    """What OpenAI's `best_of` goes by: the log probability per token."""
    assert completion.cumulative_logprob is not None
    return completion.cumulative_logprob / max(1, len(completion.token_ids))


def _prompt_offsets(tokenizer: Tokenizer | None, token_ids: list[int], text: str) -> list[int]:
    """Where the tokens of a prompt begin in its text.

    Special tokens may stand in the text, if somebody wrote them there, or not. A tokenizer that
    changes the text (case, accents) shifts the offsets of what follows, never beyond the end.
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
            # A tokenizer may put a space before a text, and behind a special token.
            if not text.startswith(new, at) and new[:1] == " " and text.startswith(new[1:], at):
                new = new[1:]
            at = min(len(text), at + len(new))
    return places


def _split(prompt: Prompts) -> list[Prompt]:
    """One prompt or several, as a list."""
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return cast(list[Prompt], prompt)
