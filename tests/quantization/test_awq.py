"""AWQ: exact codes, and a model with the numbers of its dequantized weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.checkpoints.config_json import ConfigJson
from octavo.errors import ModelError
from octavo.kernels.native import NativeOps
from octavo.quantization.awq import AWQ, read_awq
from octavo.quantization.base import PackedShape, TensorError
from octavo.system.distributed import Rank
from octavo.system.tensor import from_numpy
from tests.quantization.harness import Folders

ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
ROWS, INPUTS, GROUP = 96, 256, 32


def packed(codes: np.ndarray) -> np.ndarray:
    """Pack codes [inputs, outputs] as AutoAWQ's gemm version does."""
    grouped = codes.reshape(len(codes), -1, 8)[..., ORDER].astype(np.uint32)
    return np.bitwise_or.reduce(grouped << np.arange(0, 32, 4, dtype=np.uint32), -1).view(np.int32)


def module(rng: np.random.Generator, rows: int, inputs: int) -> tuple[dict[str, Any], np.ndarray]:
    """Return the tensors of a module, and its weight [outputs, inputs]."""
    codes = rng.integers(0, 16, (inputs, rows))
    zeros = rng.integers(0, 16, (inputs // GROUP, rows))
    scales = rng.uniform(0.01, 0.05, zeros.shape).astype(np.float16)
    weight = (codes - zeros.repeat(GROUP, 0)) * scales.astype(np.float32).repeat(GROUP, 0)
    stored = {"qweight": packed(codes), "scales": scales, "qzeros": packed(zeros)}
    return stored, weight.T.astype(np.float32)


@pytest.mark.parametrize("columns", [None, (64, 192)])
def test_codes_are_exact(columns: tuple[int, int] | None) -> None:
    stored, weight = module(np.random.default_rng(0), ROWS, INPUTS)
    tensors = [from_numpy(array) for array in stored.values()]
    order = np.random.default_rng(1).permutation(ROWS)
    for rows in ([slice(None)], [slice(3, 50), slice(50, 70)], [order]):
        parts = AWQ(GROUP).cut(tensors, rows, columns)
        codes, scales, zeros = (
            np.concatenate([part[i].numpy() for part in parts]).astype(np.float32) for i in range(3)
        )
        restored = (codes - zeros.repeat(GROUP, 1)) * scales.repeat(GROUP, 1)
        expected = np.concatenate([weight[selected] for selected in rows])
        assert np.array_equal(restored, expected[:, slice(*columns) if columns else slice(None)])


def test_the_kernel_has_the_weights() -> None:
    """A row of x with one number in each group is quantized without an error."""
    form, shape = AWQ(GROUP), PackedShape(ROWS, INPUTS, "float32")
    stored, weight = module(np.random.default_rng(0), ROWS, INPUTS)
    parts = form.cut([from_numpy(array) for array in stored.values()], [slice(None)], None)
    ops = NativeOps()
    result = form.pack(ops, parts, shape)
    assert result.nbytes == form.nbytes(shape)
    y = ops.linear(from_numpy(np.eye(INPUTS, dtype=np.float32)), result)
    assert np.allclose(ops.to_host(y).T, weight, rtol=1e-5, atol=1e-7)


def test_impossible_numbers() -> None:
    stored, _ = module(np.random.default_rng(0), ROWS, INPUTS)
    tensors = {name: from_numpy(array) for name, array in stored.items()}
    with pytest.raises(TensorError, match="divide; lower tensor_parallel_size"):
        AWQ(GROUP).cut(list(tensors.values()), [slice(None)], (16, 64))
    for value, message in ((np.nan, "are not finite"), (np.inf, "are not"), (1e-9, "float16")):
        scales = stored["scales"].astype(np.float32)
        scales[1, 2] = value
        with pytest.raises(TensorError, match=f"scales has numbers that {message}"):
            AWQ(GROUP).cut(
                list((tensors | {"scales": from_numpy(scales)}).values()), [slice(None)], None
            )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": 3}, "bits=3"),
        ({"group_size": 16}, "group_size=16"),
        ({"version": "marlin"}, "version='marlin'"),
        ({"zero_point": 1}, "zero_point=1"),
        ({"modules_to_not_convert": "lm_head"}, "a list of names"),
    ],
)
def test_rejected(fields: dict[str, Any], message: str) -> None:
    config = {"bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"} | fields
    with pytest.raises(ModelError, match=message):
        read_awq(ConfigJson(config, "config.json"))


def test_a_model(tmp_path: Path) -> None:
    def quantize(rng: np.random.Generator, name: str, rows: int, inputs: int) -> Any:
        if name == "lm_head" or "layers.1.mlp.down" in name:
            return None
        return module(rng, rows, inputs)

    folders = Folders(
        tmp_path,
        quantize,
        quant_method="awq", bits=4, group_size=GROUP, zero_point=True, version="gemm",
        modules_to_not_convert=["1.mlp.down"],
    )  # fmt: skip
    folders.assert_same_weights()
    for reduces in (False, True):
        folders.assert_same_weights(Rank(1, 2, reduces=reduces))
    folders.assert_same_logits(tmp_path / "cache")
    folders.assert_typed_errors()


def test_autoround(tmp_path: Path) -> None:
    folders = Folders(
        tmp_path,
        lambda rng, name, *shape: None if name == "lm_head" else module(rng, *shape),
        quant_method="intel/auto-round", packing_format="auto_round:auto_awq", bits=4,
        group_size=GROUP,
    )  # fmt: skip
    folders.assert_same_weights()
