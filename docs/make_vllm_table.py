"""Generator of docs/vllm.md: every name of vLLM's, with its equivalent in Octavo.

docs/vllm_names.txt holds the names; docs/list_vllm_names.py wrote it with vLLM 0.32. The
equivalents are derived from the code; this file describes the metrics that Octavo lacks.

    python docs/make_vllm_table.py
"""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from octavo.cli import build_parser
from octavo.compat.request_fields import INSTEAD, NO_EFFECT
from octavo.compat.routes import elsewhere
from octavo.compat.settings import FOREIGN, OFFLOADING, RENAMED, SECTIONS, SPECULATIVE
from octavo.config import ENVIRONMENT, EngineConfig, ServerConfig, config_fields, section_fields
from octavo.frontend.async_llm import AsyncLLM
from octavo.observability.metrics import EngineMetrics
from octavo.sampling_params import (
    REFUSED,
    REFUSED_BEAM_SEARCH,
    REFUSED_STRUCTURED_OUTPUTS,
    BeamSearchParams,
    SamplingParams,
    StructuredOutputsParams,
)
from octavo.server.app import build_app
from octavo.server.body import Body
from octavo.server.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from octavo.server.state import ServerState

FOLDER = Path(__file__).parent
BEGIN, END = "<!-- examples: begin -->", "<!-- examples: end -->"

HEAD = """# Coming from vLLM

`octavo serve` accepts the command line of `vllm serve`, and `LLM(...)` the arguments of vLLM's.
Supported settings and fields have the same names. An unsupported one is accepted if its value has
no effect; otherwise Octavo rejects it and names an alternative, so that nothing is silently
dropped. This page lists all flags, arguments, request fields, routes and metrics of vLLM 0.32;
`docs/make_vllm_table.py` generates it from the code.

- Flags may contain `_` instead of `-`; each flag may appear once.
- Numbers: `4k` is 4,000 and `4K` is 4,096; `m`, `g` and `t` work the same way.
  `--max-model-len auto` is the maximum that fits in memory.
- Keys of a JSON value may be separate flags: `--speculative-config.method ngram`,
  `-sc.method=ngram`. `--flag.key+ a,b` adds `a` and `b` to a list.
- `--config FILE` reads a YAML file with the names of flags as keys; flags override it.

## Scripts

`python -m octavo.compat.vllm script.py` runs a script unchanged. If the script uses a part of vLLM
that Octavo lacks, the script fails with one sentence that describes the part and an alternative.
To convert a script to Octavo, import from `octavo` instead of `vllm`, with the modules of this
table; `octavo serve` replaces `python -m vllm.entrypoints.openai.api_server`.

| vLLM's module | Octavo's |
| --- | --- |
| `vllm.engine.arg_utils` | `octavo` |
| `vllm.inputs` | `octavo` |
| `vllm.v1.engine.async_llm` | `octavo` |
| `vllm.v1.engine.llm_engine` | `octavo` |
| `vllm.outputs` | `octavo.outputs` |
| `vllm.sampling_params` | `octavo.sampling_params` |
| `vllm.v1.metrics.reader` | `octavo.observability.metrics_reader` |
| `vllm.distributed` | `octavo.compat.vllm` |
| `vllm.utils.argparse_utils` | `octavo.compat.vllm` |

Logits processors for vLLM (`vllm.v1.sample.logits_processor`) run unchanged, as
`LLM(logits_processors=[...])` or `--logits-processors module:Class`. Each request has its own
object of the class, with a batch of only that request at index 0, so that answers do not depend on
other requests. If the engine runs in a separate process, the class must be importable by its name.
The class sees the request's numeric parameters, such as penalties and seed, and `extra_args`, but
no texts. Logits processors also work with speculative decoding.

## Examples

"""


_NO_OFFLOADING = (
    "use external_prefix_cache_hits, kv_failed_loads and kv_expired_reqs for KV connectors"
)
ABSENT_METRICS = {
    "corrupted_requests": "requests with logits that are not finite fail; request_success counts "
    'them with finished_reason="error"',
    "diffusion_": "diffusion models are not supported",
    "estimated_": "use octavo bench latency to compare steps with the machine's limits",
    "hf3fs_": _NO_OFFLOADING,
    "hisparse_": _NO_OFFLOADING,
    "kv_block_": "it needs kv_cache_metrics, which is not supported",
    "kv_offload_": _NO_OFFLOADING,
    "mooncake_": _NO_OFFLOADING,
    "nixl_": _NO_OFFLOADING,
    "num_requests_kv_fetch_by_stage": _NO_OFFLOADING,
    "rl_weight_update_": "weights do not change while the engine is awake",
    "simple_kv_offload_": _NO_OFFLOADING,
    "sleep_mode_": "use engine_sleep_state",
    "tool_call_parser_invocations_total": "tool calls are not parsed from answers yet",
    "watermark_requests": "answers are not watermarked",
    "websocket_": "sessions of /v1/realtime count as requests in flight",
}
"""Reasons by the name of the metric that Octavo lacks; a name that ends with _ is a prefix."""


