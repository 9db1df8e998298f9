"""compressed-tensors: integers in its formats, and the choice of modules."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from octavo.checkpoints.config_json import ConfigJson
from octavo.errors import ModelError
from octavo.quantization.compressed_ints import CompressedInts
from octavo.quantization.compressed_tensors import read_compressed_tensors
from octavo.system.distributed import Rank
from tests.models.harness import load
from tests.quantization.harness import Array, Folders, pack_words


def module(
    rng: np.random.Generator,
    rows: int,
    inputs: int,
    *,
    bits: int = 4,
    group: int = 0,
    symmetric: bool = True,
    packed: bool = True,
    order: Array | None = None,
) -> tuple[dict[str, Array], Array]:
    """Return the tensors of a module, and its weight [outputs, inputs]."""
    group, half = group or inputs, 2 ** (bits - 1)
    numbers = rng.integers(-half, half, (rows, inputs))
    zeros = rng.integers(-half, half, (rows, inputs // group))
    if symmetric:
        zeros[:] = 0
    g_idx = np.arange(inputs) // group
    if order is not None:
        g_idx = g_idx[order]
    scales = (rng.uniform(0.01, 0.05, zeros.shape) * 8 / half).astype(ml_dtypes.bfloat16)
    weight = (numbers - zeros[:, g_idx]) * scales.astype(np.float32)[:, g_idx]
    stored = {"weight_scale": scales}
    if packed:
        stored["weight_packed"] = pack_words(numbers + half, bits)
        stored["weight_shape"] = np.array([rows, inputs])
        if not symmetric:
            stored["weight_zero_point"] = pack_words(zeros.T + half, bits).T
        if order is not None:
            stored["weight_g_idx"] = g_idx.astype(np.int32)
    else:
        stored["weight"] = numbers.astype(np.int8)
        if not symmetric:
            stored["weight_zero_point"] = zeros.astype(np.int8)
    return stored, weight


def description(format: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    """Return a description with one group, as the library writes it."""
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group(**weights)},
        "ignore": ["lm_head", r"re:.*layers\.1\.mlp\.down"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        "global_compression_ratio": None,
    }


def group(
    targets: tuple[str, ...] = ("Linear",),
    activations: dict[str, Any] | None = None,
    **weights: Any,
) -> dict[str, Any]:
    strategy = "group" if weights.get("group_size") else "channel"
    return {
        "targets": list(targets),
        "weights": {
            "num_bits": 4, "type": "int", "symmetric": True, "strategy": strategy,
            "dynamic": False, "block_structure": None, "group_size": None, "actorder": None,
            "observer": "minmax", "observer_kwargs": {},
        } | weights,
        "input_activations": activations,
        "output_activations": None,
        "format": None,
    }  # fmt: skip


def folders_of(folder: Path, described: dict[str, Any], **options: Any) -> Folders:
    def quantize(rng: np.random.Generator, name: str, rows: int, inputs: int) -> Any:
        if name in ("lm_head", "model.layers.1.mlp.down_proj"):
            return None
        return module(rng, rows, inputs, **options)

    return Folders(folder, quantize, **described)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("size", [0, 32])
def test_packed(bits: int, symmetric: bool, size: int, tmp_path: Path) -> None:
    described = description(num_bits=bits, symmetric=symmetric, group_size=size or None)
    options: Any = {"bits": bits, "symmetric": symmetric, "group": size}
    folders = folders_of(tmp_path, described, **options)
    folders.assert_same_weights()
    for reduces in (False, True):
        folders.assert_same_weights(Rank(1, 2, reduces=reduces))
    if size and not symmetric:
        folders.assert_same_logits(tmp_path / "cache")
        folders.assert_typed_errors()


TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


@pytest.mark.parametrize("format", ["int-quantized", "naive-quantized"])
def test_w8a8(format: str, tmp_path: Path) -> None:
    described = description(format, num_bits=8, activations=TOKENS)
    folders = folders_of(tmp_path, described, bits=8, packed=False)
    folders.assert_same_weights()
    folders.assert_same_weights(Rank(1, 2))
    folders.assert_same_logits()
    (*_, (_, form)) = read_compressed_tensors(ConfigJson(described, "config.json"))
    assert isinstance(form, CompressedInts)
    assert form.format(128) == ("int8", 0)  # one scale for each token, as described
    folders.assert_typed_errors()


@pytest.mark.parametrize("symmetric", [False, True])
def test_w4a8(symmetric: bool, tmp_path: Path) -> None:
    """Numbers of 4 bits in bytes."""
    described = description(
        "int-quantized", num_bits=4, symmetric=symmetric, group_size=128, activations=TOKENS
    )
    folders = folders_of(tmp_path, described, group=128, symmetric=symmetric, packed=False)
    folders.assert_same_weights()
    name = "model.layers.0.self_attn.q_proj.weight"
    folders.tensors[name][3, 4] = 8
    folders.save()
    with pytest.raises(ModelError, match=rf"^{name} has numbers of more than 4 bits"):
        load(folders.quantized)
    if not symmetric:
        folders.tensors[f"{name}_zero_point"][:] = -9
        folders.save()
        with pytest.raises(ModelError, match=rf"^{name}_zero_point has numbers of more than"):
            load(folders.quantized)


def test_order_of_inputs(tmp_path: Path) -> None:
    def quantize(rng: np.random.Generator, name: str, rows: int, inputs: int) -> Any:
        if name == "lm_head":
            return None
        order = np.random.default_rng(inputs).permutation(inputs)
        return module(rng, rows, inputs, group=32, symmetric=False, order=order)

    described = description(group_size=32, symmetric=False, actorder="group")
    folders = Folders(tmp_path, quantize, **described | {"ignore": ["lm_head"]})
    folders.assert_same_weights()
    folders.assert_same_weights(Rank(1, 2))
    folders.assert_same_logits(tmp_path / "cache")
    folders.assert_typed_errors()
    with pytest.raises(ModelError, match=r"g_idx has groups .*leave out tensor_parallel_mode"):
        folders.assert_same_weights(Rank(1, 2, reduces=True))


def test_several_groups(tmp_path: Path) -> None:
    """A name counts before a regular expression, and this before a class, in any order."""

    def quantize(rng: np.random.Generator, name: str, rows: int, inputs: int) -> Any:
        if name == "model.layers.1.mlp.up_proj":
            return module(rng, rows, inputs, group=64)
        if "mlp" in name:
            return module(rng, rows, inputs, bits=8, packed=False)
        return module(rng, rows, inputs, group=128, symmetric=False)

    groups = {
        "all": group(group_size=128, symmetric=False),
        "mlp": group(("re:.*mlp",), TOKENS, num_bits=8) | {"format": "int-quantized"},
        "one": group(("model.layers.1.mlp.up_proj",), group_size=64),
    }
    fields: dict[str, Any] = {"config_groups": groups, "ignore": []}
    folders = Folders(tmp_path, quantize, **description() | fields)
    folders.assert_same_weights()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"config_groups": {}}, "config_groups={} is not supported"),
        ({"config_groups": {"W4A16": ["Linear"]}}, "config_groups: W4A16="),
        ({"config_groups": {"a": group(("Embedding",))}}, "targets=.'Embedding'.* is Linear"),
        ({"config_groups": {"a": group() | {"targets": None}}}, "targets=None"),
        ({"config_groups": {"a": group(num_bits=3)}}, "num_bits=3"),
        ({"config_groups": {"a": group(num_bits="4")}}, "num_bits='4'"),
        ({"config_groups": {"a": group(type="complex")}}, "type='complex'"),
        ({"config_groups": {"a": group(strategy="block")}}, "strategy='block'"),
        ({"config_groups": {"a": group(strategy="group")}}, "group_size is missing"),
        ({"config_groups": {"a": group(group_size=16)}}, "group_size=16"),
        ({"config_groups": {"a": group(dynamic=True)}}, "dynamic=True"),
        ({"config_groups": {"a": group(actorder="column")}}, "actorder='column'"),
        ({"config_groups": {"a": group(actorder=["group"])}}, r"actorder=\['group'\]"),
        ({"config_groups": {"a": group(activations={"dynamic": False})}}, "dynamic=False"),
        ({"config_groups": {"a": group(activations={"type": "float"})}}, "type='float'"),
        ({"config_groups": {"a": group() | {"output_activations": TOKENS}}}, "output_activations="),
        ({"config_groups": {"a": group() | {"format": "marlin-24"}}}, "format='marlin-24'"),
        ({"format": "dense"}, "supported for integers"),
        ({"format": None}, "name of a format"),
        ({"kv_cache_scheme": TOKENS}, "kv_cache_scheme=.* --kv-cache-dtype"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config: format="),
        ({"transform_config": {"config_groups": {"R1": {}}}}, "transform_config="),
        ({"quantization_status": "frozen"}, "quantization_status='frozen'"),
    ],
)
def test_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_compressed_tensors(ConfigJson(description() | fields, "config.json"))
