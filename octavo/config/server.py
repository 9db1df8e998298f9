"""Settings of the API server."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from octavo.config.environment import LogLevel
from octavo.config.section import Section


class ServerConfig(Section, frozen=True):
    """The HTTP server."""

    host: Annotated[str, Meta(description="Address to listen on.")] = "0.0.0.0"
    port: Annotated[int, Meta(description="Port to listen on.", ge=0, le=65535)] = 8000
    api_key: Annotated[
        list[str],
        Meta(
            description="API keys to accept, in addition to those in OCTAVO_API_KEY,"
            " VLLM_API_KEY and --api-key-file; without any, no key is required.",
            extra={"secret": True},
        ),
    ] = []
    api_key_file: Annotated[
        str | None, Meta(description="File with API keys to accept, one on each line.")
    ] = None
    admin_key: Annotated[
        list[str],
        Meta(
            description="Keys of the operator, in addition to the one in OCTAVO_ADMIN_KEY: needed"
            " for /sleep, /reset_prefix_cache, /start_profile, /server_info and the like; each is"
            " an API key as well.",
            extra={"secret": True},
        ),
    ] = []
    enable_admin: Annotated[
        bool,
        Meta(
            description="Let every client use the addresses that otherwise need an admin key; not"
            " together with --admin-key or several API keys."
        ),
    ] = False
    allowed_hosts: Annotated[
        list[str],
        Meta(
            description="Names to accept in the Host header, * for all; default: on a loopback"
            " address its own names (localhost, 127.0.0.1, ::1), with a name as --host that name"
            " and its addresses, otherwise all."
        ),
    ] = []
    allowed_origins: Annotated[
        list[str], Meta(description="CORS: origins that may call the API from a browser.")
    ] = []
    ssl_keyfile: Annotated[str | None, Meta(description="TLS private key file.")] = None
    ssl_certfile: Annotated[str | None, Meta(description="TLS certificate file.")] = None
    chat_template: Annotated[
        str | None, Meta(description="Chat template: a file, or the template itself.")
    ] = None
    response_role: Annotated[str, Meta(description="Role of the answers in a chat.")] = "assistant"
    exclude_tools_when_tool_choice_none: Annotated[
        bool,
        Meta(
            description="Leave tools out of the chat template when a request's tool_choice is none."
        ),
    ] = False
    max_num_queued_reqs: Annotated[
        int,
        Meta(
            description="Maximum number of unfinished requests; further ones get 429. 0: no limit.",
            ge=0,
        ),
    ] = 1024
    request_memory_bytes: Annotated[
        int,
        Meta(
            description="Memory that unfinished requests (prompts, parameters, answers) may take "
            "in the server's processes (4G, 512M ...); further ones get 429.",
            ge=2**20,
        ),
    ] = 2**30
    max_request_bytes: Annotated[
        int, Meta(description="Maximum size of a request body (8M ...).", ge=1024)
    ] = 8 * 2**20
    max_connections_per_client: Annotated[
        int,
        Meta(
            description="Maximum connections per address; a proxy counts as one. 0: no limit.",
            ge=0,
        ),
    ] = 2048
    request_timeout: Annotated[
        float, Meta(description="Seconds a request may take; 0: no limit.", ge=0)
    ] = 0.0
    resume_grace: Annotated[
        float,
        Meta(
            description="Seconds for which a stream goes on without its client, which may come"
            " back for what it missed and the rest; 0: the stream is cancelled at once.",
            ge=0,
            le=86400,
        ),
    ] = 0.0
    shutdown_timeout: Annotated[
        float,
        Meta(description="Seconds that requests in flight get to finish after SIGTERM.", ge=0),
    ] = 30.0
    api_server_count: Annotated[
        int,
        Meta(
            description="Number of front ends: processes that take requests from one listening"
            " socket, tokenise them and make text of what the engines bring.",
            ge=1,
            le=256,
        ),
    ] = 1
    progress_timeout: Annotated[
        float,
        Meta(
            description="Seconds without a sign of life from the engine, busy or idle, after which"
            " it is killed and another one takes over; a step may take as long.",
            gt=0,
        ),
    ] = 60.0
    headless: Annotated[
        bool,
        Meta(
            description="Be a node: no HTTP server, only engines of the server at"
            " --data-parallel-address."
        ),
    ] = False
    max_engine_restarts: Annotated[
        int,
        Meta(
            description="Maximum number of times that a dead engine is replaced within ten"
            " minutes; after these the server exits.",
            ge=0,
        ),
    ] = 5
    warm_spare: Annotated[
        bool | None,
        Meta(
            description="Keep an interpreter ready for an engine that takes over (256 MiB; where it"
            " has worker processes, as much for each); default: on, unless the KV cache would be"
            " smaller for it."
        ),
    ] = None
    record: Annotated[
        str | None,
        Meta(
            description="File to record arrivals, decisions and tokens in, for octavo replay; it"
            " holds all prompts and answers, see docs/reliability.md."
        ),
    ] = None
    record_prompts: Annotated[
        Literal["full", "hash"],
        Meta(
            description="Whether --record keeps prompts or only their hashes, which cannot be"
            " replayed."
        ),
    ] = "full"
    record_max_bytes: Annotated[
        int,
        Meta(
            description="Maximum size of a recording (2G ...): the newest part of it is kept, in"
            " FILE and, the older half, in FILE.1.",
            ge=2**20,
        ),
    ] = 2**30
    log_level: Annotated[LogLevel, Meta(description="Minimum log level.")] = "info"
    log_format: Annotated[
        Literal["text", "json"], Meta(description="text for people, json for machines.")
    ] = "text"
    log_stats_interval: Annotated[
        float,
        Meta(
            description="Seconds between two log lines of statistics: throughput, requests, cache"
            " usage. While nothing happens there are none.",
            gt=0,
        ),
    ] = 10.0
    metrics_prefix: Annotated[
        Literal["octavo", "vllm"],
        Meta(
            description="Prefix of the metrics' names; with vllm, vLLM's dashboards and alerts work"
            " unchanged."
        ),
    ] = "octavo"
    enable_log_requests: Annotated[bool, Meta(description="Log every request.")] = False
    disable_uvicorn_access_log: Annotated[
        bool, Meta(description="Log answered requests at level debug only.")
    ] = False
    disable_access_log_for_endpoints: Annotated[
        str | None,
        Meta(description="The same for these paths only, separated by commas: /v1/models,/ping."),
    ] = None
    strict_fields: Annotated[
        bool,
        Meta(
            description="Refuse requests with unknown fields instead of naming these in the header"
            " X-Octavo-Ignored-Fields."
        ),
    ] = False
    enable_tokenizer_info_endpoint: Annotated[
        bool,
        Meta(
            description="Serve /tokenizer_info, which shows the tokenizer's configuration and the"
            " chat template."
        ),
    ] = False
    root_path: Annotated[
        str,
        Meta(
            description="Path under which a proxy exposes this server, such as /llm.",
            pattern="^(/[^/]+)*$",
        ),
    ] = ""
    uds: Annotated[
        str | None,
        Meta(description="Unix socket to listen on, instead of host and port."),
    ] = None
    middleware: Annotated[
        list[str],
        Meta(
            description="ASGI middleware classes, or functions (request, call_next), by import path"
            " (package.module.name); the last one is outermost."
        ),
    ] = []
    enable_force_include_usage: Annotated[
        bool, Meta(description="Report the token usage in every chunk of every stream.")
    ] = False
    enable_prompt_tokens_details: Annotated[
        bool, Meta(description="Report in the usage how many prompt tokens were cached.")
    ] = True
    enable_per_request_metrics: Annotated[
        bool,
        Meta(
            description="Report in each answer to one prompt, and in the usage chunk of its "
            "stream, how long the request took (metrics)."
        ),
    ] = False
    return_tokens_as_token_ids: Annotated[
        bool,
        Meta(
            description="Show tokens in logprobs as token_id:5 instead of their text, unless a "
            "request says otherwise."
        ),
    ] = False
    disable_fastapi_docs: Annotated[
        bool, Meta(description="Do not serve /docs and /openapi.json.")
    ] = False
    uvicorn_log_level: Annotated[
        Literal["critical", "error", "warning", "info", "debug", "trace"],
        Meta(description="Minimum log level of uvicorn, the HTTP server."),
    ] = "warning"
    default_chat_template_kwargs: Annotated[
        dict[str, Any],
        Meta(description="Variables for the chat template, which requests may override."),
    ] = {}
