"""Quantized checkpoints whose weights become numbers of the model's type."""

from pathlib import Path

import pytest
import torch

from octavo.checkpoints.registry import open_checkpoint
from octavo.config import ModelConfig
from octavo.errors import ConfigError
from octavo.kernels.native import NativeOps
from octavo.models.loader import load_model
from octavo.models.registry import read_spec
from octavo.models.weight_cache import WeightCache
from octavo.quantization.dequantized import Dequantized
from octavo.system.distributed import Rank
from tests.models.harness import generate, load, make_prompts
from tests.quantization.formats import FORMATS
from tests.quantization.harness import VOCAB


def logits(folder: Path, **options: object) -> torch.Tensor:
    checkpoint = open_checkpoint(folder)
    spec = read_spec(checkpoint, ModelConfig(dequantize=True))
    assert any(isinstance(weight.form, Dequantized) for weight in spec.weights())
    model = load_model(spec, checkpoint, dtype="float32", ops=NativeOps(), **options)
    return generate(model, make_prompts(VOCAB, (20,)), 1).logits[0]


@pytest.mark.parametrize("name", ["awq", "W4A16 ordered", "W8A8", "compressed FP8", "MXFP4"])
def test_logits_are_those_of_the_plain_model(name: str, tmp_path: Path) -> None:
    folders = FORMATS[name].make(tmp_path, intermediate_size=320)
    plain = generate(load(folders.plain), make_prompts(VOCAB, (20,)), 1).logits[0]
    cache = WeightCache(tmp_path / "cache", 2**30)
    for _ in range(2):  # written, then read
        assert torch.allclose(logits(folders.quantized, cache=cache), plain, rtol=1e-5, atol=1e-5)
        if cache.writer is not None:
            cache.writer.join()
    whole = generate(load(folders.quantized), make_prompts(VOCAB, (20,)), 1).logits[0]
    assert name == "compressed FP8" or not torch.allclose(whole, plain, rtol=1e-5, atol=1e-5)


def test_the_plan_has_the_size_of_the_plain_model(tmp_path: Path) -> None:
    folders = FORMATS["W4A16"].make(tmp_path)
    checkpoint = open_checkpoint(folders.quantized)
    plain = read_spec(open_checkpoint(folders.plain), ModelConfig())
    for rank in (None, Rank(0, 2)):
        found = read_spec(checkpoint, ModelConfig(dequantize=True))
        if rank is not None:
            found, plain = found.split(rank), plain.split(rank)
        assert found.weight_nbytes("bfloat16") == plain.weight_nbytes("bfloat16")


def test_models_without_dequantized_weights(tmp_path: Path) -> None:
    folders = FORMATS["bitnet"].make(tmp_path)
    with pytest.raises(ConfigError, match="trained with activations of 8 bits"):
        read_spec(open_checkpoint(folders.quantized), ModelConfig(dequantize=True))
    with pytest.raises(ConfigError, match="not quantized; leave the setting out"):
        read_spec(open_checkpoint(folders.plain), ModelConfig(dequantize=True))
