"""Routes of other servers that Octavo lacks, with alternatives for the message of the 404."""

from __future__ import annotations

from collections.abc import Mapping


def _all(reason: str, *paths: str) -> dict[str, str]:
    return dict.fromkeys(paths, reason)


ELSEWHERE: Mapping[str, str] = {
    **_all(
        "chats of Cohere's API are not supported; use POST /v1/chat/completions",
        "/cohere/v2",
    ),
    **_all(
        "use POST /tokenize to render prompts and chats as token ids, POST /v1/completions with "
        "return_token_ids to pass and return them, and POST /detokenize for their text",
        "/v1/completions/derender",
        "/v1/chat/completions/derender",
        "/v1/messages/render",
        "/v1/responses/render",
    ),
    **_all(
        "a request ends if its client closes the connection, or if the server stops",
        "/inference/v1/abort_requests",
    ),
    **_all("use POST /v1/score", "/generative_scoring"),
    **_all(
        "use structured_outputs or response_format with POST /v1/chat/completions",
        "/v1/systemone",
        "/v1/decisions",
    ),
    **_all(
        "/v1/realtime has the events of OpenAI's Realtime API in place of vLLM's (docs/speech.md)",
        "/v1/realtime",
    ),
    **_all("use POST /sleep with --enable-sleep-mode", "/release_kv_cache_memory"),
    **_all(
        "weights do not change while the server runs; restart it with the new weights",
        "/init_weight_transfer_engine",
        "/shutdown_weight_transfer_engine",
        "/start_weight_update",
        "/start_draft_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/update_weight_version",
        "/weight_info",
        "/weight_checker",
    ),
    **_all(
        "a request ends if its client closes the connection, or if the server stops",
        "/abort_requests",
    ),
    **_all("clients cannot run code in the server; use LLM.collective_rpc", "/collective_rpc"),
    **_all(
        "the server monitors its workers and replaces dead engines itself; use GET /server_info to "
        "read its settings",
        "/get_world_size",
        "/fault_tolerance",
    ),
    **_all("set kv_events_config, and subscribe to its endpoint", "/kv_event_sources"),
    **_all("use GET /docs", "/redoc"),
}
"""Alternatives to vLLM's routes by path; each also applies to all paths below it."""

OLLAMA: Mapping[str, str] = {
    **_all(
        "the server has one model, which it loads when it starts; use `octavo pull` and "
        "`octavo serve MODEL`",
        "/api/pull",
        "/api/create",
        "/api/copy",
        "/api/delete",
        "/api/blobs",
    ),
    **_all("the server does not publish models", "/api/push"),
    **_all("the server has no accounts", "/api/me", "/api/signout"),
}
"""Alternatives to Ollama's routes, in the same form."""


def elsewhere(path: str) -> str | None:
    """Return the alternative to a route that only other servers have; None for other paths."""
    for known, reason in {**ELSEWHERE, **OLLAMA}.items():
        if path == known or path.startswith(known + "/"):
            return reason
    return None
