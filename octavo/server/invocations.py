"""POST /invocations: SageMaker's route for completions and chats."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import RequestError
from octavo.server.body import read_model
from octavo.server.chat import ChatCompletion
from octavo.server.completions import Completion
from octavo.server.schema import ChatBody, CompletionBody
from octavo.server.state import state_of


async def create_invocation(request: Request) -> Response:
    """Answer a body with `messages` as a chat, and a body with `prompt` as a completion."""
    limit = state_of(request).max_chat_bytes
    body: ChatBody | CompletionBody = await read_model(request, _kind, limit)
    if isinstance(body, ChatBody):
        return await ChatCompletion.respond(request, body)
    return await Completion.respond(request, body)


def _kind(body: dict[str, Any]) -> type[ChatBody] | type[CompletionBody]:
    if "messages" in body:
        return ChatBody
    if "prompt" in body or "prompt_embeds" in body:
        return CompletionBody
    raise RequestError(
        "The body has neither messages (a chat) nor prompt (a completion); give one of them.",
        "prompt",
        "missing_parameter",
    )
