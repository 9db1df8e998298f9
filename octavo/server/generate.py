"""POST /inference/v1/generate, as in vLLM: tokens in, tokens out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import RequestError
from octavo.outputs import CompletionOutput, Logprob, RequestOutput, SampleLogprobs
from octavo.parsers.parts import Text
from octavo.server import generation_answers
from octavo.server.body import read_model, unknown_fields, validate
from octavo.server.completions import Completion, token_prompts
from octavo.server.errors import show
from octavo.server.generation import (
    Reading,
    finite,
    make_sampling_params,
    prompt_logprobs_json,
    raw,
)
from octavo.server.parts import Delta, fold
from octavo.server.schema import CompletionBody, GenerateBody
from octavo.server.state import ServerState, state_of

if TYPE_CHECKING:
    from octavo.frontend.async_llm import AsyncLLM

# Fields of vLLM's `SamplingParams` that have no effect here, or that this route sets.
_NO_EFFECT = ("detokenize", "flat_logprobs", "output_kind", "skip_clone")
_RENAMED = {"extra_args": "vllm_xargs"}
# Fields of a completion's body that are not sampling parameters.
_OF_REQUEST = frozenset(GenerateBody.model_fields) | {"prompt", "prompt_embeds", "echo"}


async def create_token_generation(request: Request) -> Response:
    """Continue a prompt of token ids; answer with token ids."""
    limit = state_of(request).config.max_request_bytes
    body = await read_model(request, GenerateBody, limit)
    return await TokenGeneration.respond(request, _completion(body))


def _completion(body: GenerateBody) -> TokensBody:
    """Convert a body to a completion's body.

    Raises:
        RequestError: a field of `sampling_params` is wrong or unknown.
    """
    given: dict[str, Any] = {}
    for name, value in body.sampling_params.items():
        if name in _OF_REQUEST - {"priority", "cache_salt"}:
            raise RequestError(
                f"sampling_params.{show(name)} is not allowed; it belongs next to sampling_params.",
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
    """`GenerateBody` as a completion's body."""

    output_mode: str = "tokens"


class TokenGeneration(Completion):
    """Request for token ids."""

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
        self.text_chunk = None

    async def read(self, engine: AsyncLLM) -> Reading:
        """Return the request for the engine; see `Generation.read`."""
        return await read_tokens(self.body, engine, self.state, self.context.body_bytes)

    def prompt_fields(self, outputs: list[RequestOutput]) -> dict[str, object]:
        """Return the fields about the prompt; see `Generation.prompt_fields`."""
        (output,) = outputs
        asked = self.body.return_token_ids
        if self.body.stream:
            return {"prompt_token_ids": output.prompt_token_ids} if asked else {}
        return {
            "prompt_logprobs": prompt_logprobs_json(output.prompt_logprobs),
            "prompt_token_ids": output.prompt_token_ids if asked else None,
        }

    def write(self, delta: Delta) -> generation_answers.TokensChunkChoice | None:
        """Return a choice; see `Generation.write`."""
        completion = delta.completion
        if self.body.stream and not (completion.token_ids or completion.finish_reason is not None):
            return None
        rows = completion.logprobs if self.body.logprobs is not None else None
        choice: generation_answers.TokensChunkChoice = {
            "index": delta.index,
            "token_ids": completion.token_ids,
            "logprobs": None if rows is None else {"content": _logprobs(completion, rows)},
            "finish_reason": cast(
                "generation_answers.FinishReason | None", completion.finish_reason
            ),
            "stop_reason": completion.stop_reason,
        }
        if self.body.output_mode == "text":
            choice["text"] = fold(delta.parts).get(Text, "")
        return choice


async def read_tokens(
    body: TokensBody, engine: AsyncLLM, state: ServerState, num_bytes: int
) -> Reading:
    """Convert a body of `num_bytes` bytes to a request for an engine.

    Raises:
        RequestError: the body cannot be turned into a request for this engine.
    """
    wants_text = body.output_mode == "text"
    if wants_text:
        state.tokenizer(engine, "output_mode")
    params = await make_sampling_params(
        body,
        num_bytes,
        # Without a limit the answer may fill the context.
        {"max_tokens": None, **engine.spec.generation_config},
        max_tokens=body.max_tokens,
        logprobs=None if body.logprob_token_ids else body.logprobs,
        # A stop text is found in the text, even if the text is not returned.
        detokenize=engine.tokenizer is not None and (wants_text or bool(body.stop)),
    )
    return Reading(token_prompts(body), params, False)


def _logprobs(
    completion: CompletionOutput, rows: SampleLogprobs
) -> list[generation_answers.ChosenTokenLogprob]:
    content: list[generation_answers.ChosenTokenLogprob] = []
    for token, row in zip(completion.token_ids, rows, strict=True):
        top = [_candidate(t, entry) for t, entry in row.items()]
        chosen: generation_answers.ChosenTokenLogprob = {
            **_candidate(token, row[token]),
            "top_logprobs": top,
        }
        content.append(raw(chosen))
    return content


def _candidate(token: int, entry: Logprob) -> generation_answers.TokenLogprob:
    return {"token_id": token, "logprob": finite(entry.logprob), "rank": entry.rank}
