"""FP8: a checkpoint's numbers and scales are exact, and floats are rounded as torch does."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.checkpoints.config_json import ConfigJson
from octavo.errors import ConfigError, ModelError
from octavo.kernels.native import NativeOps
from octavo.kernels.torch_tensors import from_torch
from octavo.models.weight_cache import WeightCache
from octavo.quantization.base import PackedShape, TensorError
from octavo.quantization.compressed_tensors import read_compressed_tensors
from octavo.quantization.fp8 import FP8, OnlineFP8, read_fp8
from octavo.system.distributed import Rank
from octavo.system.tensor import from_numpy
from tests.models.harness import generate, load, make_prompts
from tests.quantization.harness import E4M3, VOCAB, Array, Folders
from tests.quantization.test_compressed_tensors import description

ROWS, INPUTS = 96, 200


def module(
    rng: np.random.Generator, rows: int, inputs: int, kind: str
) -> tuple[dict[str, Array], Array]:
    """Return the tensors of a module, and its weight [outputs, inputs]."""
    codes = (rng.standard_normal((rows, inputs)) * 60).astype(E4M3)
    if kind == "block" or kind == "ue8m0":
        shape: tuple[int, ...] = (-(-rows // 48), -(-inputs // 64))
    else:
        shape = {"tensor": (), "one": (1,), "output": (rows, 1), "outputs": (rows,)}[kind]
    scales = np.asarray(rng.uniform(2e-4, 8e-4, shape), np.float32)
    stored: dict[str, Array] = {"weight": codes}
    if kind == "ue8m0":
        exponents = rng.integers(112, 118, shape).astype(np.uint8)
        stored["weight_scale_inv"] = exponents
        scales = (2.0 ** (exponents.astype(np.float64) - 127)).astype(np.float32)
    else:
        stored["weight_scale_inv" if kind == "block" else "weight_scale"] = scales
    if kind in ("block", "ue8m0"):
        wide = scales.repeat(48, 0)[:rows].repeat(64, 1)[:, :inputs]
    else:
        wide = scales.reshape(-1, 1)
    return stored, codes.astype(np.float32) * wide


KINDS = {"tensor": None, "one": None, "outputs": None, "output": None, "block": (48, 64)}
KINDS["ue8m0"] = (48, 64)


def tensors_of(form: FP8, stored: dict[str, Array]) -> list[Any]:
    absent = from_numpy(np.zeros(0, np.float32))
    names = [source.name.removeprefix("m.") for source in form.sources("m", ROWS, INPUTS)]
    return [
        from_numpy(stored[name].view(np.uint8) if name == "weight" else stored[name])
        if name in stored
        else absent
        for name in names
    ]


@pytest.mark.parametrize("columns", [None, (64, 200)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_has_the_numbers(kind: str, columns: tuple[int, int] | None) -> None:
    """A row of x with one number in it is a column of the weight, exactly."""
    form = FP8(KINDS[kind])
    stored, weight = module(np.random.default_rng(0), ROWS, INPUTS, kind)
    order = np.random.default_rng(1).permutation(ROWS)
    ops = NativeOps()
    for rows in ([slice(None)], [slice(3, 50), slice(50, 70)], [order]):
        want = np.concatenate([weight[part] for part in rows])
        want = want[:, slice(*columns) if columns else slice(None)]
        shape = PackedShape(*want.shape, "float32")
        packed = form.pack(ops, form.cut(tensors_of(form, stored), rows, columns), shape)
        assert packed.nbytes == form.nbytes(shape)
        unit = from_numpy(np.eye(want.shape[1], dtype=np.float32))
        assert np.array_equal(ops.to_host(ops.linear(unit, packed)).T, want)


@pytest.mark.parametrize(
    ("kind", "name", "value", "message"),
    [
        ("block", "weight", np.nan, "weight has numbers that are NaN"),
        ("outputs", "weight", -np.nan, "weight has numbers that are NaN"),
        ("block", "weight_scale_inv", np.nan, "weight_scale_inv has numbers that are not finite"),
        ("outputs", "weight_scale", np.inf, "weight_scale has numbers that are not finite"),
        ("ue8m0", "weight_scale_inv", 255, "weight_scale_inv has numbers that are not finite"),
        ("block", "weight_scale_inv", None, "weight_scale_inv is missing"),
        ("tensor", "weight_scale", None, "weight_scale is missing"),
    ],
)
def test_impossible_numbers(kind: str, name: str, value: float | None, message: str) -> None:
    form = FP8(KINDS[kind])
    stored, _ = module(np.random.default_rng(0), ROWS, INPUTS, kind)
    if value is None:
        del stored[name]
    else:
        stored[name].flat[-1] = value
    with pytest.raises(TensorError, match=message):
        form.cut(tensors_of(form, stored), [slice(None)], None)


def test_two_scales_and_divided_blocks() -> None:
    stored, _ = module(np.random.default_rng(0), ROWS, INPUTS, "block")
    with pytest.raises(TensorError, match="divide; lower tensor_parallel_size"):
        FP8((48, 64)).cut(tensors_of(FP8((48, 64)), stored), [slice(None)], (32, 200))
    stored["weight_scale"] = stored["weight_scale_inv"]
    with pytest.raises(TensorError, match="weight_scale_inv is stored twice"):
        FP8((48, 64)).cut(tensors_of(FP8((48, 64)), stored), [slice(None)], None)


def test_blocks_larger_than_the_weight() -> None:
    """They take no more memory than the weight."""
    stored, weight = module(np.random.default_rng(0), ROWS, INPUTS, "one")
    stored["weight_scale"] = stored["weight_scale"].reshape(1, 1)
    form = FP8((2**62, 2**40))
    ((codes, scales),) = form.cut(tensors_of(form, stored), [slice(None)], None)
    wide = scales.numpy().repeat(128, 1)[:, :INPUTS]
    assert np.array_equal(codes.numpy().view(E4M3).astype(np.float32) * wide, weight)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"activation_scheme": "both"}, "activation_scheme='both'"),
        ({"fmt": "e5m2"}, "fmt='e5m2'"),
        ({"scale_fmt": "e5m3"}, "scale_fmt='e5m3'"),
        ({"weight_block_size": 128}, "weight_block_size=128"),
        ({"weight_block_size": [128]}, "weight_block_size="),
        ({"weight_block_size": [0, 128]}, "weight_block_size="),
        ({"weight_block_size": [128, True]}, "weight_block_size="),
        ({"weight_block_size": [128, 48]}, "a multiple of 32"),
    ],
)
def test_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        read_fp8(ConfigJson({"quant_method": "fp8"} | fields, "config.json"))


def quantize(kind: str) -> Any:
    def one(rng: np.random.Generator, name: str, rows: int, inputs: int) -> Any:
        if "lm_head" in name or "layers.1.mlp.down" in name:
            return None
        stored, weight = module(rng, rows, inputs, kind)
        if kind == "tensor":
            stored["input_scale"] = np.asarray(0.5, np.float32)
        return stored, weight

    return one


@pytest.mark.parametrize("kind", ["tensor", "block", "ue8m0"])
def test_a_model(tmp_path: Path, kind: str) -> None:
    description = {
        "quant_method": "fp8", "activation_scheme": "static" if kind == "tensor" else "dynamic",
        "weight_block_size": KINDS[kind], "scale_fmt": "ue8m0" if kind == "ue8m0" else None,
        "modules_to_not_convert": ["lm_head", "model.layers.1.mlp.down_proj"],
    }  # fmt: skip
    folders = Folders(tmp_path, quantize(kind), **description)
    folders.assert_same_weights()
    for reduces in (False, True):
        folders.assert_same_weights(Rank(1, 2, reduces=reduces))

    def logits(folder: Path, **options: Any) -> Tensor:
        return generate(load(folder, **options), make_prompts(VOCAB, (20,)), 1).logits[0]

    got, want = logits(folders.quantized), logits(folders.plain)
    assert (got - want).norm() < 1e-5 * want.norm()
    assert torch.equal(logits(folders.quantized, quantization="fp8"), got)
    cache = WeightCache(tmp_path / "cache", 2**30)
    for _ in range(2):  # written, then read
        assert torch.equal(logits(folders.quantized, cache=cache), got)
        if cache.writer is not None:
            cache.writer.join()
    for name in ("int8", "awq"):
        with pytest.raises(ConfigError, match=f"quantization={name}: .* by fp8; leave the setting"):
            load(folders.quantized, quantization=name)
    if kind == "block":
        folders.assert_typed_errors()


def test_floats_are_rounded_as_torch_does(tmp_path: Path) -> None:
    weight = torch.randn(70, 172, generator=torch.Generator().manual_seed(0)).bfloat16()
    ops, shape = NativeOps(), PackedShape(70, 172, "float32")
    packed = OnlineFP8().pack(ops, [(from_torch(weight),)], shape)
    assert packed.nbytes == OnlineFP8().nbytes(shape)
    scales = weight.float().abs().amax(1, keepdim=True) / 448
    want = (weight.float() / scales).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scales
    got = ops.to_host(ops.linear(from_numpy(np.eye(172, dtype=np.float32)), packed)).T
    assert np.array_equal(got, want.numpy())


def test_a_setting_without_a_form(tmp_path: Path) -> None:
    folders = Folders(tmp_path, quantize("block"), quant_method="fp8")
    with pytest.raises(ConfigError, match=r"quantization=awq: .* not quantized, .* int4, fp8"):
        load(folders.plain, quantization="awq")


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [("tensor", "tensor"), ("output", "channel"), ("block", "block"), ("ue8m0", "group")],
)
def test_compressed_tensors(kind: str, strategy: str, tmp_path: Path) -> None:
    def one(rng: np.random.Generator, name: str, rows: int, inputs: int) -> Any:
        if name in ("lm_head", "model.layers.1.mlp.down_proj"):
            return None
        if strategy == "group":  # mxfp8
            exponents = rng.integers(112, 118, (rows, inputs // 32)).astype(np.uint8)
            codes = (rng.standard_normal((rows, inputs)) * 60).astype(E4M3)
            scales = 2.0 ** (exponents.astype(np.float32) - 127)
            stored: dict[str, Array] = {"weight": codes, "weight_scale": exponents}
            return stored, codes.astype(np.float32) * scales.repeat(32, 1)
        stored, weight = module(rng, rows, inputs, kind)
        return {name.removesuffix("_inv"): array for name, array in stored.items()}, weight

    described = description(
        "mxfp8-quantized" if strategy == "group" else "float-quantized",
        num_bits=8,
        type="float",
        strategy=strategy,
        block_structure=list(KINDS[kind] or ()) or None,
        group_size=32 if strategy == "group" else None,
        activations={"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
    )
    folders = Folders(tmp_path, one, **described)
    folders.assert_same_weights()
    folders.assert_same_weights(Rank(1, 2))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_bits": 6}, "num_bits=6"),
        ({"symmetric": False}, "symmetric=False"),
        ({"dynamic": True}, "dynamic=True"),
        ({"strategy": "tensor_group"}, "strategy='tensor_group'"),
        ({"strategy": "block"}, "block_structure=None"),
        ({"strategy": "group", "group_size": 16}, "group_size=16"),
        ({"num_bits": 4}, "num_bits=4 .* not 'float-quantized'"),
    ],
)
def test_compressed_tensors_rejected(fields: dict[str, Any], message: str) -> None:
    described = description("float-quantized", **{"num_bits": 8, "type": "float"} | fields)
    with pytest.raises(ModelError, match=message):
        read_compressed_tensors(ConfigJson(described, "config.json"))
