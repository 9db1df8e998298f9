"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from starlette.requests import Request
from starlette.responses import Response

from octavo.outputs import CompletionOutput, PromptLogprobs, RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.server.generation import (
    Generation,
    Prompt,
    Usage,
    encode,
    finite,
    prompt_logprobs_json,
    token_text,
)
from octavo.server.schema import CompletionBody, Prompts

if TYPE_CHECKING:
    from octavo.engine.async_llm import AsyncLLM

DEFAULT_MAX_TOKENS = 16


async def create_completion(request: Request) -> Response:
    """Continues one or several prompts."""
    return await Completion.respond(request, CompletionBody)


class Completion(Generation[CompletionBody]):
    """One request; its choices are numbered prompt by prompt."""

    id_prefix = "cmpl"
    object_name = "text_completion"
    chunk_object_name = "text_completion"
    prompt_param = "prompt"

    def __init__(self, request: Request, body: CompletionBody) -> None:
        super().__init__(request, body)
        self._prompts = _split(body.prompt)
        self._only_echo = bool(body.echo) and body.max_tokens == 0
        self.usage = Usage(count_completions=not self._only_echo)
        self._offsets: dict[int, int] = {}
        """Length of the text of each choice that has been streamed."""

    @property
    def num_prompts(self) -> int:
        """Prompts in this request."""
        return len(self._prompts)

    async def prepare(self, engine: AsyncLLM) -> tuple[Sequence[Prompt], SamplingParams, bool]:
        """See `Generation.prepare`."""
        body = self.body
        if isinstance(self._prompts[0], str):
            self.state.tokenizer(engine, "prompt")
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        prompt_logprobs = body.prompt_logprobs
        if body.echo and prompt_logprobs is None:
            prompt_logprobs = body.logprobs
        params = await self.sampling_params(
            engine.spec.generation_config,
            max_tokens=1 if self._only_echo else max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=prompt_logprobs,
            detokenize=engine.tokenizer is not None,
        )
        return self._prompts, params, body.add_special_tokens is not False

    def choices(self, index: int, output: RequestOutput) -> list[dict[str, object]]:
        """See `Generation.choices`."""
        return [
            self._choice(index, output, completion, first=True)
            for completion in sorted(output.outputs, key=lambda c: c.index)
        ]

    def chunks(self, index: int, output: RequestOutput) -> list[bytes]:
        """See `Generation.chunks`."""
        body = self.body
        plain = body.logprobs is None and not body.return_token_ids
        chunks = []
        for completion in output.outputs:
            number = index * self.n + completion.index
            first = number not in self._offsets
            finished = completion.finish_reason is not None
            if (first and (body.echo or body.return_token_ids)) or finished or not plain:
                choice = self._choice(index, output, completion, first)
                chunks.append(encode(choice))
            elif completion.text:
                chunks.append(
                    b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}'
                    % (number, encode(completion.text))
                )
            self._offsets[number] = self._offsets.get(number, 0) + len(completion.text)
        return chunks

    def _choice(
        self, index: int, output: RequestOutput, completion: CompletionOutput, first: bool
    ) -> dict[str, object]:
        """A choice, or what is new of it; the first time with the prompt if it is echoed."""
        body = self.body
        number = index * self.n + completion.index
        echo = bool(body.echo) and first
        text, token_ids = completion.text, completion.token_ids
        logprobs: PromptLogprobs = list(completion.logprobs or [])
        if self._only_echo:
            text, token_ids, logprobs = "", [], []
        offset = self._offsets.get(number, 0)
        if echo:
            prompt = self._prompt_text(output)
            self._offsets[number] = len(prompt) if body.stream else 0
            text = prompt + text
            if body.logprobs is not None:
                logprobs = [*(output.prompt_logprobs or [None]), *logprobs]
                token_ids = [*output.prompt_token_ids, *token_ids]
        choice: dict[str, object] = {
            "index": number,
            "text": text,
            "logprobs": None
            if body.logprobs is None
            else self._logprobs(token_ids, logprobs, offset),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if self._only_echo:
            choice["finish_reason"] = None if completion.finish_reason is None else "length"
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs_json(output.prompt_logprobs)
        if body.return_token_ids:
            choice["token_ids"] = [] if self._only_echo else completion.token_ids
            choice["prompt_token_ids"] = output.prompt_token_ids if first else None
        return choice

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None and self.body.truncate_prompt_tokens is None:
            return output.prompt
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(
            output.prompt_token_ids, skip_special_tokens=self.body.skip_special_tokens is not False
        )

    def _logprobs(
        self, token_ids: list[int], rows: PromptLogprobs, offset: int
    ) -> dict[str, list[object]]:
        """OpenAI's four parallel lists. `offset`: length of the text before the first token."""
        tokens: list[object] = []
        offsets: list[object] = []
        logprobs: list[object] = []
        tops: list[object] = []
        for token_id, row in zip(token_ids, rows, strict=True):
            entry = None if row is None else row[token_id]
            text = token_text(token_id, entry, self.tokenizer)
            tokens.append(text)
            offsets.append(offset)
            logprobs.append(None if entry is None else finite(entry.logprob))
            tops.append(
                None
                if row is None
                else {token_text(t, e, self.tokenizer): finite(e.logprob) for t, e in row.items()}
            )
            offset += len(text)
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def _split(prompt: Prompts) -> list[Prompt]:
    """One prompt or several, as a list."""
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return cast(list[Prompt], prompt)
