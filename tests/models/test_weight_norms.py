"""Norms of changed weights: for every form of a checkpoint, and for ranks the bits of the whole."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
from numpy.typing import NDArray

from octavo.checkpoints.registry import open_checkpoint
from octavo.errors import ModelError
from octavo.kernels.native import NativeOps
from octavo.models.adaptable_model import AdaptableModel
from octavo.models.loader import LoadedWeights
from octavo.models.merge import MergedCheckpoint, merge_nbytes
from octavo.models.registry import read_spec
from octavo.models.spec import ModelSpec
from octavo.models.weight_norms import WeightNorms, norms_nbytes
from octavo.system.distributed import Rank
from tests.adapters import make_factors, write_adapter
from tests.checkpoints.gguf.test_file import make
from tests.checkpoints.test_sharded_state import save
from tests.models.harness import make_hf, spec_of
from tests.quantization.formats import FORMATS
from tests.quantization.harness import SIZES

RANK, SCALE = 5, 0.5
RANKS = (Rank(), Rank(0, 2), Rank(1, 2), Rank(1, 2, reduces=True))


def changed(
    folder: Path, spec: ModelSpec, rank: Rank
) -> dict[str, list[tuple[NDArray[np.int64], NDArray[np.float32]]]]:
    """Return rows of each module that a rank computes, and their norms."""
    part = spec.split(rank) if rank.size > 1 else spec
    norms = WeightNorms(part.weights(), lambda: open_checkpoint(folder).open(part.expected))
    found: dict[str, Any] = {}
    for name, module in AdaptableModel(part).modules.items():
        if module.is_embedding:
            continue
        a, b = factors(name, module.outputs, module.inputs)
        for use in module.uses:
            rows = np.concatenate([np.arange(module.outputs)[it] for it in use.rows])
            stored = module.source.name.removesuffix(".weight")
            one = norms.compute(stored, use.rows, a, b[rows], SCALE)
            found.setdefault(name, []).append((rows, one))
    return found


def factors(name: str, n: int, k: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return an adapter's A and B for a module."""
    rng = np.random.default_rng(len(name))
    a = rng.standard_normal((RANK, k), np.float32)
    return a / k**0.5, rng.standard_normal((n, RANK), np.float32)


def check(folder: Path, spec: ModelSpec, plain: dict[str, Any], rtol: float = 1e-6) -> None:
    """Compare norms with those of plain weights, and ranks' norms with the whole's."""
    whole: dict[str, Any] = {}
    for rank in RANKS:
        for name, uses in changed(folder, spec, rank).items():
            for rows, norms in uses:
                if rank == Rank():
                    weight = plain[f"{name}.weight"]
                    a, b = factors(name, *weight.shape)
                    expected = np.linalg.norm(weight + SCALE * b.astype(float) @ a, axis=1)
                    np.testing.assert_allclose(norms, expected, rtol=rtol)
                    whole[name] = norms
                assert np.array_equal(norms, whole[name][rows]), (rank, name)
    assert len(whole) >= 14


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_checkpoints(name: str, tmp_path: Path) -> None:
    folders = FORMATS[name].make(tmp_path)
    plain = safetensors.numpy.load_file(folders.plain / "model.safetensors")
    check(folders.quantized, spec_of(folders.quantized), plain, 1e-6 + FORMATS[name].atol)


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_weights_that_loading_quantizes(quantization: str, tmp_path: Path) -> None:
    """The norms are those of the checkpoint's weights."""
    make_hf("LlamaForCausalLM", **SIZES).save_pretrained(tmp_path)
    plain = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    check(tmp_path, spec_of(tmp_path, quantization=quantization), plain)


@pytest.mark.parametrize(
    ("kind", "types", "rtol"),
    [("llama", {"": "q8_0"}, 3e-3), ("qwen2", {"attn_v": "q8_0", "": "q4_0"}, 0.05)],
)
def test_gguf(kind: str, types: dict[str, str], rtol: float, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    state = make(kind, file, types).state_dict()
    spec = read_spec(open_checkpoint(file))
    check(file, spec, {name: tensor.numpy() for name, tensor in state.items()}, rtol)


STORED = ("plain", "sharded", "merged", "gptq act-order", "W8A8", "compressed FP8", "NVFP4")


@pytest.mark.parametrize("form", STORED)
def test_memory_is_within_the_plan(form: str, tmp_path: Path) -> None:
    sizes = SIZES | {"intermediate_size": 2048, "hidden_size": 512, "num_hidden_layers": 1}
    if form in ("plain", "sharded", "merged"):
        make_hf("LlamaForCausalLM", **sizes).save_pretrained(tmp_path)
        folder = tmp_path
    else:
        folder = FORMATS[form].make(tmp_path, **sizes).quantized
    spec = spec_of(folder)
    layers = {slice.layer for slice in AdaptableModel(spec).slices}
    planned = norms_nbytes(spec.weights(), layers, RANK, copies=form == "sharded")
    checkpoint: Any = open_checkpoint(folder)
    if form == "sharded":
        tensors = safetensors.torch.load_file(folder / "model.safetensors")
        save(folder, tensors, 2)
        checkpoint = open_checkpoint(folder, "sharded_state")
    elif form == "merged":
        own = make_factors(AdaptableModel(spec), ["model.layers.0.mlp.up_proj"])
        adapter = write_adapter(tmp_path / "a", own)
        checkpoint = MergedCheckpoint(checkpoint, adapter, "float32")
        planned += merge_nbytes(adapter, "float32")
    norms = WeightNorms(spec.weights(), lambda: checkpoint.open(spec.expected))
    a, b = factors("", 2048, 512)
    rows = [slice(None)]
    norms.compute("model.layers.0.mlp.gate_proj", rows, a, b, SCALE)  # imports
    tracemalloc.start()
    norms.compute("model.layers.0.mlp.up_proj", rows, a, b, SCALE)
    norms.compute("model.layers.0.mlp.down_proj", rows, b.T, a.T, SCALE)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < planned


def test_a_checkpoint_that_has_changed(tmp_path: Path) -> None:
    make_hf("LlamaForCausalLM", **SIZES).save_pretrained(tmp_path)
    spec, checkpoint = spec_of(tmp_path), open_checkpoint(tmp_path)
    weights = LoadedWeights(spec, checkpoint, dtype="float32", ops=NativeOps(), cache=None)
    weights.load()
    assert weights.open()
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match="has changed since the model was loaded"):
        weights.open()
