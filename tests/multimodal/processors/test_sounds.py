"""Processors of sounds, equal to transformers' in features, lengths and places."""

import json

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.gemma4_unified.feature_extraction_gemma4_unified import (
    Gemma4UnifiedAudioFeatureExtractor,
)
from transformers.models.gemma4_unified.processing_gemma4_unified import Gemma4UnifiedProcessor
from transformers.models.phi4_multimodal.feature_extraction_phi4_multimodal import (
    Phi4MultimodalFeatureExtractor,
)
from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor
from transformers.models.qwen3_asr.modeling_qwen3_asr import _get_feat_extract_output_lengths

from octavo.checkpoints.registry import open_checkpoint
from octavo.errors import ModelError, RequestError
from octavo.media.log_mel import LogMel
from octavo.media.usm_mel import UsmMel
from octavo.models.registry import read_spec
from octavo.multimodal.processors.sounds import check_frames, read_sound_processor
from tests.models.published_configs import CONFIGS
from tests.sounds import CASES, sound

SETTINGS = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128}


def make(folder, kind, name="preprocessor_config.json", settings=SETTINGS):
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    (folder / name).write_text(json.dumps(settings))
    return read_sound_processor(open_checkpoint(folder))


def features_of(part):
    tensor = part.fields["input_features"]
    return np.frombuffer(tensor.data, np.float32).reshape(tensor.shape)


@pytest.mark.parametrize("seconds", [0.0201, 0.5, 7.33, 29.999, 30])
def test_qwen2_audio(tmp_path, seconds):
    samples = sound(seconds)
    (part,) = make(tmp_path, "qwen2_audio").process(samples).parts
    extractor = WhisperFeatureExtractor(feature_size=128)
    options = {"padding": "max_length", "return_attention_mask": True, "return_tensors": "np"}
    expected = extractor(samples, sampling_rate=16_000, **options)
    length = int(expected["attention_mask"].sum())
    tokens = (length - 1) // 2 + 1  # as `_get_feat_extract_output_lengths` of transformers
    assert part.place.num_encoder_tokens == tokens
    assert part.place.num_embeds == (tokens - 2) // 2 + 1
    found = features_of(part)
    assert len(found) == min(2 * tokens + 1, 3000)
    frames = expected["input_features"][0].T[: len(found)]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(frames), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("seconds", [0.1, 0.5, 1.0, 7.337, 30.005])
def test_qwen3_asr(tmp_path, seconds):
    samples = sound(seconds)
    settings = SETTINGS | {"feature_extractor_type": "Qwen3ASRFeatureExtractor", "n_window": 50}
    (part,) = make(tmp_path, "qwen3_asr", settings=settings).process(samples).parts
    options = {"padding": True, "return_attention_mask": True}
    expected = Qwen3ASRFeatureExtractor()(samples, sampling_rate=16_000, **options)
    length = expected["attention_mask"].sum(-1)
    count = int(_get_feat_extract_output_lengths(length)[0])
    assert part.place.num_encoder_tokens == part.place.num_embeds == count
    found = features_of(part)
    frames = expected["input_features"][0].T[: int(length[0])]
    torch.testing.assert_close(torch.tensor(found), frames, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("size", "samples"), [(320, 161), (7, 804), (7, 964)])
def test_number_of_frames(size, samples):
    """A frame counts if the sound has the sample after it, with an odd number of samples, too."""
    theirs = Gemma4AudioFeatureExtractor(frame_length_ms=size / 16)
    for given in (np.zeros(samples - 1, np.float32), np.zeros(samples, np.float32)):
        expected = int(theirs([given])["input_features_mask"][0].sum())
        assert UsmMel(frame_length=size).num_frames(len(given)) == expected


