"""Features of Whisper against transformers."""

import json
import os
import wave
from pathlib import Path

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from octavo.errors import ModelError
from octavo.media.log_mel import LogMel
from tests.media.sounds import chirp

RATE = 16_000
CLIPS = Path(os.environ.get("OCTAVO_REAL_MODELS", ""), "audio-librivox5")


def sounds():
    random = np.random.default_rng(0)
    yield chirp(12.0)[0]
    yield random.normal(0, 0.1, 30 * RATE).astype(np.float32)
    yield random.normal(0, 2, 12_345).astype(np.float32)
    yield np.zeros(1, np.float32)


@pytest.mark.parametrize(
    "settings", [{}, {"feature_size": 128}, {"chunk_length": 8}, {"hop_length": 128, "n_fft": 512}]
)
def test_features_are_those_of_transformers(settings):
    theirs = WhisperFeatureExtractor(**settings)
    ours = LogMel.from_config(json.loads(theirs.to_json_string()), "preprocessor_config.json")
    for samples in sounds():
        samples = samples[: ours.num_samples]
        expected = theirs(samples, sampling_rate=RATE, return_tensors="np").input_features[0]
        features = ours.compute(samples)
        assert features.dtype == np.float32
        assert features.shape == expected.shape == (ours.feature_size, ours.num_frames)
        assert np.abs(features - expected).max() < 1e-4


@pytest.mark.parametrize("count", [1, 199, 39_800, 39_801, 40_000, 79_800, 80_000, 80_001])
def test_silence_after_a_sound_is_not_computed(count):
    samples = np.random.default_rng(1).normal(0, 0.1, count).astype(np.float32)
    padded = np.zeros(30 * RATE, np.float32)
    padded[:count] = samples
    # Samples of silence are computed; those that are missing are not.
    assert np.array_equal(LogMel().compute(samples), LogMel().compute(padded))


@pytest.mark.skipif(not CLIPS.is_dir(), reason="set OCTAVO_REAL_MODELS to a folder with it")
def test_real_sound():
    for path in CLIPS.glob("*.wav"):
        with wave.open(str(path)) as file:
            samples = np.frombuffer(file.readframes(file.getnframes()), "<i2") / np.float32(2**15)
        expected = WhisperFeatureExtractor()(samples, sampling_rate=RATE, return_tensors="np")
        assert np.abs(LogMel().compute(samples) - expected.input_features[0]).max() < 1e-4


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"feature_extractor_type": "Wav2Vec2FeatureExtractor"}, "feature_extractor_type="),
        ({"feature_size": 0}, "feature_size=0 is wrong"),
        ({"feature_size": "80"}, "feature_size='80' is wrong"),
        ({"n_fft": 401}, "n_fft=401 must be even"),
        ({"n_fft": 100}, "n_fft=100 must be even, and at least hop_length=160"),
        ({"dither": 0.1}, "dither=0.1 is not supported"),
        ({"sampling_rate": 8000}, "sampling_rate=8000 is not supported"),
        ({"chunk_length": 10**9}, "chunk_length=1000000000 is wrong"),
    ],
)
def test_wrong_settings_are_named(config, message):
    with pytest.raises(ModelError, match=message) as caught:
        LogMel.from_config(config, "m/preprocessor_config.json")
    assert str(caught.value).startswith("m/preprocessor_config.json: ")
