"""Generator of the documents that are derived from the code: `python docs/generate.py`."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import BaseModel
from starlette.routing import Route

from octavo.config import (
    BUILTIN_MODEL,
    ConfigField,
    EngineConfig,
    KVEventsConfig,
    KVTransferConfig,
    ServerConfig,
    SpeculativeConfig,
    section_fields,
)
from octavo.config.arguments import shown_default
from octavo.engine.checks import REQUIREMENTS
from octavo.router.config import RouterConfig
from octavo.server.anthropic_schema import CountTokensBody, MessagesBody
from octavo.server.app import ROUTES
from octavo.server.body import Body
from octavo.server.field_docs import attribute_docs, field_doc
from octavo.server.ollama import MEDIA_TYPE
from octavo.server.ollama_schema import OllamaChatBody, OllamaGenerateBody, ShowBody
from octavo.server.openapi import OPERATIONS, InvocationBody
from octavo.server.pooling_schema import (
    ClassifyBody,
    CohereEmbedBody,
    EmbeddingsBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
    SimilarityBody,
    TEIEmbedBody,
    TEIInputsBody,
    TEIPredictBody,
    TEIRerankBody,
)
from octavo.server.responses_schema import ResponseBody
from octavo.server.schema import (
    BatchChatBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    GenerationBody,
    LoadAdapterBody,
    ScaleBody,
    TokenizeBody,
    UnloadAdapterBody,
)
from octavo.server.structured_outputs import StructuredOutputsBody
from octavo.several_models.config import SeveralModelsConfig

HERE = Path(__file__).parent
ADDRESS = "http://localhost:8000"
_NOTE = "<!-- Written by docs/generate.py; a test checks it. -->"


def settings() -> str:
    """Return docs/settings.md, with every setting."""
    parts = [
        "# Settings",
        _NOTE,
        "Every setting is a flag of `octavo serve`, `octavo run` and the benchmarks, and an"
        " argument of `LLM(...)`. Settings of the HTTP server are flags of `octavo serve` only."
        " Flags may contain underscores instead of hyphens. `--no-...` turns off a switch that is"
        " on (True in Python). Sizes are in bytes: 4096, 512M, 1.5G.",
    ]
    for name, section in get_type_hints(EngineConfig).items():
        parts += [f"## {name.capitalize()}", section.__doc__ or ""]
        rows = [
            (f"`{f.flag}`", f"`{f.name}`", _default(f), _meaning(f))
            for f in section_fields(section)
        ]
        parts.append(_table(("Flag", "Argument of LLM", "Default", "Meaning"), rows))
    parts += [
        "### speculative_config",
        'A JSON object on the command line (`--speculative-config \'{"method": "ngram"}\'`), or a'
        " dict in Python.",
        _table(("Key", "Meaning"), _attributes(SpeculativeConfig)),
        "### kv_events_config",
        "A JSON object or a dict; see [caching](scaling.md#kv-events).",
        _table(("Key", "Meaning"), _attributes(KVEventsConfig)),
        "### kv_transfer_config",
        "A JSON object or a dict; see [KV connectors](kv_connectors.md).",
        _table(("Key", "Meaning"), _attributes(KVTransferConfig)),
        "## Settings that need others",
        "Other combinations are rejected before the model is loaded.",
        _table(("Setting", "Needs"), [(row.setting, row.needs) for row in REQUIREMENTS]),
        "## Server",
        ServerConfig.__doc__ or "",
        _table(
            ("Flag", "Default", "Meaning"),
            [(f"`{f.flag}`", _default(f), _meaning(f)) for f in section_fields(ServerConfig)],
        ),
        "## Several models",
        "Flags of `octavo serve` with [several models](several_models.md).",
        _table(
            ("Flag", "Default", "Meaning"),
            [
                (f"`{f.flag}`", _default(f), _meaning(f))
                for f in section_fields(SeveralModelsConfig)
            ],
        ),
        "## Router",
        "Flags of `octavo router` ([docs/deploy.md](deploy.md)), in addition to those of a server.",
        _table(
            ("Flag", "Default", "Meaning"),
            [(f"`{f.flag}`", _default(f), _meaning(f)) for f in section_fields(RouterConfig)],
        ),
    ]
    return _page(parts)


def api() -> str:
    """Return docs/api.md, with every route and every field of a request."""
    parts = [
        "# API",
        _NOTE,
        "The server provides OpenAI's API with vLLM's additions. `/docs` shows it in a browser;"
        " `/openapi.json` also describes the answers. The examples use this `client`:",
        _code(
            "python",
            "from openai import OpenAI\n\n"
            f'client = OpenAI(base_url="{ADDRESS}/v1", api_key="none")',
        ),
        "If the server has an API key (`--api-key`), pass the key to the client, and"
        " `-H 'Authorization: Bearer KEY'` to `curl`. A field with the value null counts as"
        " missing. The server rejects fields of other servers that it does not support. It lists"
        " unknown fields in the header `X-Octavo-Ignored-Fields`, or rejects them with"
        " `--strict-fields`. [Files and batches](batches.md), and [vectors and"
        " scores](pooling_http.md), have pages of their own.",
    ]
    for route in routes():
        (method,) = route.methods - {"HEAD"}
        parts += [f"## {method} {_shown(route.path)}", _first_line(route.endpoint)]
        parts += [_code("sh", curl_line(route)), _code("python", openai_line(route))]
        body = OPERATIONS[route.path].body
        if body is InvocationBody:
            parts.append("Fields of a chat or of a completion.")
        elif body is not None:
            rows = _fields(body, ())
            if issubclass(body, GenerationBody):
                rows = _fields(body, GenerationBody.model_fields)
                parts.append("These fields and the [fields of both](#fields-of-both):")
            parts.append(_table(("Field", "Type", "Meaning"), rows))
    parts += [
        "## Fields of both",
        "Fields of `/v1/completions` and `/v1/chat/completions`:",
        _table(
            ("Field", "Type", "Meaning"),
            _fields(GenerationBody, StructuredOutputsBody.model_fields)
            + _fields(StructuredOutputsBody, ()),
        ),
    ]
    inner_bodies = sorted(_inner_bodies().items())
    for name, inner in [*((body.__name__, body) for body in _POOLED), *inner_bodies]:
        parts += [f"## {name}", _first_line(inner)]
        parts.append(_table(("Field", "Type", "Meaning"), _fields(inner, ())))
    return _page(parts)


def files() -> str:
    """Return docs/files.md, with every module of the package."""
    package = HERE.parent / "octavo"
    folders = sorted(path.parent for path in package.glob("*/__init__.py"))
    parts = [
        "# Files",
        _NOTE,
        "Every module of `octavo/`, with what its docstring says first."
        " [Architecture](architecture.md#folders-and-files) says what each folder is for.",
        "## octavo",
        _modules(package, sorted(package.glob("*.py"))),
    ]
    for folder in folders:
        parts += [f"## {folder.name}", _about(folder / "__init__.py")]
        parts.append(_modules(folder, sorted(folder.rglob("*.py"))))
    return _page(parts)


DOCUMENTS: dict[str, Callable[[], str]] = {
    "settings.md": settings,
    "api.md": api,
    "files.md": files,
}
"""Functions that generate the files of this folder."""

_EXAMPLES: dict[type[BaseModel], dict[str, Any]] = {
    InvocationBody: {"messages": [{"role": "user", "content": "Hello!"}]},
    CompletionBody: {"model": BUILTIN_MODEL, "prompt": "Once upon a time", "max_tokens": 20},
    ChatBody: {"model": BUILTIN_MODEL, "messages": [{"role": "user", "content": "Hello!"}]},
    BatchChatBody: {"messages": [[{"role": "user", "content": "Hello!"}]]},
    MessagesBody: {"max_tokens": 20, "messages": [{"role": "user", "content": "Hello!"}]},
    CountTokensBody: {"messages": [{"role": "user", "content": "Hello!"}]},
    ResponseBody: {"model": BUILTIN_MODEL, "input": "Hello!", "max_output_tokens": 20},
    OllamaChatBody: {
        "model": BUILTIN_MODEL,
        "messages": [{"role": "user", "content": "Hello!"}],
    },
    OllamaGenerateBody: {"model": BUILTIN_MODEL, "prompt": "Hello!"},
    ShowBody: {"model": BUILTIN_MODEL},
    GenerateBody: {"token_ids": [72, 105], "sampling_params": {"max_tokens": 5}},
    TokenizeBody: {"prompt": "Once upon a time"},
    DetokenizeBody: {"tokens": [72, 105]},
    LoadAdapterBody: {"lora_name": "poems", "lora_path": "poems-v2"},
    UnloadAdapterBody: {"lora_name": "poems"},
    ScaleBody: {"new_data_parallel_size": 2},
}
_CLIENT_METHODS = {
    "/v1/models": "models.list",
    "/v1/models/{model:path}": "models.retrieve",
    "/v1/completions": "completions.create",
    "/v1/chat/completions": "chat.completions.create",
    "/v1/responses": "responses.create",
}
"""Methods of OpenAI's client by route."""
_ELSEWHERE = ("/v1/responses/", "/v1/conversations", "/v1/files", "/v1/batches", "/v1/engine")
# Routes of docs/pooling_http.md, which needs another model than the built-in one.
_ELSEWHERE += ("/v1/embeddings", "/pooling", "/classify", "/v1/classify", "/score", "/v1/score")
_ELSEWHERE += ("/rerank", "/v1/rerank", "/v2/rerank", "/embed", "/predict", "/similarity", "/info")
# Those of docs/speech.md
_ELSEWHERE += ("/v1/audio",)
_ELSEWHERE += ("/api/embed", "/v1/embed", "/v2/embed")
_POOLED: tuple[type[Body], ...] = (
    EmbeddingsBody,
    PoolingBody,
    ClassifyBody,
    ScoreBody,
    RerankBody,
    TEIRerankBody,
    CohereEmbedBody,
    TEIEmbedBody,
    TEIInputsBody,
    TEIPredictBody,
    SimilarityBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
)
"""Bodies of these routes."""