@pytest.mark.parametrize("samples", [161, 320, 321, 801, 12_345, 480_000])
def test_gemma4(tmp_path, samples):
    """The frames that transformers fills and masks are left out."""
    given = sound(30)[:samples]
    options = {"feature_size": 96, "max_frequency": 7600.0, "mel_floor": 0.01}
    theirs = Gemma4AudioFeatureExtractor(**options)
    whole = {"feature_extractor": json.loads(theirs.to_json_string())}
    name, pictures = "preprocessor_config.json", {"image_processor_type": "Gemma4ImageProcessor"}
    (tmp_path / name).write_text(json.dumps(pictures))
    processor = make(tmp_path, "gemma4", "processor_config.json", whole)
    (part,) = processor.process(given).parts
    expected = theirs([given], return_tensors="np")
    mask = expected["input_features_mask"][0]
    writer = object.__new__(Gemma4Processor)
    vars(writer).update(boa_token="<|audio>", audio_token="a", eoa_token="<audio|>")
    text = writer.replace_audio_token(expected, 0)
    first, count, last = part.place.pieces
    assert f"{first}{'a' * count}{last}" == text
    assert part.place.num_encoder_tokens == count
    frames = expected["input_features"][0][mask]
    np.testing.assert_allclose(features_of(part), frames, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("samples", [1, 639, 640, 641, 12_345, 480_000])
def test_gemma4_unified(tmp_path, samples):
    given, theirs = sound(30)[:samples], Gemma4UnifiedAudioFeatureExtractor()
    whole = {"feature_extractor": json.loads(theirs.to_json_string())}
    processor = make(tmp_path, "gemma4_unified", "processor_config.json", whole)
    (part,) = processor.process(given).parts
    expected = theirs([given], return_tensors="np")
    writer = object.__new__(Gemma4UnifiedProcessor)
    vars(writer).update(boa_token="<|audio>", audio_token="a", eoa_token="<audio|>")
    first, count, last = part.place.pieces
    assert f"{first}{'a' * count}{last}" == writer.replace_audio_token(expected, 0)
    assert part.place.num_encoder_tokens == count
    np.testing.assert_array_equal(features_of(part), expected["input_features"][0])


def test_settings_of_gemma4_unified(tmp_path):
    for settings in (
        {"sampling_rate": 24_000},
        {"audio_samples_per_token": 0},
        {"feature_extractor_type": "Gemma4AudioFeatureExtractor"},
    ):
        with pytest.raises(ModelError, match=next(iter(settings))):
            make(tmp_path, "gemma4_unified", settings=settings)
    processor = make(tmp_path, "gemma4_unified", settings={})
    with pytest.raises(RequestError, match=r"30\.1 s, and at most 30 s are supported"):
        processor.process(sound(30.1))


def test_settings_of_gemma4(tmp_path):
    """Folders that say nothing about sounds have transformers' settings; others are checked."""
    pictures = {"image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 280}
    processor = make(tmp_path, "gemma4", settings=pictures)
    assert processor.features == UsmMel()
    theirs = json.loads(Gemma4AudioFeatureExtractor().to_json_string())
    assert {name: theirs[name] for name in vars(UsmMel())} == vars(UsmMel())
    for settings in (
        {"dither": 0.1},
        {"preemphasis": 0.97},
        {"sampling_rate": 24_000},
        {"frame_length_ms": 40.0},
        {"per_bin_mean": [0.0] * 128},
        {"max_frequency": 9000.0},
        {"feature_extractor_type": "WhisperFeatureExtractor"},
    ):
        with pytest.raises(ModelError, match=next(iter(settings))):
            make(tmp_path, "gemma4", settings=settings)
    with pytest.raises(RequestError, match="160 samples, and the model reads at least 161"):
        processor.process(sound(1)[:160])
    assert processor.max_seconds == 30  # files are not decoded beyond it
    with pytest.raises(RequestError, match=r"30\.1 s, and at most 30 s are supported"):
        processor.process(sound(30.1))


@pytest.mark.parametrize("seconds", [0.001, 3, 30, 30.001, 71])
def test_voxtral(tmp_path, seconds):
    samples = sound(seconds)
    parts = make(tmp_path, "voxtral").process(samples).parts
    extractor = WhisperFeatureExtractor(feature_size=128)
    options = {"padding": True, "truncation": False, "pad_to_multiple_of": 480_000}
    expected = extractor(samples, sampling_rate=16_000, return_tensors="np", **options)
    windows = expected["input_features"].reshape(128, -1, 3000).transpose(1, 2, 0)
    assert len(parts) == len(windows) == -(-len(samples) // 480_000)
    for part, window in zip(parts, windows, strict=True):
        assert (part.place.num_encoder_tokens, part.place.num_embeds) == (1500, 375)
        torch.testing.assert_close(
            torch.tensor(features_of(part)), torch.tensor(window), atol=1e-4, rtol=1e-4
        )


def test_lengths(tmp_path, monkeypatch):
    processor = make(tmp_path, "qwen2_audio")
    with pytest.raises(RequestError, match="320 samples, and the model reads at least 321"):
        processor.process(np.zeros(320, np.float32))
    with pytest.raises(RequestError, match=r"30\.0 s, and at most 30 s are supported"):
        processor.process(np.zeros(480_001, np.float32))
    other = make(tmp_path, "qwen3_asr", settings={"feature_size": 128})
    with pytest.raises(RequestError, match=r"120\.1 s, and at most 120 s"):
        other.process(np.zeros(1_921_600, np.float32))
    voxtral = make(tmp_path, "voxtral")
    voxtral.max_rows = 1000  # two windows have 750 rows
    monkeypatch.setattr(LogMel, "compute", None)  # no features are made of a sound that is too long
    with pytest.raises(RequestError, match=r"60\.1 s, and at most 60 s are supported with this mo"):
        voxtral.process(np.zeros(961_600, np.float32))
    with pytest.raises(ModelError, match="n_window=30"):
        make(tmp_path, "qwen3_asr", settings={"n_window": 30})
    with pytest.raises(RequestError, match="nonsense is not allowed"):
        processor.changed({"nonsense": 1})


def test_files(tmp_path):
    whole = {"feature_extractor": SETTINGS | {"feature_size": 80}}
    processor = make(tmp_path, "voxtral", "processor_config.json", whole)
    assert (processor.features.feature_size, processor.placeholder) == (80, "[AUDIO]")
    for text in ("{", "[]"):
        (tmp_path / "preprocessor_config.json").write_text(text)
        with pytest.raises(ModelError, match=r"preprocessor_config\.json"):
            read_sound_processor(open_checkpoint(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert read_sound_processor(open_checkpoint(tmp_path)) is None


@pytest.mark.parametrize("samples", [400, 559, 560, 1680, 12_345, 480_000, 640_400])
def test_phi4(tmp_path, samples):
    given = sound(40.1)[:samples]
    options = {"feature_size": 24, "mel_max_frequency": 7000.0, "preemphasis": 0.9}
    settings = {"image_processor_type": "Phi4MultimodalImageProcessor"}
    settings |= {"feature_extractor_type": "Phi4MultimodalFeatureExtractor"}
    processor = make(tmp_path, "phi4_multimodal", settings=settings | options)
    (part,) = processor.process(given).parts
    theirs = Phi4MultimodalFeatureExtractor(**options)
    expected = theirs(given, sampling_rate=16_000, return_tensors="pt")
    found = torch.tensor(features_of(part))
    frames = expected["audio_input_features"][0]
    torch.testing.assert_close(found, frames, atol=1e-4, rtol=1e-4)
    assert part.place.pieces == (int(expected["audio_embed_sizes"][0]),)


def test_phi4_refuses(tmp_path):
    settings = {"feature_extractor_type": "Phi4MultimodalFeatureExtractor"}
    processor = make(tmp_path, "phi4_multimodal", settings=settings)
    with pytest.raises(RequestError, match="at least 400"):
        processor.process(np.zeros(399, np.float32))
    with pytest.raises(RequestError, match="at most 600 s"):
        processor.check_length(600.1)
    processor.max_rows = 100
    with pytest.raises(RequestError, match="at most 8 s"):
        processor.check_length(8.1)
    for name, value in (("audio_compression_rate", 4), ("mel_max_frequency", 9000)):
        with pytest.raises(ModelError, match=name):
            make(tmp_path, "phi4_multimodal", settings=settings | {name: value})


@pytest.mark.parametrize("kind", ["Whisper", "Voxtral"])
def test_bands_of_another_model(tmp_path, kind):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[kind]))
    checkpoint = open_checkpoint(tmp_path)
    spec = read_spec(checkpoint)
    check_frames(checkpoint, spec)  # without the file
    for bands in (80, 128):
        settings = json.dumps(SETTINGS | {"feature_size": bands})
        (tmp_path / "preprocessor_config.json").write_text(settings)
        checkpoint = open_checkpoint(tmp_path)
        if bands == spec.encoder("audio").inputs.frame_size:
            check_frames(checkpoint, spec)
        else:
            with pytest.raises(ModelError, match=rf"feature_size={bands} .*use the files of one"):
                check_frames(checkpoint, spec)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("gemma4", "feature_size"),
        ("gemma4_unified wide", "audio_samples_per_token"),
        ("phi4", "feature_size"),
        ("qwen3_asr", "feature_size"),
    ],
)
def test_other_inputs_of_another_model(tmp_path, name, field):
    """Spectrograms of other encoders, and frames of samples; an absent field has a default."""
    case = CASES[name]
    config = {"architectures": [case.architecture], **case.config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for size, fits in ((case.mel, True), (case.mel + 8, False), (None, False)):
        settings = {} if size is None else {field: size}
        settings["feature_extractor_type"] = "any"
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
        checkpoint = open_checkpoint(tmp_path)
        spec = read_spec(checkpoint)
        if fits:
            check_frames(checkpoint, spec)
        else:
            with pytest.raises(ModelError, match=rf"{field}=\d+ .* reads {case.mel} "):
                check_frames(checkpoint, spec)
