"""Encoder of sounds of Gemma 4: settings that are refused, and the inputs of convolutions."""

import numpy as np
import pytest
import torch

from octavo.checkpoints.config_json import ConfigJson
from octavo.errors import ModelError
from octavo.models.towers.gemma4_audio import MAX_TOKENS, read_gemma4_audio


def read(**fields):
    return read_gemma4_audio(ConfigJson({"hidden_size": 32, "audio_config": fields}, "config.json"))


def test_defaults():
    encoder = read()
    assert (encoder.hidden_size, encoder.out_size, len(encoder.layers)) == (1024, 32, 12)
    assert encoder.cache.head_size == 128
    mixer = encoder.layers[0].sublayers[1].block
    assert mixer.sliding_window == 12
    assert mixer.causal
    assert read(attention_chunk_size=13).layers == encoder.layers


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attention_chunk_size", 11),
        ("attention_chunk_size", 14),
        ("attention_context_left", 11),
        ("attention_context_right", 1),
        ("hidden_act", "gelu"),
        ("gradient_clipping", 100.0),
        ("hidden_size", 1001),
        ("subsampling_conv_channels", [128]),
        ("subsampling_conv_channels", [126, 32]),
        ("conv_kernel_size", 1),
    ],
)
def test_refused(name, value):
    field = "attention_chunk_size" if name == "attention_context_left" else name
    with pytest.raises(ModelError, match=field):
        read(**{name: value})


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 99, 100, 101, 203, 4 * MAX_TOKENS])
def test_convolutions_in_chunks(count):
    """Chunks give the convolutions what torch's give them over the whole sound."""
    bands, generator = 8, torch.Generator().manual_seed(count)
    frames = torch.randn(count, bands, generator=generator)
    first, second = (torch.randn(5, n, 3, 3, generator=generator) for n in (1, 5))
    x = torch.nn.functional.conv2d(frames[None, None], first, stride=2, padding=1)
    expected = torch.nn.functional.conv2d(x, second, stride=2, padding=1)[0].permute(1, 2, 0)
    spec = read(subsampling_conv_channels=[bands, 5]).inputs
    item = spec.read({"input_features": frames.numpy()})
    assert item.num_rows == item.size == len(expected)
    rows = item.numbers["spectrogram"].reshape(-1, 51 * 4 + 1, 9)
    results = rows @ first.reshape(5, 9).numpy().T
    found = results[:, spec.taps()].reshape(-1, 2, 9 * 5)
    found = found @ second.permute(0, 2, 3, 1).reshape(5, 45).numpy().T
    np.testing.assert_allclose(found[: len(expected)], expected, rtol=2e-4, atol=2e-4)
