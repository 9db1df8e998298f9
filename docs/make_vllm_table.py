"""Writes docs/vllm.md: every name of vLLM's, and what Octavo makes of it.

The names come from docs/vllm_names.txt, which docs/list_vllm_names.py wrote where vLLM 0.32 was
installed; what becomes of them from the code, and of metrics that are not here from this file.

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

`octavo serve` takes the command line of `vllm serve`, and `LLM(...)` the arguments of vLLM's. What
Octavo has goes by the same name. A setting or field that it does not have is accepted as long as
its value asks for nothing, and otherwise refused with what to use instead: nothing is silently
dropped. This page has every name of vLLM 0.32's flags, arguments, request fields, routes and
metrics; `docs/make_vllm_table.py` writes it from the code.

- Flags may be written with `_` for `-`; each is given once.
- Numbers: `4k` is 4,000, `4K` is 4,096, and so on with `m`, `g` and `t`; `--max-model-len auto` is
  what fits the memory.
- JSON may be given in parts: `--speculative-config.method ngram`, `-sc.method=ngram`;
  `--flag.key+ a,b` adds to a list.
- `--config FILE` reads a YAML file whose keys are the names of flags; flags win over it.

## Scripts

`python -m octavo.compat.vllm script.py` runs a script without a change. A part of vLLM that
Octavo does not have ends it with one sentence that says what that part is and what to use. To make
a script Octavo's own,
write `octavo` where it imports from `vllm`; modules inside of that become (what was started with
`python -m vllm.entrypoints.openai.api_server` is `octavo serve`):

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

Logits processors that were written for vLLM (`vllm.v1.sample.logits_processor`) run without a
change, given as `LLM(logits_processors=[...])` or `--logits-processors module:Class`. Each request
has an object of the class for itself, whose batch is that request alone, at index 0: so answers do
not depend on what else is computed. A class must be importable by its name where the engine runs in
a process of its own. Of the parameters it sees numbers, penalties, seed and `extra_args`, but no
texts. With speculative decoding they work, too.

## Examples

"""


_NO_OFFLOADING = (
    "external_prefix_cache_hits, kv_failed_loads and kv_expired_reqs tell of KV connectors"
)
ABSENT_METRICS = {
    "corrupted_requests": "a request whose logits are not finite fails: request_success counts it "
    'as finished_reason="error"',
    "diffusion_": "no diffusion model can be loaded here",
    "estimated_": "octavo bench latency says how near the machine's limits a step is",
    "hf3fs_": _NO_OFFLOADING,
    "hisparse_": _NO_OFFLOADING,
    "kv_block_": "with kv_cache_metrics only, which is refused",
    "kv_offload_": _NO_OFFLOADING,
    "lora_requests_info": "models with adapters cannot be served yet",
    "mm_cache_": "models take text only here",
    "mooncake_": _NO_OFFLOADING,
    "nixl_": _NO_OFFLOADING,
    "num_requests_kv_fetch_by_stage": _NO_OFFLOADING,
    "rl_weight_update_": "weights stay as they are while the engine is awake",
    "simple_kv_offload_": _NO_OFFLOADING,
    "sleep_mode_": "engine_sleep_state says whether the engine sleeps",
    "tool_call_parser_invocations_total": "tool calls are not parsed from answers yet",
    "watermark_requests": "answers are not watermarked",
    "websocket_": "the API is HTTP only",
}
"""Why Octavo has not the metrics of these names; of a name that ends with _, those it begins."""


PARTLY = {
    (ChatBody, "tools"): "the same with `tool_choice` none; else refused: calls of tools are not "
    "read from answers yet",
    (ChatBody, "tool_choice"): "`none`; else refused: use response_format to ask for JSON",
}
"""Fields of which some values are refused."""


def document() -> str:
    """The whole text of docs/vllm.md."""
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
    """What `python -m benchmarks.conformance.examples` wrote, as it is."""
    text = (FOLDER / "vllm.md").read_text()
    return text[text.index(BEGIN) : text.index(END) + len(END)]


def names() -> dict[str, list[list[str]]]:
    """The names in docs/vllm_names.txt by section, each with its other forms."""
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
        "Every command and `LLM(...)` read them; arguments, flags and the file win over them.",
        "`OCTAVO_API_KEY` and `VLLM_API_KEY` are API keys. Any other `VLLM_` variable that vLLM",
        "would heed is named in a warning.",
        "",
        "| variable | or | setting | value |",
        "| --- | --- | --- | --- |",
    ]
    for name, (setting, _, allowed) in ENVIRONMENT.items():
        lines.append(f"| `OCTAVO_{name}` | `VLLM_{name}` | `{setting}` | {allowed} |")
    return lines