PARTLY = {
    (ChatBody, "tools"): "the same with `tool_choice` none; otherwise rejected: tool calls are "
    "not parsed from answers yet",
    (ChatBody, "tool_choice"): "`none`; otherwise rejected: use response_format to request JSON",
}
"""Fields with some rejected values."""

ROUTES = {
    "POST /scale_elastic_ep": "the same, but requests are served meanwhile, and `drain_timeout` "
    "has no effect; 503 for a second change at the same time, 409 if a change fails"
}
"""Routes with differences."""


def document() -> str:
    """Return the whole text of docs/vllm.md."""
    lines = [HEAD + _examples(), "", *_variables()]
    sections = names()
    for title, status in STATUS.items():
        lines += ["", f"## {title[0].upper()}{title[1:]}", ""]
        lines += [NOTES[title], ""] if title in NOTES else []
        lines += ["| vLLM's name | in Octavo |", "| --- | --- |"]
        for words in sections.pop(title):
            shown = ", ".join(f"`{word}`" for word in words)
            lines.append(f"| {shown} | {status(words)} |")
    if sections:
        raise LookupError(f"docs/vllm_names.txt has unknown sections: {', '.join(sections)}")
    return "\n".join([*lines, ""])


def _examples() -> str:
    """Return the unchanged output of `python -m benchmarks.conformance.examples`."""
    text = (FOLDER / "vllm.md").read_text()
    return text[text.index(BEGIN) : text.index(END) + len(END)]


def names() -> dict[str, list[list[str]]]:
    """Return the names in docs/vllm_names.txt by section, each with its other forms."""
    sections: dict[str, list[list[str]]] = {}
    for line in (FOLDER / "vllm_names.txt").read_text().splitlines():
        if line.startswith("# "):
            sections[line[2:]] = []
        else:
            title = list(sections)[-1]
            sections[title].append([line] if title == "routes" else line.split())
    return sections


def _variables() -> list[str]:
    lines = [
        "## Environment variables",
        "",
        "Every command and `LLM(...)` read these variables; arguments, flags and the file override",
        "them. `OCTAVO_API_KEY` and `VLLM_API_KEY` are API keys. A warning lists ignored `VLLM_`",
        "variables.",
        "",
        "| variable | or | setting | value |",
        "| --- | --- | --- | --- |",
    ]
    for name, (setting, _, allowed) in ENVIRONMENT.items():
        lines.append(f"| `OCTAVO_{name}` | `VLLM_{name}` | `{setting}` | {allowed} |")
    return lines


def flag_status(words: list[str]) -> str:
    """Return Octavo's equivalent of a flag.

    Raises:
        LookupError: the flag is unknown, or known twice.
    """
    name = words[0].removeprefix("--").replace("-", "_")
    own = {f.name for f in [*config_fields(), *section_fields(ServerConfig)]} | {"config"}
    if words[0].startswith("-"):
        missing = [word for word in words if word not in _parser_flags()]
        if missing:
            raise LookupError(f"octavo serve does not know {', '.join(missing)}")
    if name in own and name in FOREIGN:
        raise LookupError(f"{name} is Octavo's own now: remove it from octavo/compat/settings.py")
    if name in own:
        return "the same"
    if name in OFFLOADING:
        return "the same: a short form of `kv_transfer_config` with OffloadingConnector"
    if name in SPECULATIVE:
        return f"the same: `{SPECULATIVE[name]}` of `speculative_config`"
    if name in SECTIONS:
        key, setting, harmless = SECTIONS[name]
        allowed = "".join(f", `{k}` may be `{str(v).lower()}`" for k, v in harmless.items())
        return f"`{key}` is `{setting}`{allowed}; other keys are rejected"
    if name in RENAMED:
        return f"`{RENAMED[name]}`"
    if name not in FOREIGN:
        raise LookupError(f"{name} is unknown: add it to octavo/compat/settings.py")
    setting = FOREIGN[name]
    if setting.harmless is None:
        return f"any value is accepted: {setting.why}"
    if setting.kind == "bool":
        values = ["on" if value else "off" for value in setting.harmless]
    else:
        values = [f"`{v}`" for v in setting.harmless if v not in (None, "", [], {})]
    return f"{', '.join(values)}; otherwise rejected: {setting.why}".removeprefix("; otherwise ")


