"""Addresses that vLLM's server has and this one has not, and what to use: for the 404's message."""

from __future__ import annotations

from collections.abc import Mapping


def _all(reason: str, *paths: str) -> dict[str, str]:
    return dict.fromkeys(paths, reason)


ELSEWHERE: Mapping[str, str] = {
    **_all("use POST /v1/chat/completions", "/v1/responses"),
    **_all(
        "there is no Anthropic or Cohere API here; use POST /v1/chat/completions",
        "/v1/messages",
        "/cohere/v2",
    ),
    **_all(
        "POST /tokenize renders prompts and chats as token ids, POST /v1/completions takes and, "
        "with return_token_ids, gives them, and POST /detokenize turns them into text",
        "/v1/completions/render",
        "/v1/completions/derender",
        "/v1/chat/completions/render",
        "/v1/chat/completions/derender",
    ),
    **_all(
        "requests end when their clients close the connection, and all do when the server ends",
        "/inference/v1/abort_requests",
    ),
    **_all(
        "models generate text here; embeddings, scores and classes are not supported",
        "/v1/embeddings",
        "/v2/embed",
        "/pooling",
        "/classify",
        "/score",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        "/generative_scoring",
    ),
    **_all(
        "use structured_outputs or response_format with POST /v1/chat/completions",
        "/v1/systemone",
        "/v1/decisions",
    ),
    **_all(
        "models take text only here",
        "/v1/audio",
        "/v1/realtime",
        "/reset_mm_cache",
        "/reset_encoder_cache",
    ),
    **_all(
        "models with adapters cannot be served yet; merge the adapter into the weights and serve "
        "the merged model",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    ),
    **_all("use POST /sleep with --enable-sleep-mode", "/release_kv_cache_memory"),
    **_all(
        "weights do not change while the server runs; restart it with the new ones",
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
        "requests end when their clients close the connection, and all do when the server ends",
        "/abort_requests",
    ),
    **_all("clients cannot run code in the server; use LLM.collective_rpc", "/collective_rpc"),
    **_all(
        "a model runs on one device here, in one process",
        "/get_world_size",
        "/fault_tolerance",
    ),
    **_all("the KV cache is not shared with other engines here", "/kv_event_sources"),
    **_all("use GET /docs", "/redoc"),
}
"""By address; those below it are meant, too."""


def elsewhere(path: str) -> str | None:
    """What to use instead of an address of vLLM's; None: vLLM has no such address either."""
    for known, reason in ELSEWHERE.items():
        if path == known or path.startswith(known + "/"):
            return reason
    return None
