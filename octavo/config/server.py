"""Settings of the API server."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from octavo.config.environment import LogLevel
from octavo.config.section import Section
from octavo.sampling_params import RepetitionGuard


class ServerConfig(Section, frozen=True):
    """HTTP server, its keys, limits and logs."""

    host: Annotated[str, Meta(description="Address to listen on.")] = "0.0.0.0"
    port: Annotated[int, Meta(description="Port to listen on.", ge=0, le=65535)] = 8000
    api_key: Annotated[
        list[str],
        Meta(
            description="API keys to accept, in addition to those in OCTAVO_API_KEY,"
            " VLLM_API_KEY and --api-key-file; default: no key required.",
            extra={"secret": True},
        ),
    ] = []
    api_key_file: Annotated[
        str | None, Meta(description="File of API keys to accept, one per line.")
    ] = None
    admin_key: Annotated[
        list[str],
        Meta(
            description="Admin keys, in addition to the one in OCTAVO_ADMIN_KEY; required for"
            " /sleep, /reset_prefix_cache, /start_profile, /server_info and similar routes. Each is"
            " also an API key.",
            extra={"secret": True},
        ),
    ] = []
    enable_admin: Annotated[
        bool,
        Meta(
            description="Let every client use the routes that otherwise need an admin key; not"
            " allowed with --admin-key or several API keys."
        ),
    ] = False
    allowed_hosts: Annotated[
        list[str],
        Meta(
            description="Names to accept in the Host header; *: all. Default: localhost, 127.0.0.1"
            " and ::1 on a loopback address; the name and its addresses if --host is a name;"
            " otherwise all."
        ),
    ] = []
    allowed_origins: Annotated[
        list[str], Meta(description="Origins that may call the API from a browser (CORS).")
    ] = []
    ssl_keyfile: Annotated[str | None, Meta(description="TLS private key file.")] = None
    ssl_certfile: Annotated[str | None, Meta(description="TLS certificate file.")] = None
    chat_template: Annotated[
        str | None, Meta(description="Chat template, as a file or as text.")
    ] = None
    tool_call_parser: Annotated[
        str | None,
        Meta(
            description="Format of tool calls in answers, such as hermes; default: the one that the"
            " chat template shows."
        ),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        Meta(
            description="Format of reasoning in answers, such as qwen3; default: the one that the"
            " chat template shows; none: reasoning stays in the text."
        ),
    ] = None
    repetition_guard: Annotated[
        RepetitionGuard,
        Meta(
            description="Action when an answer repeats itself, for requests without"
            " repetition_guard: off, report, stop (end the answer), or close_thinking (end the"
            " reasoning, or the answer if it is not in reasoning)."
        ),
    ] = "off"
    strip_client_noise: Annotated[
        bool,
        Meta(
            description="Leave out lines x-anthropic-billing-header at the beginning of the system"
            " prompt of /v1/messages: Claude Code changes them in each request, so that no prefix"
            " is cached. The header X-Octavo-Stripped of the answer tells it."
        ),
    ] = False
    response_role: Annotated[str, Meta(description="Role of chat answers.")] = "assistant"
    exclude_tools_when_tool_choice_none: Annotated[
        bool,
        Meta(
            description="Leave tools out of the chat template when a request's tool_choice is none."
        ),
    ] = False
    max_num_queued_reqs: Annotated[
        int,
        Meta(
            description="Maximum number of unfinished requests; others get 429. 0: no limit.",
            ge=0,
        ),
    ] = 1024
    request_memory_bytes: Annotated[
        int,
        Meta(
            description="Maximum memory of unfinished requests (prompts, parameters, answers) in"
            " the server's processes (4G, 512M ...); further requests get 429.",
            ge=2**20,
        ),
    ] = 2**30
    max_request_bytes: Annotated[
        int, Meta(description="Maximum size of a request body (8M ...).", ge=1024)
    ] = 8 * 2**20
    max_media_request_bytes: Annotated[
        int,
        Meta(
            description="Maximum size of the body of a chat if the model reads pictures or sounds"
            " (32M ...), unless --max-request-bytes is larger. All bodies together may have 64 MiB"
            " or this size.",
            ge=1024,
        ),
    ] = 32 * 2**20
    max_file_bytes: Annotated[
        int,
        Meta(
            description="Maximum size of a file of /v1/files (200M ...); all files together may"
            " have fifty times as many bytes.",
            ge=1024,
        ),
    ] = 200 * 2**20
    max_connections_per_client: Annotated[
        int,
        Meta(
            description="Maximum connections per client address; a proxy counts as one client."
            " 0: no limit.",
            ge=0,
        ),
    ] = 2048
    request_timeout: Annotated[
        float, Meta(description="Maximum seconds per request; 0: no limit.", ge=0)
    ] = 0.0
    resume_grace: Annotated[
        float,
        Meta(
            description="Seconds for which a stream continues after its client disconnects, so that"
            " the client can reconnect and receive the rest; 0: cancel the stream at once.",
            ge=0,
            le=86400,
        ),
    ] = 0.0
    explain_requests: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="Number of recent requests, and of lines of batches, that"
            " /v1/requests/ID/explain can explain; 0: none. Default: 100, but 0 with several"
            " front ends, which do not support it."
        ),
    ] = None
    explain_prompts: Annotated[
        bool,
        Meta(
            description="Let explain show the texts where a prompt differs from an earlier prompt"
            " of the same API key."
        ),
    ] = False
    ui: Annotated[
        bool,
        Meta(description="Serve the web page at /, and the live view of the engine."),
    ] = True
    state_dir: Annotated[
        str | None,
        Meta(
            description="Folder for data that clients store, such as responses, so that it survives"
            " a restart; one server uses it at a time. Default: such data is in memory only."
        ),
    ] = None
    shutdown_timeout: Annotated[
        float,
        Meta(description="Maximum seconds for unfinished requests after SIGTERM.", ge=0),
    ] = 30.0
    api_server_count: Annotated[
        int,
        Meta(
            description="Number of front ends: processes that accept requests on one shared socket,"
            " tokenize prompts and detokenize the engines' outputs.",
            ge=1,
            le=256,
        ),
    ] = 1
    progress_timeout: Annotated[
        float,
        Meta(
            description="Maximum seconds without progress of an engine, including the time of one"
            " step; after that the server kills and replaces the engine.",
            gt=0,
        ),
    ] = 60.0
    headless: Annotated[
        bool,
        Meta(
            description="Run as a node: no HTTP server, only engines of the server at"
            " --data-parallel-address."
        ),
    ] = False
    max_engine_restarts: Annotated[
        int,
        Meta(
            description="Maximum number of replacements of dead engines within ten minutes; the"
            " server exits at the next death.",
            ge=0,
        ),
    ] = 5
    warm_spare: Annotated[
        bool | None,
        Meta(
            description="Keep a spare process ready that replaces a dead engine (96 MiB, and"
            " another 96 MiB for each worker process); default: on, unless that reduces the KV"
            " cache."
        ),
    ] = None
    record: Annotated[
        str | None,
        Meta(
            description="File for a recording of arrivals, decisions and tokens for octavo replay;"
            " it contains all prompts and answers, see docs/reliability.md."
        ),
    ] = None
    record_prompts: Annotated[
        Literal["full", "hash"],
        Meta(
            description="Form of the prompts in --record; hash: hashes, which cannot be replayed."
        ),
    ] = "full"
    record_max_bytes: Annotated[
        int,
        Meta(
            description="Maximum size of a recording (2G ...); the server keeps its newest part in"
            " FILE and the older half in FILE.1.",
            ge=2**20,
        ),
    ] = 2**30
    log_level: Annotated[LogLevel, Meta(description="Minimum log level.")] = "info"
    log_format: Annotated[Literal["text", "json"], Meta(description="Log format.")] = "text"
    log_stats_interval: Annotated[
        float,
        Meta(
            description="Seconds between log lines of statistics (throughput, requests, cache"
            " usage); an idle server logs none.",
            gt=0,
        ),
    ] = 10.0
    metrics_prefix: Annotated[
        Literal["octavo", "vllm"],
        Meta(
            description="Prefix of metric names; with vllm, vLLM's dashboards and alerts work"
            " unchanged."
        ),
    ] = "octavo"
    enable_log_requests: Annotated[bool, Meta(description="Log every request.")] = False
    disable_uvicorn_access_log: Annotated[
        bool, Meta(description="Log answered requests only at level debug.")
    ] = False
    disable_access_log_for_endpoints: Annotated[
        str | None,
        Meta(description="Paths with no access log, separated by commas: /v1/models,/ping."),
    ] = None
    strict_fields: Annotated[
        bool,
        Meta(
            description="Reject requests with unknown fields instead of listing the fields in the"
            " header X-Octavo-Ignored-Fields."
        ),
    ] = False
    enable_tokenizer_info_endpoint: Annotated[
        bool,
        Meta(
            description="Serve /tokenizer_info: the tokenizer's configuration and the chat"
            " template."
        ),
    ] = False
    root_path: Annotated[
        str,
        Meta(
            description="Path at which a proxy exposes this server, such as /llm.",
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
            description="Import paths (package.module.name) of ASGI middleware classes or functions"
            " (request, call_next); the last one is outermost."
        ),
    ] = []
    enable_force_include_usage: Annotated[
        bool, Meta(description="Report the token usage in every chunk of every stream.")
    ] = False
    enable_prompt_tokens_details: Annotated[
        bool, Meta(description="Report the number of cached prompt tokens in the usage.")
    ] = True
    enable_per_request_metrics: Annotated[
        bool,
        Meta(
            description="Report the times of a request (metrics) in its answer, or in the usage"
            " chunk of its stream; only for requests with one prompt."
        ),
    ] = False
    return_tokens_as_token_ids: Annotated[
        bool,
        Meta(
            description="Show tokens in logprobs as token_id:5 instead of their text; the default"
            " for requests that do not set it."
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
        Meta(description="Variables for the chat template; requests may override them."),
    ] = {}

    @property
    def num_explained(self) -> int:
        """Number of recent requests that can be explained."""
        if self.explain_requests is None:
            return 100 if self.api_server_count == 1 else 0
        return self.explain_requests

    @property
    def reports_steps(self) -> bool:
        """True if the engines send records of their steps to the front ends."""
        return self.ui or self.num_explained > 0
