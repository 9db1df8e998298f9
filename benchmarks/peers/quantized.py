"""Quantized checkpoints of a random model, in formats that people download.

`octavo convert` writes those of compressed-tensors and FP8. AWQ and GPTQ are written here: every
number is rounded to the nearest of 16 levels in the range of its group.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

FORMATS = ("W4A16", "AWQ", "GPTQ", "W8A16", "FP8")
CONVERTED = {"W4A16": "int4", "W8A16": "int8", "FP8": "fp8"}
"""Name of a format, and its name in `octavo convert`."""
GROUP = 128
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

_AWQ: dict[str, Any] = {
    "version": "gemm",
    "zero_point": True,
    "modules_to_not_convert": ["lm_head"],
}
_GPTQ: dict[str, Any] = {
    "checkpoint_format": "gptq",
    "sym": True,
    "desc_act": False,
    "lm_head": False,
}

Array = np.ndarray[Any, np.dtype[Any]]


def make_quantized(source: Path, target: Path, format: str) -> None:
    """Write a checkpoint in a format, with the tokenizer of the source.

    Args:
        source: folder of a checkpoint in bfloat16.
        target: folder to create.
        format: one of `FORMATS`.
    """
    part = target.with_name(f"part-{target.name}")
    shutil.rmtree(part, ignore_errors=True)
    if format in CONVERTED:
        words = ["convert", source, part, "--to", CONVERTED[format], "--disable-tqdm"]
        subprocess.run([sys.executable, "-m", "octavo", *map(str, words)], check=True)
    else:
        _quantize(source, part, format)
    part.rename(target)


def _quantize(source: Path, target: Path, format: str) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = {}
    for file in source.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            module = name.removesuffix(".weight")
            if not module.endswith("_proj"):
                tensors[name] = tensor
                continue
            weight = tensor.float().numpy()
            for kind, array in (_awq(weight) if format == "AWQ" else _gptq(weight)).items():
                tensors[f"{module}.{kind}"] = torch.from_numpy(np.ascontiguousarray(array))
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    described = {"quant_method": format.lower(), "bits": 4, "group_size": GROUP}
    config["quantization_config"] = described | (_AWQ if format == "AWQ" else _GPTQ)
    config["torch_dtype"] = config["dtype"] = "float16"  # AWQ and GPTQ have scales of float16
    (target / "config.json").write_text(json.dumps(config))


def _awq(weight: Array) -> dict[str, Array]:
    """Return the tensors of AutoAWQ's gemm version; a group has a scale and a zero point."""
    grouped = weight.reshape(len(weight), -1, GROUP)
    low, high = np.minimum(grouped.min(-1), 0), np.maximum(grouped.max(-1), 0)
    scales = ((high - low) / 15).astype(np.float16)
    zeros = np.clip(np.rint(-low / scales), 0, 15)
    codes = np.clip(np.rint(grouped / scales[..., None]) + zeros[..., None], 0, 15)

    def packed(numbers: Array) -> Array:
        turned = numbers.T
        return _pack(turned.reshape(len(turned), -1, 8)[..., _AWQ_ORDER].reshape(turned.shape))

    return {
        "qweight": packed(codes.reshape(weight.shape)),
        "qzeros": packed(zeros),
        "scales": scales.T,
    }


def _gptq(weight: Array) -> dict[str, Array]:
    """Return the tensors of a symmetric GPTQ checkpoint; each zero point is 8, stored as 7."""
    grouped = weight.reshape(len(weight), -1, GROUP)
    scales = (np.abs(grouped).max(-1) / 7.5).astype(np.float16)
    codes = np.clip(np.rint(grouped / scales[..., None]) + 8, 0, 15)
    return {
        "qweight": _pack(codes.reshape(weight.shape)).T,
        "qzeros": _pack(np.full_like(scales.T, 7)),
        "scales": scales.T,
        "g_idx": np.arange(weight.shape[1], dtype=np.int32) // GROUP,
    }


def _pack(codes: Array) -> Array:
    """Pack eight numbers along the last axis into a word, the first in the lowest bits."""
    grouped = codes.reshape(*codes.shape[:-1], -1, 8).astype(np.uint32)
    words: Array = np.bitwise_or.reduce(grouped << np.arange(0, 32, 4, dtype=np.uint32), -1)
    return words.view(np.int32)
