"""`octavo transcribe` with a small model."""

import argparse
import json

import pytest

from octavo.errors import ConfigError, RequestError
from octavo.model_tools import transcribe
from tests.media.sounds import chirp, encode
from tests.speech_model import write_speech_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_speech_model(tmp_path_factory.mktemp("speech"))


@pytest.fixture
def sounds(tmp_path):
    files = [tmp_path / "a.mp3", tmp_path / "b.m4a"]
    for file, seconds in zip(files, (1.0, 2.0), strict=True):
        file.write_bytes(encode(chirp(seconds), file.suffix[1:]))
    return [str(file) for file in files]


def run(model, sounds, *flags):
    parser = argparse.ArgumentParser()
    transcribe.add_arguments(parser)
    return transcribe.run(
        parser.parse_args([*sounds, "--model", model, "--load-format", "dummy", *flags])
    )


def test_to_standard_output(model, sounds, capsys):
    result = run(model, sounds, "--language", "de")
    assert result["sounds"] == 2
    assert result["seconds"] == pytest.approx(3.0, abs=0.2)
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_to_files(model, sounds, tmp_path):
    folder = tmp_path / "out"
    run(model, sounds, "--format", "verbose_json", "--translate", "--out-dir", str(folder))
    data = json.loads((folder / "b.json").read_text())
    assert (data["task"], (folder / "a.json").exists()) == ("translate", True)
    with pytest.raises(ConfigError, match=r"a\.json exists already"):
        run(model, sounds, "--format", "json", "--out-dir", str(folder))
    with pytest.raises(ConfigError, match=r"two sounds have this name"):
        run(model, sounds[:1] * 2, "--format", "srt", "--out-dir", str(folder))
    with pytest.raises(ConfigError, match="cannot be made"):
        run(model, sounds, "--out-dir", sounds[0])


def test_a_bad_sound_loses_no_other(model, sounds, tmp_path, capsys):
    bad = tmp_path / "bad.wav"
    bad.write_bytes(b"RIFF1234WAVEfmt ")
    with pytest.raises(RequestError, match=r"bad\.wav: "):
        run(model, [*sounds, str(bad), *sounds], "--language", "de")
    assert len(capsys.readouterr().out.splitlines()) == 2
