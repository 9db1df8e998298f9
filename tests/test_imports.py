"""The structure that DESIGN promises: imports go down only, and the control plane has no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import octavo

PACKAGE = Path(octavo.__file__).parent

# From top to bottom; a module may import from its own line's unit and from lines below.
LAYERS = [
    {"__main__"},
    {"cli"},
    {"bench"},
    {"server"},
    {"llm", "arguments"},
    {"engine"},
    {"executor"},
    {"worker", "scheduler"},
    {"kv_cache", "chat_template", "template_process"},
    {"models", "sampling", "tokenizer", "template_client"},
    {"layers"},
    {"attention", "quantization"},
    {"kernels", "device"},
    {"metrics", "request", "profiler"},
    {"messages"},
    {"sampling_params", "config", "outputs"},
    {"errors", "logs", "offload", "dtypes"},
]
RANK = {unit: rank for rank, units in enumerate(LAYERS) for unit in units}


def unit_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_units(path: Path) -> set[str]:
    units = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            parts = node.module.split(".")
            if parts == ["octavo"]:
                units |= {alias.name for alias in node.names}
            elif parts[0] == "octavo":
                units.add(parts[1])
        elif isinstance(node, ast.Import):
            units |= {a.name.split(".")[1] for a in node.names if a.name.startswith("octavo.")}
    return units


MODULES = [p for p in sorted(PACKAGE.rglob("*.py")) if unit_of(p) != "__init__"]


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down_only(path):
    unit = unit_of(path)
    assert unit in RANK, f"{unit} has no place in the layers"
    for other in imported_units(path):
        if other == unit or other not in RANK:  # public names such as octavo.__version__
            continue
        assert RANK[other] > RANK[unit], f"{unit} must not import {other}"


CONTROL_PLANE = [
    "octavo",
    "octavo.cli",
    "octavo.server.app",
    "octavo.engine.async_llm",
    "octavo.engine.core_client",
    "octavo.engine.memory_plan",
    "octavo.scheduler.scheduler",
    "octavo.kv_cache.manager",
    "octavo.models.spec",
    "octavo.models.hub",
    "octavo.executor.base",
    "octavo.tokenizer",
    "octavo.metrics",
    "octavo.engine.core",
    "octavo.bench.serve",
    "octavo.bench.latency",
    "octavo.bench.throughput",
    "octavo.bench.startup",
]


@pytest.mark.parametrize("module", CONTROL_PLANE)
def test_control_plane_imports_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# What a start must not wait for: a library that only other uses need.
LEAN = {
    "octavo.cli": {"torch", "numpy", "tokenizers", "jinja2", "fastapi", "zmq", "tqdm"},
    "octavo.llm": {"torch", "jinja2", "fastapi", "zmq", "prometheus_client", "huggingface_hub"},
    "octavo.server.run": {"torch", "jinja2"},
    "octavo.template_process": {"torch", "numpy", "tokenizers", "fastapi", "pydantic", "zmq"},
    "octavo.engine.core_process": {"torch", "tokenizers", "jinja2", "fastapi", "prometheus_client"},
}


@pytest.mark.parametrize("module", LEAN)
def test_imports_bring_no_more_than_needed(module):
    code = f"import sys, {module}; print(*({LEAN[module]!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_public_names():
    assert set(octavo.__all__) == {
        "LLM",
        "CompletionOutput",
        "RequestOutput",
        "RequestOutputKind",
        "SamplingParams",
        "__version__",
    }
    for name in octavo.__all__:
        assert getattr(octavo, name) is not None
