"""POST /v1/chat/completions/render and /v1/completions/render, as in vLLM: the prompt, unanswered.

The result is a body for POST /inference/v1/generate.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import RequestError
from octavo.sampling_params import SamplingParams
from octavo.server import answers
from octavo.server.body import read_model
from octavo.server.chat import ChatCompletion
from octavo.server.completions import Completion
from octavo.server.generation import Generation, Rendered
from octavo.server.schema import ChatBody, CompletionBody, GenerateBody, GenerationBody
from octavo.server.state import state_of
from octavo.system.offload import offload

# Fields of both `SamplingParams` and the body of POST /inference/v1/generate.
_FIELDS = [
    name
    for name in SamplingParams.__struct_fields__
    if name in CompletionBody.model_fields
    and name not in GenerateBody.model_fields
    # The token ids are already truncated.
    and name not in ("truncate_prompt_tokens", "truncation_side")
]
# Fields for which that route, or the model, has other defaults.
_STATED = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "max_tokens", "min_tokens"),
)
_DEFAULTS = SamplingParams()


async def render_chat(request: Request) -> Response:
    """Return the prompt of a chat and its token ids, without an answer to it."""
    body = await read_model(request, ChatBody, state_of(request).max_chat_bytes)
    await _check(request, body)
    return await _respond(request, ChatCompletion(request, body), single=True)


async def render_completion(request: Request) -> Response:
    """Return each prompt of a completion and its token ids, without answers to them."""
    body = await read_model(request, CompletionBody, state_of(request).config.max_request_bytes)
    await _check(request, body)
    return await _respond(request, Completion(request, body), single=False)


async def _check(request: Request, body: GenerationBody) -> None:
    body.check()
    await state_of(request).find_model(request, body.model, body.deadline_ms)
    if body.use_beam_search:
        raise RequestError(
            "use_beam_search is not available here: POST /inference/v1/generate continues a prompt "
            "without it; leave it out.",
            "use_beam_search",
        )


async def _respond(request: Request, generation: Generation[Any], *, single: bool) -> Response:
    state, body = generation.state, generation.body
    work = generation.render()
    rendered = await state.run(request.receive, work, generation.deadline)

    def whole() -> bytes:
        found = [_json(generation, body, prompt) for prompt in rendered]
        return msgspec.json.encode(found[0] if single else found)

    length = sum(len(prompt.token_ids) for prompt in rendered)
    return Response(await offload(length, whole), media_type="application/json")


def _json(
    generation: Generation[Any], body: GenerationBody, prompt: Rendered
) -> answers.RenderedPrompt:
    found = answers.RenderedPrompt(
        request_id=generation.id,
        model=body.model or generation.state.model_names[0],
        prompt_text=prompt.text,
        token_ids=prompt.token_ids,
        sampling_params=_sampling_params(prompt.params),
        stream=bool(body.stream),
        stream_options=None if body.stream_options is None else body.stream_options.model_dump(),
        cache_salt=body.cache_salt,
        priority=body.priority or 0,
        kv_transfer_params=body.kv_transfer_params,
    )
    if prompt.media:
        hashes = defaultdict[str, list[str]](list)
        places = defaultdict[str, list[answers.RenderedPlace]](list)
        for part in prompt.media:
            place = part.mm_position
            hashes[part.modality].append(part.identifier)
            places[part.modality].append(
                answers.RenderedPlace(offset=place.offset, length=place.length)
            )
        found["features"] = answers.RenderedFeatures(mm_hashes=hashes, mm_placeholders=places)
    return found


def _sampling_params(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters, except for defaults of that route, as the JSON of a body."""
    found = {}
    for name in _FIELDS:
        value = getattr(params, name)
        if value is not None and (name in _STATED or value != getattr(_DEFAULTS, name)):
            found[name] = value
    if params.extra_args:
        found["vllm_xargs"] = params.extra_args
    plain: dict[str, Any] = msgspec.to_builtins(found, str_keys=True)
    return plain