def curl_line(route: Route) -> str:
    """Return a `curl` command that requests a route."""
    url = ADDRESS + _address(route.path)
    if "GET" in route.methods:
        return f"curl {url}"
    body = OPERATIONS[route.path].body
    line = f"curl {url} -H 'Content-Type: application/json'"
    return f"{line} -X POST" if body is None else f"{line} -d '{json.dumps(_EXAMPLES[body])}'"


def openai_line(route: Route) -> str:
    """Return code that requests a route with OpenAI's client."""
    operation = OPERATIONS[route.path]
    given = {} if operation.body is None else _EXAMPLES[operation.body]
    method = _CLIENT_METHODS.get(route.path)
    if method is not None:
        arguments = [f"{name}={json.dumps(value)}" for name, value in given.items()]
        if "{" in route.path:
            arguments.append(json.dumps(BUILTIN_MODEL))
        line = f"client.{method}({', '.join(arguments)})"
        if len(line) > 100:  # as ruff formats it
            line = f"client.{method}(\n    {', '.join(arguments)}\n)"
        return line
    verb = "get" if "GET" in route.methods else "post"
    streams = MEDIA_TYPE in operation.responses()[200]["content"]
    kind = "str" if operation.answer is None or streams else "object"
    body = f", body={json.dumps(given)}" if given else ""
    line = f'client.{verb}("{ADDRESS}{_address(route.path)}", cast_to={kind}{body})'
    if len(line) > 100:  # as ruff formats it
        inner = line[line.index("(") + 1 : -1].replace(", cast_to", ",\n    cast_to")
        line = f"client.{verb}(\n    {inner.replace(', body', f',{chr(10)}    body')},\n)"
    return line


