"""Rows of every tower, equal to those of transformers in float32."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.attention.cpu import CPUAttention
from octavo.checkpoints.registry import open_checkpoint
from octavo.kernels.native import NativeOps
from octavo.kernels.torch_tensors import as_torch
from octavo.messages import MultiModalFeatureSpec, PlaceholderRange, TensorData
from octavo.models.decoder import DecoderModel
from octavo.models.loader import load_model
from octavo.models.registry import complete_config
from octavo.models.spec import ModelSpec
from octavo.models.towers.registry import with_encoders
from octavo.worker.encoder_runner import EncoderRunner
from tests.models.harness import make_hf, spec_of

TEXT: dict[str, Any] = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48}
TEXT |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
TEXT |= {"max_position_embeddings": 256, "pad_token_id": 0}
SIGLIP = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3}
SIGLIP |= {"num_attention_heads": 3, "image_size": 24, "patch_size": 4}
WIDE = {"hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 2}
WIDE |= {"num_attention_heads": 2, "image_size": 19, "patch_size": 2}
ODD = {"hidden_size": 39, "intermediate_size": 41, "num_hidden_layers": 1}
ODD |= {"num_attention_heads": 3, "image_size": 92, "patch_size": 5, "num_channels": 1}

Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Case:
    """A model, and the arrays of some pictures."""

    architecture: str
    config: dict[str, Any]
    pictures: Callable[[np.random.Generator, dict[str, Any]], list[Arrays]]
    features: Callable[[Any, Arrays], Tensor]


def tiles(*counts: int) -> Callable[[np.random.Generator, dict[str, Any]], list[Arrays]]:
    """Return a maker of pictures with these numbers of tiles."""

    def make(random: np.random.Generator, vision: dict[str, Any]) -> list[Arrays]:
        shape = vision.get("num_channels", 3), vision["image_size"], vision["image_size"]
        return [
            {"pixel_values": random.standard_normal((n, *shape)).astype(np.float32)} for n in counts
        ]

    return make


def idefics3_features(model: Any, picture: Arrays) -> Tensor:
    pixels = torch.from_numpy(picture["pixel_values"])[None]
    return torch.cat(model.model.get_image_features(pixels).pooler_output)


CASES: dict[str, Case] = {}
for name, vision, factor in (("", SIGLIP, 2), ("-wide", WIDE, 3), ("-odd", ODD, 1)):
    for architecture in ("SmolVLM", "Idefics3"):
        CASES[f"{architecture.lower()}{name}"] = Case(
            f"{architecture}ForConditionalGeneration",
            {"vision_config": vision, "text_config": TEXT, "scale_factor": factor},
            tiles(1, 3, 2),
            idefics3_features,
        )


def load_tower(folder: Path, dtype: str = "float32") -> DecoderModel:
    """Load a model with its tower."""
    checkpoint = open_checkpoint(folder)
    model = load_model(spec_with_tower(folder), checkpoint, dtype=dtype, ops=NativeOps())
    assert isinstance(model, DecoderModel)
    return model


def spec_with_tower(folder: Path) -> ModelSpec:
    spec = spec_of(folder)
    return with_encoders(spec, complete_config(spec.architecture, open_checkpoint(folder).config))


def feature(arrays: Arrays) -> MultiModalFeatureSpec:
    """Return the message of a picture."""
    data = {
        name: TensorData(str(array.dtype), array.shape, array.tobytes())
        for name, array in arrays.items()
    }
    return MultiModalFeatureSpec("image", "", PlaceholderRange(0, 0), data, 0)


@pytest.mark.parametrize("name", CASES)
def test_rows_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    hf_model = make_hf(case.architecture, **case.config)
    hf_model.save_pretrained(tmp_path)
    model = load_tower(tmp_path)
    (encoder,) = model.encoders
    runner = EncoderRunner(encoder, NativeOps(), CPUAttention())
    pictures = case.pictures(np.random.default_rng(0), case.config["vision_config"])
    together = runner.run([feature(arrays) for arrays in pictures])
    for arrays, rows in zip(pictures, together, strict=True):
        with torch.inference_mode():
            expected = case.features(hf_model, arrays)
        torch.testing.assert_close(as_torch(rows), expected, atol=1e-4, rtol=1e-4)
        (alone,) = runner.run([feature(arrays)])
        assert torch.equal(as_torch(alone), as_torch(rows))
