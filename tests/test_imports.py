"""Imports: only downwards, as docs/architecture.md states; no torch in the control plane."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

import octavo

PACKAGE = Path(octavo.__file__).parent

ARCHITECTURE = PACKAGE.parent / "docs" / "architecture.md"
# Above all others; the document does not mention it.
TOP = "__main__"


def stated_order() -> list[set[str]]:
    """Return the stated order, from top to bottom: units that may not import upwards.

    A unit is a folder or file of the package, or a file of a folder that has a separate place.
    """
    text = ARCHITECTURE.read_text()
    begin = text.index("\n`", text.index("Imports go down only")) + 1
    line = text[begin + 1 : text.index("`", begin + 1)]
    return [{TOP}, *({*re.findall(r"[\w.]+", part)} for part in line.split("->"))]


LAYERS = stated_order()
RANK = {unit: rank for rank, units in enumerate(LAYERS) for unit in units}


def name_of(path: Path) -> str:
    """Return "engine.core" for octavo/engine/core.py; a folder's name for its __init__.py."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {name_of(p): p for p in sorted(PACKAGE.rglob("*.py")) if name_of(p) != "__init__"}


def unit_of(module: str) -> str:
    folder, _, _ = module.rpartition(".")
    return module if module in RANK or not folder else unit_of(folder)