def described_elsewhere(path: str) -> bool:
    """Return True if a page of its own describes a route."""
    return path.startswith(_ELSEWHERE)


def routes() -> Iterator[Route]:
    """Return the routes of docs/api.md."""
    found: dict[str, Route] = {}  # the first route of each address: GET before POST
    for path, endpoint, method in ROUTES:
        if not described_elsewhere(path):
            found.setdefault(path, Route(path, endpoint, methods=[method]))
    return iter(found.values())


def _inner_bodies() -> dict[str, type[Body]]:
    """Return the classes of objects in the bodies by name."""
    found: dict[str, type[Body]] = {}
    todo = [operation.body for operation in OPERATIONS.values()]
    while todo:
        body = todo.pop()
        if body is not None and issubclass(body, Body):
            found |= {inner.__name__: inner for inner in body.inner.values()}
            todo += body.inner.values()
    return found


def _fields(body: type[Body], without: Iterable[str]) -> list[tuple[str, str, str]]:
    schema = body.model_json_schema()
    rows: list[tuple[str, str, str]] = []
    for name, info in body.model_fields.items():
        if name in without:
            continue
        shown = info.alias or name
        need = "Required. " if shown in schema.get("required", ()) else ""
        kind = _type(schema["properties"][shown])
        rows.append((f"`{shown}`", kind, need + field_doc(body, shown)))
    return rows