def flag_status(words: list[str]) -> str:
    """What Octavo makes of a flag.

    Raises:
        LookupError: it is not known, or known twice.
    """
    name = words[0].removeprefix("--").replace("-", "_")
    own = {f.name for f in [*config_fields(), *section_fields(ServerConfig)]} | {"config"}
    if words[0].startswith("-"):
        missing = [word for word in words if word not in _parser_flags()]
        if missing:
            raise LookupError(f"octavo serve does not know {', '.join(missing)}")
    if name in own and name in FOREIGN:
        raise LookupError(
            f"{name} is Octavo's own by now: take it out of octavo/compat/settings.py"
        )
    if name in own:
        return "the same"
    if name in OFFLOADING:
        return "the same: a short form of `kv_transfer_config` with OffloadingConnector"
    if name in SPECULATIVE:
        return f"the same: `{SPECULATIVE[name]}` of `speculative_config`"
    if name in SECTIONS:
        key, setting, harmless = SECTIONS[name]
        allowed = "".join(f", `{k}` may be `{str(v).lower()}`" for k, v in harmless.items())
        return f"`{key}` is `{setting}`{allowed}; other keys are refused"
    if name in RENAMED:
        return f"`{RENAMED[name]}`"
    if name not in FOREIGN:
        raise LookupError(f"{name} is unknown: put it into octavo/compat/settings.py")
    setting = FOREIGN[name]
    if setting.harmless is None:
        return f"any value is accepted: {setting.why}"
    if setting.kind == "bool":
        values = ["on" if value else "off" for value in setting.harmless]
    else:
        values = [f"`{v}`" for v in setting.harmless if v not in (None, "", [], {})]
    return f"{', '.join(values)}; else refused: {setting.why}".removeprefix("; else ")


def field_status(body: type[Body], words: list[str]) -> str:
    """What Octavo makes of a field of a request's body.

    Raises:
        LookupError: it is not known.
    """
    (name,) = words
    if (body, name) in PARTLY:
        return PARTLY[body, name]
    if name in {field.alias or key for key, field in body.model_fields.items()}:
        return "the same"
    if name in NO_EFFECT:
        return "any value is accepted: it has no effect here"
    if name not in body.unsupported:
        raise LookupError(f"{name} is unknown: put it into octavo/compat/request_fields.py")
    instead = f"use {INSTEAD[name]}" if name in INSTEAD else "leave it out"
    return _unless(body.unsupported[name], instead)


def parameter_status(kind: Any, refused: Any, words: list[str]) -> str:
    """What Octavo makes of a parameter of one of vLLM's classes.

    Raises:
        LookupError: it is not known.
    """
    (name,) = words
    if name not in kind.__struct_fields__:
        raise LookupError(f"{kind.__name__} has no {name}: put it into octavo/sampling_params.py")
    if name not in refused:
        return "the same"
    harmless, instead = refused[name]
    return _unless(harmless, instead)


def route_status(words: list[str]) -> str:
    """What Octavo makes of a route.

    Raises:
        LookupError: it is not known, or there is one that has a reason not to be.
    """
    (route,) = words
    reason = elsewhere(route.split()[1])
    if (route in _routes()) == (reason is not None):
        raise LookupError(f"{route}: put it either into the application or into known_routes.py")
    return "the same" if reason is None else f"none: {reason}"


def metric_status(words: list[str]) -> str:
    """What Octavo makes of a metric, whose name is without the prefix.

    Raises:
        LookupError: it is not known, or there is one that has a reason not to be.
    """
    (name,) = words
    reasons = [
        reason
        for absent, reason in ABSENT_METRICS.items()
        if name == absent or (absent.endswith("_") and name.startswith(absent))
    ]
    if (name in _metrics()) + len(reasons) != 1:
        raise LookupError(
            f"{name}: put it either into octavo/observability/metrics.py or into {__file__}"
        )
    return f"none: {reasons[0]}" if reasons else "the same"


def _unless(harmless: Any, instead: str) -> str:
    values = [f"`{str(v).lower()}`" for v in harmless if v not in (None, "", [], {})]
    return f"{', '.join(values)}; else refused: {instead}".removeprefix("; else ")


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
"""How each section's names are looked up."""

NOTES = {
    "routes": "One that is not here answers 404 with the reason.",
    "metrics": "They begin with `octavo:`, or with `vllm:` under `--metrics-prefix vllm`; the\n"
    "endings `_total`, `_bucket` and so on are left out. Those of HTTP itself, `http_*`, are not\n"
    "counted: a proxy or the access log has them.",
}
"""What stands before a section's table."""

if __name__ == "__main__":
    (FOLDER / "vllm.md").write_text(document())