def imported_modules(path: Path) -> set[str]:
    """Return the package's modules that a file imports anywhere, also for types only and inside of
    functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {n.removeprefix("octavo.") for n in names} & MODULES.keys()
    return found


@functools.cache  # not at the import: each process that runs tests imports this file
def imports() -> dict[str, set[str]]:
    return {name: imported_modules(path) - {name} for name, path in MODULES.items()}


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down_only(module):
    unit = unit_of(module)
    assert unit in RANK, f"{unit} has no place in docs/architecture.md's order"
    for other in imports()[module]:
        if unit_of(other) != unit:
            assert RANK[unit_of(other)] > RANK[unit], f"{module} must not import {other}"


def test_no_module_imports_itself_by_way_of_others():
    """Every import of every module counts, also those inside of functions and for types."""
    state: dict[str, bool] = {}  # True after all imports of the module have been checked

    def visit(module: str, path: list[str]) -> None:
        circle = [*path[path.index(module) :], module] if module in path else []
        assert not circle, " -> ".join(circle)
        if module not in state:
            for other in sorted(imports()[module]):
                visit(other, [*path, module])
            state[module] = True

    for module in MODULES:
        visit(module, [])


def test_the_order_names_only_what_there_is():
    units = {unit_of(module) for module in MODULES}
    assert set(RANK) == units | {TOP}


CONTROL_PLANE = [
    "octavo",
    "octavo.cli",
    "octavo.server.app",
    "octavo.frontend.async_llm",
    "octavo.fleet.mp_client",
    "octavo.plan.memory_plan",
    "octavo.scheduler.scheduler",
    "octavo.kv_cache.manager",
    "octavo.models.spec",
    "octavo.models.hub",
    "octavo.executor.base",
    "octavo.platforms.registry",
    "octavo.engine.assemble",
    "octavo.text.tokenizer",
    "octavo.observability.metrics",
    "octavo.engine.core",
    "octavo.bench.serve",
    "octavo.bench.latency",
    "octavo.bench.throughput",
    "octavo.bench.startup",
    "octavo.simulation.simulate",
    "octavo.simulation.engine_probe",
    "octavo.model_tools.inspect",
]


def import_each(modules, prepare="", check="pass"):
    """Run a process that imports modules in turn; return its status."""
    code = f"import importlib, sys\n{prepare}\nfor name in sys.argv[1:]:\n"
    code += f"    importlib.import_module(name)\n    {check}\n"
    return subprocess.run([sys.executable, "-c", code, *modules], check=False).returncode


def test_control_plane_imports_no_torch():
    assert import_each(CONTROL_PLANE, check="assert 'torch' not in sys.modules, name") == 0


def test_plans_need_no_compiled_extension():
    modules = [
        "octavo.plan.memory_plan",
        "octavo.engine.core",
        "octavo.scheduler.scheduler",
        "octavo.models.registry",
        "octavo.platforms.registry",
    ]
    assert import_each(modules, prepare="sys.modules['octavo._native'] = None") == 0


# Modules that few models and settings need.
RARE = {
    "importlib.metadata",
    "octavo.checkpoints.gguf.file",
    "octavo.models.families.gemma3",
    "octavo.models.families.splade",
    "octavo.models.heads",
    "octavo.quantization.methods",
    "tqdm",
}
# Modules that only other uses need, so that a start must not wait for them.
LEAN = {
    "octavo.cli": {"torch", "numpy", "tokenizers", "jinja2", "fastapi", "zmq"} | RARE,
    "octavo.llm": {"jinja2", "fastapi", "zmq", "prometheus_client", "httpx"} | RARE,
    "octavo.terminal.answers": {"numpy", "httpx", "rich"},
    # These two precede the start of the engine's interpreter, and the sending of its setup.
    "octavo.fleet.process": {"numpy", "pydantic", "zmq", "octavo.plan.memory_plan"},
    "octavo.server.run": {"fastapi", "prometheus_client", "tokenizers", "uvicorn"} | RARE,
    # Modules of processes, with what they import at their start.
    "octavo.server.serve": {"fastapi", "jinja2", "octavo.engine.core", "octavo.server.openapi"}
    | RARE,
    "octavo.server.api_server_process": {"fastapi", "jinja2", "octavo.engine.core"},
    "octavo.server.coordinator_process": {"fastapi", "jinja2", "octavo.engine.core", "uvicorn"},
    "octavo.text.template_process": {"numpy", "tokenizers", "fastapi", "pydantic", "zmq"},
    "octavo.engine.core_process": {"tokenizers", "jinja2", "fastapi", "prometheus_client"} | RARE,
    "octavo.executor.uniproc": {"asyncio", "octavo.worker.spec_decode.eagle"} | RARE,
    "octavo.executor.worker_process": {"tokenizers", "jinja2", "fastapi", "prometheus_client"},
    "octavo.structured_output.process": {"jinja2", "fastapi", "prometheus_client"},
}
HEAVY = {"huggingface_hub", "matplotlib", "ray", "torch", "transformers", "triton", "xgrammar"}


@pytest.mark.parametrize("module", LEAN)
def test_imports_bring_no_more_than_needed(module):
    code = f"import sys, {module}; print(*({LEAN[module] | HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_no_body_of_a_request_is_compiled_before_the_first_one():
    code = """
import octavo.server.serve
from octavo.server.body import Body

def bodies(kind):
    return [kind, *(body for child in kind.__subclasses__() for body in bodies(child))]

print(len(bodies(Body)), *(body.__name__ for body in bodies(Body) if body.__pydantic_complete__))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    number, *compiled = done.stdout.split()
    assert int(number) > 50
    assert compiled == []


def test_public_names():
    assert set(octavo.__all__) == {
        "LLM",
        "AsyncEngineArgs",
        "AsyncLLM",
        "AsyncLLMEngine",
        "BeamSearchParams",
        "ClassificationOutput",
        "ClassificationRequestOutput",
        "CompletionOutput",
        "EmbeddingOutput",
        "EmbeddingRequestOutput",
        "EmbedsPrompt",
        "EngineArgs",
        "LLMEngine",
        "LoRARequest",
        "PoolingOutput",
        "PoolingParams",
        "PoolingRequestOutput",
        "RequestOutput",
        "RequestOutputKind",
        "SamplingParams",
        "ScoringOutput",
        "ScoringRequestOutput",
        "SentenceEncoder",
        "TextPrompt",
        "TokensPrompt",
        "__version__",
    }
    for name in octavo.__all__:
        assert getattr(octavo, name) is not None
