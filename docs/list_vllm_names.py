"""Lister of vLLM's names for docs/vllm_names.txt. Run it with the Python that has vLLM:

python docs/list_vllm_names.py > docs/vllm_names.txt
"""

import ast
import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Servers that do not answer clients.
_OTHER_SERVERS = ("cli/", "launchers/dp_supervisor.py")
# Routes that FastAPI and the instrumentator add.
_MADE = {"GET /docs", "GET /metrics", "GET /openapi.json", "GET /redoc"}


def main() -> None:
    """Print every section, with one line for each name and its short forms."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        raise SystemExit("vLLM is not installed here")
    root = Path(spec.origin).parent
    flags = list(_flags())
    known = {words[0].removeprefix("--").replace("-", "_") for words in flags}
    arguments = sorted(set(_arguments()) - known)
    print_section("flags and arguments", [*map(" ".join, flags), *arguments])
    for title, module, models in (
        ("fields of /v1/completions", "openai.completion", ["CompletionRequest"]),
        ("fields of /v1/chat/completions", "openai.chat_completion", ["ChatCompletionRequest"]),
        (
            "fields of /tokenize",
            "serve.tokenize",
            ["TokenizeCompletionRequest", "TokenizeChatRequest"],
        ),
        ("fields of /detokenize", "serve.tokenize", ["DetokenizeRequest"]),
    ):
        print_section(title, _fields(f"vllm.entrypoints.{module}.protocol", models))
    print_section("fields of SamplingParams", _parameters("vllm", "SamplingParams"))
    sampling = "vllm.sampling_params"
    print_section(
        "fields of StructuredOutputsParams", _parameters(sampling, "StructuredOutputsParams")
    )
    print_section("fields of BeamSearchParams", _parameters(sampling, "BeamSearchParams"))
    print_section("routes", {*_routes(root / "entrypoints"), *_MADE})
    print_section("metrics", _metrics(root))


def print_section(title: str, names: Any) -> None:
    """Print a heading and the sorted names."""
    print(f"# {title}")
    for name in sorted(set(names)):
        print(name)


def _flags() -> Iterator[list[str]]:
    module = importlib.import_module("vllm.entrypoints.launchers.cli_args")
    parser_type = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser
    for action in module.make_arg_parser(parser_type())._actions:
        words = [word for word in action.option_strings if not word.startswith("--no-")]
        if words and action.dest != "help":
            # The name first, then alternative names, then short ones. The parser does not list -O.
            name = "--" + action.dest.replace("_", "-")
            short = ["-O"] if name == "--optimization-level" else []
            yield sorted(words, key=lambda word: (word != name, word[1] != "-", word)) + short


def _arguments() -> Iterator[str]:
    vllm = importlib.import_module("vllm")
    yield from (f.name for f in dataclasses.fields(vllm.AsyncEngineArgs) if f.name[0] != "_")
    yield from set(inspect.signature(vllm.LLM.__init__).parameters) - {"self", "kwargs"}


def _fields(module: str, models: list[str]) -> set[str]:
    found = importlib.import_module(module)
    return {
        field.alias or name
        for model in models
        for name, field in getattr(found, model).model_fields.items()
    }


def _parameters(module: str, name: str) -> list[str]:
    parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters
    # Exclude attributes that vLLM itself sets.
    return [p for p in parameters if p[0] != "_" and p != "output_text_buffer_length"]


def _routes(folder: Path) -> Iterator[str]:
    methods = {"get", "post", "put", "delete", "websocket"}
    for path in folder.rglob("*.py"):
        if str(path.relative_to(folder)).startswith(_OTHER_SERVERS):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            address = _text(node.args[0]) if node.args else None
            if address is None or not address.startswith("/"):
                continue
            if node.func.attr in methods:
                yield f"{node.func.attr.upper()} {address}"
            elif node.func.attr == "add_api_route":
                yield f"POST {address}"


def _metrics(root: Path) -> Iterator[str]:
    for path in root.rglob("*.py"):
        if "benchmarks" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(errors="replace"))):
            name = re.fullmatch(r"vllm:(\w+)", _text(node) or "")
            if name is not None:
                yield name[1]


def _text(node: ast.AST) -> str | None:
    value = node.value if isinstance(node, ast.Constant) else None
    return value if isinstance(value, str) else None


if __name__ == "__main__":
    main()
