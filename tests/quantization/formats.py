"""A quantized Llama in every format of checkpoints, GGUF files aside."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.quantization import (
    test_awq,
    test_bitsandbytes,
    test_compressed_tensors,
    test_fp4,
    test_fp8,
    test_gptq,
)
from tests.quantization.harness import SIZES, Array, Folders, Quantize
from tests.quantization.test_compressed_tensors import TOKENS, description


@dataclass(frozen=True)
class Format:
    """Modules and their description."""

    quantize: Quantize
    description: dict[str, Any]
    atol: float = 1e-7
    """Greatest error of a weight in memory: numbers of NF4 have 16 bits."""

    def make(self, folder: Path, **sizes: Any) -> Folders:
        """Write a model.

        Args:
            folder: for the model and its dequantized twin.
            sizes: fields of its config.json.
        """
        return Folders(folder, self.quantize, SIZES | sizes, **self.description)


def _but_lm_head(make: Any, **options: Any) -> Quantize:
    def quantize(rng: np.random.Generator, name: str, rows: int, inputs: int) -> Any:
        return None if name == "lm_head" else make(rng, rows, inputs, **options)

    return quantize


def _ints(activations: dict[str, Any] | None = None, **options: Any) -> Format:
    """Return integers of compressed-tensors; the options are those of `module`."""
    packed = options.get("packed", True)
    described = description(
        "pack-quantized" if packed else "int-quantized",
        activations=activations,
        num_bits=options.get("bits", 4),
        symmetric=options.get("symmetric", True),
        group_size=options.get("group"),
    )
    described["ignore"] = ["lm_head"]
    return Format(_but_lm_head(test_compressed_tensors.module, **options), described)


def _ordered(rng: np.random.Generator, rows: int, inputs: int) -> Any:
    order = np.random.default_rng(inputs).permutation(inputs)
    return test_compressed_tensors.module(rng, rows, inputs, group=32, symmetric=False, order=order)


def _floats(format: str, module: Any, **weights: Any) -> Format:
    """Return floats of compressed-tensors."""
    described = description(format, type="float", **weights) | {"ignore": ["lm_head"]}
    return Format(_but_lm_head(module), described)


def _fp8(kind: str) -> Any:
    """Return a maker of modules whose scales have the name in compressed-tensors."""

    def module(rng: np.random.Generator, rows: int, inputs: int) -> Any:
        stored, weight = test_fp8.module(rng, rows, inputs, kind)
        return {name.removesuffix("_inv"): array for name, array in stored.items()}, weight

    return module


def _mxfp8(rng: np.random.Generator, rows: int, inputs: int) -> tuple[dict[str, Array], Array]:
    exponents = rng.integers(112, 118, (rows, inputs // 32)).astype(np.uint8)
    codes = (rng.standard_normal((rows, inputs)) * 60).astype(test_fp8.E4M3)
    scales = 2.0 ** (exponents.astype(np.float32) - 127)
    stored: dict[str, Array] = {"weight": codes, "weight_scale": exponents}
    return stored, codes.astype(np.float32) * scales.repeat(32, 1)


def _static(rng: np.random.Generator, rows: int, inputs: int) -> Any:
    stored, weight = test_fp8.module(rng, rows, inputs, "tensor")
    return stored | {"input_scale": np.asarray(0.5, np.float32)}, weight


def _bitnet(rng: np.random.Generator, rows: int, inputs: int) -> tuple[dict[str, Array], Array]:
    codes = rng.integers(-1, 2, (rows, inputs))
    quarters = (codes + 1).astype(np.uint8).reshape(4, rows // 4, inputs)
    packed = np.bitwise_or.reduce(quarters << np.array([0, 2, 4, 6], np.uint8)[:, None, None])
    divisor = np.array([rng.uniform(2, 4)], np.float32)
    return {"weight": packed, "weight_scale": divisor}, codes * (1 / divisor)


def _rounded(rng: np.random.Generator, rows: int, inputs: int) -> Any:
    numbers = (rng.standard_normal((rows, inputs)) / 4).astype(np.float32)
    scale = np.abs(numbers).mean(dtype=np.float64).astype(np.float32)
    return {"weight": numbers}, np.clip(np.rint(numbers / scale), -1, 1) * scale


_PLAIN: dict[str, Any] = {"modules_to_not_convert": ["lm_head"]}
_GPTQ: dict[str, Any] = test_gptq.FIELDS | {
    "dynamic": {r"-:.*lm_head": {}}, "lm_head": False, "checkpoint_format": "gptq",
}  # fmt: skip
_AUTO: dict[str, Any] = {
    "quant_method": "auto-round", "packing_format": "auto_round:gptqmodel", "bits": 4,
    "group_size": 32, "sym": False, "data_type": "int",
    "extra_config": {"lm_head": {"bits": 16}, ".*mlp.*up": {"group_size": 32}},
}  # fmt: skip
_AWQ: dict[str, Any] = {
    "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
}  # fmt: skip
_MODELOPT: dict[str, Any] = {"quant_method": "modelopt", "ignore": ["lm_h*"]}
_NF4 = test_bitsandbytes.FOUR
FORMATS: dict[str, Format] = {
    "awq": Format(_but_lm_head(test_awq.module), _AWQ | _PLAIN),
    "gptq": Format(_but_lm_head(test_gptq.module, group=32), _GPTQ),
    "gptq act-order": Format(
        _but_lm_head(test_gptq.module, group=32, ordered=True), _GPTQ | {"desc_act": True}
    ),
    "gptq 8 bits": Format(
        _but_lm_head(test_gptq.module, group=64, bits=8, symmetric=True),
        _GPTQ | {"bits": 8, "group_size": 64, "sym": True},
    ),
    "gptq channels": Format(_but_lm_head(test_gptq.module, group=-1), _GPTQ | {"group_size": -1}),
    "auto-round gptq": Format(_but_lm_head(test_gptq.module, group=32, minus_one=False), _AUTO),
    "auto-round awq": Format(
        _but_lm_head(test_awq.module), _AUTO | {"packing_format": "auto_round:auto_awq"}
    ),
    "W4A16": _ints(group=32),
    "W4A16 ordered": Format(
        _but_lm_head(_ordered),
        description(group_size=32, symmetric=False, actorder="group") | {"ignore": ["lm_head"]},
    ),
    "W8A16": _ints(group=32, bits=8, symmetric=False),
    "W8A8": _ints(TOKENS, bits=8, packed=False),
    "W4A8": _ints(TOKENS, group=32, symmetric=False, packed=False),
    "compressed FP8": _floats("float-quantized", _fp8("output"), num_bits=8, strategy="channel"),
    "compressed FP8 blocks": _floats(
        "float-quantized", _fp8("block"), num_bits=8, strategy="block", block_structure=[48, 64]
    ),
    "MXFP8": _floats("mxfp8-quantized", _mxfp8, num_bits=8, strategy="group", group_size=32),
    "MXFP4": Format(
        _but_lm_head(test_fp4.module, kind="mxfp4"),
        test_fp4.describe("mxfp4") | {"ignore": ["lm_head"]},
    ),
    "NVFP4": Format(
        _but_lm_head(test_fp4.module, kind="nvfp4"),
        test_fp4.describe("nvfp4") | {"ignore": ["lm_head"]},
    ),
    "fp8": Format(
        _but_lm_head(test_fp8.module, kind="block"),
        {"quant_method": "fp8", "weight_block_size": [48, 64], "fmt": "e4m3"} | _PLAIN,
    ),
    "fbgemm_fp8": Format(
        _but_lm_head(test_fp8.module, kind="outputs"),
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0} | _PLAIN,
    ),
    "modelopt FP8": Format(_but_lm_head(_static), _MODELOPT | {"quant_algo": "FP8"}),
    "modelopt NVFP4": Format(
        _but_lm_head(test_fp4.module, kind="modelopt"), _MODELOPT | {"quant_algo": "NVFP4"}
    ),
    "bitsandbytes int8": Format(test_bitsandbytes.in_8_bits, test_bitsandbytes.EIGHT),
    "bitsandbytes nf4": Format(test_bitsandbytes.in_4_bits(True), _NF4, atol=1e-5),
    "bitnet": Format(
        _but_lm_head(_bitnet), {"quant_method": "bitnet", "linear_class": "bitlinear"} | _PLAIN
    ),
    "bitnet online": Format(
        _but_lm_head(_rounded),
        {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
        | _PLAIN,
    ),
}
