"""Encoder of sounds of Phi-4 multimodal: rows equal to those of transformers, and refusals."""

import numpy as np
import pytest
import torch

from octavo.attention.cpu import CPUAttention
from octavo.checkpoints.config_json import ConfigJson
from octavo.checkpoints.registry import open_checkpoint
from octavo.config import ModelConfig
from octavo.errors import ModelError
from octavo.kernels.native import NativeOps
from octavo.kernels.torch_tensors import as_torch
from octavo.messages import MultiModalFeatureSpec, PlaceholderRange, TensorData
from octavo.models.loader import load_model
from octavo.models.registry import read_spec
from octavo.models.towers.phi4_audio import MAX_SECONDS, read_phi4_audio
from octavo.worker.encoder_runner import EncoderRunner
from tests.models.harness import make_hf
from tests.models.test_towers import TEXT
from tests.pictures import PHI4_SOUNDS

VISION = {"hidden_size": 24, "intermediate_size": 8, "num_hidden_layers": 2, "image_size": 8}
VISION |= {"num_attention_heads": 3, "crop_size": 8, "patch_size": 4, "image_token_id": 98}


def sizes(size, **fields):
    channels = {"ext_pw_out_channel": size, "depthwise_separable_out_channel": size}
    return {"hidden_size": size, **channels, **fields}


CASES = {
    "": {},
    "-wide": sizes(40, num_attention_heads=5, input_size=80, bias_max_distance=4, num_blocks=1),
    "-odd": sizes(12, num_attention_heads=3, input_size=13, kernel_size=5, nemo_conv_channels=5)
    | {"intermediate_size": 9, "bias_max_distance": 600},
}


def feature(frames, **more):
    data = {"input_features": TensorData("float32", frames.shape, frames.tobytes())}
    for name, array in more.items():
        data[name] = TensorData(str(array.dtype), array.shape, array.tobytes())
    return MultiModalFeatureSpec("audio", "", PlaceholderRange(0, 0), data, 0)


@pytest.mark.parametrize("name", CASES)
def test_rows_equal_those_of_transformers(name, tmp_path):
    audio = PHI4_SOUNDS | CASES[name]
    config = {"vision_config": VISION, "audio_config": audio, **TEXT}
    hf_model = make_hf("Phi4MultimodalForCausalLM", factor=0.6, **config)
    embed = hf_model.model.embed_tokens_extend.audio_embed
    generator = torch.Generator().manual_seed(3)
    for buffer in (
        embed.encoder.encoder_embedding.global_mean,
        embed.encoder.encoder_embedding.global_invstd,
    ):
        buffer.data.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
    hf_model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    spec = read_spec(checkpoint, ModelConfig())
    model = load_model(spec, checkpoint, dtype="float32", ops=NativeOps())
    _, encoder = model.encoders
    runner = EncoderRunner(encoder, NativeOps(), CPUAttention())
    counts = [1, 7, 8, 9, 129, 250, 4000, 4100]  # the last one has two segments
    sounds = [
        np.random.default_rng(count).standard_normal((count, audio["input_size"]), np.float32)
        for count in counts
    ]
    modes = ["speech", "vision"] * (len(sounds) // 2)
    marks = [{"beside": np.ones(1, np.int64)} if mode == "vision" else {} for mode in modes]
    features = [feature(frames, **more) for frames, more in zip(sounds, marks, strict=True)]
    together = runner.run(features)
    for frames, mode, given, rows in zip(sounds, modes, features, together, strict=True):
        count = -(-len(frames) // 8)
        ids = torch.full((1, count), audio["audio_token_id"])
        with torch.inference_mode():
            zeros = torch.zeros(1, count, 32)
            numbers = torch.from_numpy(frames)[None]
            options = {"audio_projection_mode": mode}
            expected = embed(ids, zeros, numbers, torch.tensor([count]), **options)[0]
        atol = 1e-5 * float(expected.abs().max())
        torch.testing.assert_close(as_torch(rows), expected, atol=atol, rtol=0)
        (alone,) = runner.run([given])
        assert torch.equal(as_torch(alone), as_torch(rows))
        tokens = encoder.spec.inputs.read({"input_features": frames}).num_tokens
        assert encoder.spec.inputs.sizes({"input_features": frames}) == (tokens, count)


def read(**fields):
    return read_phi4_audio(ConfigJson({"hidden_size": 32, "audio_config": fields}, "config.json"))


def test_defaults():
    encoder = read()
    assert (encoder.hidden_size, encoder.out_size, len(encoder.layers)) == (1024, 32, 24)
    assert encoder.max_num_tokens == 12.5 * MAX_SECONDS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("activation", "gelu"),
        ("chunk_size", 18),
        ("time_reduction", 4),
        ("bias_symmetric", True),
        ("depthwise_multiplier", 2),
        ("downsample_rate", 2),
        ("ext_pw_out_channel", 512),
        ("kernel_size", 9),
        ("num_blocks", 65_536),
        ("num_attention_heads", 3),
    ],
)
def test_refused(name, value):
    field = "hidden_size" if name == "num_attention_heads" else name
    with pytest.raises(ModelError, match=field):
        read(**{name: value})