def _type(schema: dict[str, Any]) -> str:
    """Return a description of a JSON schema's type."""
    if "anyOf" in schema:
        kinds = {_type(part) for part in schema["anyOf"] if part.get("type") != "null"}
        return " or ".join(sorted(kinds))  # typing may return equal unions in different orders
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "const" in schema or "enum" in schema:
        values = schema.get("enum") or [schema["const"]]
        return " or ".join(f"`{json.dumps(value)}`" for value in values)
    if schema.get("type") == "array":
        items = _type(schema.get("items", {}))
        return f"list of ({items})" if " or " in items else f"list of {items}"
    return str(schema.get("type", "any"))


def _default(field: ConfigField) -> str:
    if field.default in (None, [], {}, ""):
        return ""
    return f"`{shown_default(field)}`"


def _meaning(field: ConfigField) -> str:
    choices = field.choices
    if choices is None or len(choices) < 2:
        return field.doc
    return f"{field.doc} One of {', '.join(f'`{choice}`' for choice in choices)}."


def _attributes(kind: type) -> list[tuple[str, str]]:
    """Return the attributes of a class with their docstrings."""
    return [(f"`{name}`", text) for name, text in attribute_docs(kind).items()]


def _address(path: str) -> str:
    path = path.replace("{model:path}", BUILTIN_MODEL).replace("{stream_id:path}", "cmpl-abc")
    return path.replace("{request_id:path}", "cmpl-abc")


def _shown(path: str) -> str:
    return path.replace(":path", "")


def _first_line(documented: object) -> str:
    return (inspect.getdoc(documented) or "").partition("\n")[0]


def _modules(folder: Path, files: Iterable[Path]) -> str:
    rows = [(f"`{x.relative_to(folder)}`", _about(x)) for x in files if x.name != "__init__.py"]
    return _table(("File", "Content"), rows)


def _about(file: Path) -> str:
    """Return the first paragraph of a module's docstring."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split())


def _code(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _page(parts: Iterable[str]) -> str:
    return "\n\n".join(map(_filled, parts)) + "\n"


def _filled(part: str) -> str:
    """Wrap prose at 100 characters; leave other text unchanged."""
    if part.startswith(("#", "|", "```", "<")):
        return part
    return textwrap.fill(part, 100, break_long_words=False, break_on_hyphens=False)


def main() -> None:
    """Write all documents."""
    for name, make in DOCUMENTS.items():
        (HERE / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
