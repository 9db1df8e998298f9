"""POST /inference/v1/generate: vLLM's, tokens in and tokens out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import RequestError
from octavo.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.server.body import read_model, unknown_fields, validate
from octavo.server.completions import Completion
from octavo.server.errors import show
from octavo.server.generation import Prompt, encode, finite, prompt_logprobs_json, raw
from octavo.server.schema import CompletionBody, GenerateBody
from octavo.server.state import state_of

if TYPE_CHECKING:
    from octavo.frontend.async_llm import AsyncLLM

# Fields of vLLM's `SamplingParams` that change nothing here, or that this address decides.
_NO_EFFECT = ("detokenize", "flat_logprobs", "output_kind", "skip_clone")
_RENAMED = {"extra_args": "vllm_xargs"}
# What a completion has beside its parameters: they are no fields of `sampling_params`.
_OF_REQUEST = frozenset(GenerateBody.model_fields) | {"prompt", "prompt_embeds", "echo"}


async def create_token_generation(request: Request) -> Response:
    """Continues a prompt of token ids, and answers with token ids."""
    limit = state_of(request).config.max_request_bytes
    body = await read_model(request, GenerateBody, limit)
    return await TokenGeneration.respond(request, _completion(body))


def _completion(body: GenerateBody) -> TokensBody:
    """The same as a completion's body.

    Raises:
        RequestError: a field of `sampling_params` is wrong or unknown.
    """
    given: dict[str, Any] = {}
    for name, value in body.sampling_params.items():
        if name in _OF_REQUEST - {"priority", "cache_salt"}:
            raise RequestError(
                f"sampling_params.{show(name)} is not allowed; it stands beside sampling_params.",
                "sampling_params",
            )
        if name not in _NO_EFFECT:
            given[_RENAMED.get(name, name)] = value
    unknown = unknown_fields(CompletionBody, given)
    if unknown:
        raise RequestError(
            f"sampling_params has {show(unknown[0])}, which is no field of SamplingParams; leave "
            "it out.",
            "sampling_params",
        )
    for name in ("model", "request_id", "stream", "cache_salt", "priority", "kv_transfer_params"):
        if (value := getattr(body, name)) is not None:
            given[name] = value
    if body.stream_options is not None:
        given["stream_options"] = body.stream_options.model_dump()
    checked = validate(TokensBody, {**given, "prompt": body.token_ids})
    checked.output_mode = body.output_mode or "tokens"
    checked.return_token_ids = bool(body.return_token_ids)
    return checked


class TokensBody(CompletionBody):
    """A `GenerateBody` as a completion's."""

    output_mode: str = "tokens"


class TokenGeneration(Completion):
    """One request."""

    id_prefix = "generate"
    prompt_param = "token_ids"
    body: TokensBody

    def __init__(self, request: Request, body: TokensBody) -> None:
        super().__init__(request, body)
        envelope: dict[str, object] = {
            "request_id": self.context.request_id,
            "output_mode": body.output_mode,
        }
        if not body.stream:
            envelope |= {name: self._envelope[name] for name in ("model", "created")}
        self._envelope = envelope

    async def prepare(self, engine: AsyncLLM) -> tuple[Sequence[Prompt], SamplingParams, bool]:
        """See `Generation.prepare`."""
        wants_text = self.body.output_mode == "text"
        if wants_text:
            self.state.tokenizer(engine, "output_mode")
        params = await self.sampling_params(
            # Without a limit of anybody's the answer may fill the context.
            {"max_tokens": None, **engine.spec.generation_config},
            max_tokens=self.body.max_tokens,
            logprobs=None if self.body.logprob_token_ids else self.body.logprobs,
            # A stop text is found in the text, whoever asks for that.
            detokenize=engine.tokenizer is not None and (wants_text or bool(self.body.stop)),
        )
        return self._prompts, params, False

    def choices(self, index: int, output: RequestOutput) -> Iterator[dict[str, object]]:
        """See `Generation.choices`."""
        for completion in sorted(output.outputs, key=lambda c: c.index):
            yield self._tokens(completion)

    def chunks(self, index: int, output: RequestOutput) -> list[bytes]:
        """See `Generation.chunks`."""
        return [
            encode(self._tokens(completion))
            for completion in output.outputs
            if completion.token_ids or completion.finish_reason is not None
        ]

    def opening(self, output: RequestOutput) -> list[dict[str, object]]:
        """See `Generation.opening`: the prompt, where it is asked for."""
        if not self.body.return_token_ids:
            return []
        return [{"choices": [], "prompt_token_ids": output.prompt_token_ids}]

    def extras(self, outputs: list[RequestOutput]) -> dict[str, object]:
        """See `Generation.extras`."""
        (output,) = outputs
        return {
            "prompt_logprobs": prompt_logprobs_json(output.prompt_logprobs),
            "prompt_token_ids": output.prompt_token_ids if self.body.return_token_ids else None,
        }

    def _tokens(self, completion: CompletionOutput) -> dict[str, object]:
        rows = completion.logprobs if self.body.logprobs is not None else None
        choice: dict[str, object] = {
            "index": completion.index,
            "token_ids": completion.token_ids,
            "logprobs": None
            if rows is None
            else {
                "content": [
                    raw(
                        {
                            **_candidate(token, row[token]),
                            "top_logprobs": [_candidate(t, entry) for t, entry in row.items()],
                        }
                    )
                    for token, row in zip(completion.token_ids, rows, strict=True)
                ]
            },
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if self.body.output_mode == "text":
            choice["text"] = completion.text
        return choice


def _candidate(token: int, entry: Logprob) -> dict[str, object]:
    return {"token_id": token, "logprob": finite(entry.logprob), "rank": entry.rank}
