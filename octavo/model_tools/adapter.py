"""Description of an adapter, for `octavo inspect`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.checkpoints.adapter import CONFIG
from octavo.checkpoints.gguf.adapter import is_gguf_adapter
from octavo.model_tools.tables import make_console, make_table, mib, print_pairs
from octavo.models.adaptable_model import target_of
from octavo.models.adapters import open_adapter_file
from octavo.models.expert_adapters import bare_module
from octavo.system.tensor import itemsize
from octavo.terminal.screen import harmless


def is_adapter(path: Path) -> bool:
    """Return True for the folder of an adapter, or for an adapter in GGUF."""
    if path.is_dir():
        return (path / CONFIG).exists() and not (path / "config.json").exists()
    return is_gguf_adapter(path)


def describe_adapter(path: Path) -> dict[str, Any]:
    """Return the description of an adapter, without its numbers.

    Returns:
        path, kind (such as "LoRA"), invocation_tokens (those that begin an activated LoRA, else
        empty), base_model (its name, or None), `parameters`, `nbytes` in the file, dtypes;
        `modules`: for each kind of module, such as q_proj, `number`, `ranks` (in ascending order),
        `scales` (factors of the changes, in ascending order) and `parameters`;
        `replaced`: the number of parameters of each module that it replaces (modules_to_save).

    Raises:
        AdapterError: the adapter is damaged, or of a kind that is not supported.
    """
    file = open_adapter_file(path)
    kinds: dict[str, dict[str, Any]] = {}
    nbytes = parameters = 0
    dtypes: set[str] = set()
    for name, factors in file.factors.items():
        bare, _ = bare_module(name)
        last, is_fused = target_of(bare), bare.endswith(".experts")
        kind = kinds.setdefault(
            last, {"number": 0, "ranks": set(), "scales": set(), "parameters": 0}
        )
        count = 0
        for tensor in factors.tensors.values():
            count += math.prod(tensor.shape)
            nbytes += math.prod(tensor.shape) * itemsize(tensor.dtype)
            dtypes.add(tensor.dtype)
        kind["number"] += 1
        if not is_fused:  # the number of experts is unknown
            kind["ranks"].add(factors.rank)
            kind["scales"].add(file.scale(name))
        kind["parameters"] += count
        parameters += count
    replaced: dict[str, int] = {}
    for name, tensors in file.trained.items():
        replaced[name] = sum(math.prod(tensor.shape) for tensor in tensors.values())
        for tensor in tensors.values():
            nbytes += math.prod(tensor.shape) * itemsize(tensor.dtype)
            dtypes.add(tensor.dtype)
        parameters += replaced[name]
    for kind in kinds.values():
        kind |= {"ranks": sorted(kind["ranks"]), "scales": sorted(kind["scales"])}
    return {
        "path": str(path),
        "kind": file.kind,
        "invocation_tokens": list(file.invocation_tokens),
        "base_model": file.base,
        "parameters": parameters,
        "nbytes": nbytes,
        "dtypes": sorted(dtypes),
        "modules": kinds,
        "replaced": replaced,
    }


def print_adapter(result: Mapping[str, Any]) -> None:
    """Print a description."""
    console = make_console()
    lines = {
        "adapter": result["kind"],
        **(
            {"begins at the tokens": str(tokens)} if (tokens := result["invocation_tokens"]) else {}
        ),
        "base model": result["base_model"] or "not named",
        "parameters": f"{result['parameters']:,}",
        "in the file": f"{mib(result['nbytes'])}, {', '.join(result['dtypes'])}",
    }
    if result["replaced"]:
        sizes = (f"{harmless(name)} ({n:,})" for name, n in result["replaced"].items())
        lines["replaces"] = f"{', '.join(sizes)} parameters"
    print_pairs(console, harmless(result["path"]), lines)
    table = make_table("modules", ("", "number", "rank", "factor", "parameters"), 1)
    for name, kind in result["modules"].items():
        table.add_row(
            harmless(name),
            str(kind["number"]),
            _range(kind["ranks"]),
            _range([f"{scale:.4g}" for scale in kind["scales"]]),
            f"{kind['parameters']:,}",
        )
    console.print(table)


def _range(numbers: list[Any]) -> str:
    """Return the only number, or the first and the last one; unknown ones are a dash."""
    if not numbers:
        return "-"
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