def field_status(body: type[Body], words: list[str]) -> str:
    """Return Octavo's equivalent of a field of a request's body.

    Raises:
        LookupError: the field is unknown.
    """
    (name,) = words
    if (body, name) in PARTLY:
        return PARTLY[body, name]
    if name in {field.alias or key for key, field in body.model_fields.items()}:
        return "the same"
    if name in NO_EFFECT:
        return "any value is accepted: it has no effect"
    if name not in body.unsupported:
        raise LookupError(f"{name} is unknown: add it to octavo/compat/request_fields.py")
    instead = f"use {INSTEAD[name]}" if name in INSTEAD else "leave it out"
    return _unless(body.unsupported[name], instead)


def parameter_status(kind: Any, refused: Any, words: list[str]) -> str:
    """Return Octavo's equivalent of a parameter of one of vLLM's classes.

    Raises:
        LookupError: the parameter is unknown.
    """
    (name,) = words
    if name not in kind.__struct_fields__:
        raise LookupError(f"{kind.__name__} has no {name}: add it to octavo/sampling_params.py")
    if name not in refused:
        return "the same"
    harmless, instead = refused[name]
    return _unless(harmless, instead)


def route_status(words: list[str]) -> str:
    """Return Octavo's equivalent of a route.

    Raises:
        LookupError: the route is unknown, or exists although a reason says that it does not.
    """
    (route,) = words
    reason = elsewhere(route.split()[1])
    if (route in _routes()) == (reason is not None):
        raise LookupError(
            f"{route}: add it either to the application or to octavo/compat/routes.py"
        )
    return ROUTES.get(route, "the same") if reason is None else f"none: {reason}"


def metric_status(words: list[str]) -> str:
    """Return Octavo's equivalent of a metric, given by its name without the prefix.

    Raises:
        LookupError: the metric is unknown, or exists although a reason says that it does not.
    """
    (name,) = words
    reasons = [
        reason
        for absent, reason in ABSENT_METRICS.items()
        if name == absent or (absent.endswith("_") and name.startswith(absent))
    ]
    if (name in _metrics()) + len(reasons) != 1:
        raise LookupError(
            f"{name}: add it either to octavo/observability/metrics.py or to {__file__}"
        )
    return f"none: {reasons[0]}" if reasons else "the same"


def _unless(harmless: Any, instead: str) -> str:
    values = [f"`{str(v).lower()}`" for v in harmless if v not in (None, "", [], {})]
    return f"{', '.join(values)}; otherwise rejected: {instead}".removeprefix("; otherwise ")


@cache
def _routes() -> set[str]:
    async def never() -> AsyncLLM:
        raise AssertionError("the application is not started")

    app = build_app(ServerState(ServerConfig(), EngineConfig(), never))
    return {f"{method} {r.path}" for r in app.routes for method in getattr(r, "methods", ())}


@cache
def _metrics() -> set[str]:
    metrics = EngineMetrics("model", 1000)
    metrics.set_cache_config_info({})
    metrics.watch_adapters(1, lambda: ([], []))
    families = text_string_to_metric_families(metrics.render().decode())
    return {family.name.removeprefix("octavo:") for family in families}


@cache
def _parser_flags() -> set[str]:
    return set(build_parser().parse_args(["serve"]).parser._option_string_actions)


STATUS: dict[str, Callable[[list[str]], str]] = {
    "flags and arguments": flag_status,
    "fields of /v1/completions": partial(field_status, CompletionBody),
    "fields of /v1/chat/completions": partial(field_status, ChatBody),
    "fields of /tokenize": partial(field_status, TokenizeBody),
    "fields of /detokenize": partial(field_status, DetokenizeBody),
    "fields of SamplingParams": partial(parameter_status, SamplingParams, REFUSED),
    "fields of StructuredOutputsParams": partial(
        parameter_status, StructuredOutputsParams, REFUSED_STRUCTURED_OUTPUTS
    ),
    "fields of BeamSearchParams": partial(parameter_status, BeamSearchParams, REFUSED_BEAM_SEARCH),
    "routes": route_status,
    "metrics": metric_status,
}
"""Functions that return the equivalent of a name, by section."""

NOTES = {
    "routes": "The server answers requests to unsupported routes with 404 and the reason.",
    "metrics": "Names begin with `octavo:`, or with `vllm:` with `--metrics-prefix vllm`. The\n"
    "table omits suffixes such as `_total` and `_bucket`. Octavo has no metrics of HTTP itself\n"
    "(`http_*`); use a proxy or the access log.",
}
"""Texts before the tables, by section."""

if __name__ == "__main__":
    (FOLDER / "vllm.md").write_text(document())
