"""Checkpoints by load format: their files of weights, and texts of the tokenizer."""

from pathlib import Path

import pytest

from octavo.checkpoints.registry import open_checkpoint
from octavo.errors import ModelError


@pytest.mark.parametrize(
    ("load_format", "files"),
    [
        ("auto", ["model-rank-0-part-0.safetensors", "model.safetensors"]),
        ("safetensors", ["model-rank-0-part-0.safetensors", "model.safetensors"]),
        ("pt", ["pytorch_model.bin"]),
        ("sharded_state", ["model-rank-0-part-0.safetensors"]),
        ("dummy", []),
    ],
)
def test_files_of_weights(load_format, files, tmp_path: Path) -> None:
    for name in ("model.safetensors", "pytorch_model.bin", "model-rank-0-part-0.safetensors"):
        (tmp_path / name).touch()
    (tmp_path / "consolidated.safetensors").touch()
    checkpoint = open_checkpoint(tmp_path, load_format)
    assert checkpoint.load_format == load_format
    assert [file.name for file in checkpoint.weight_files] == files


def test_texts(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.read_text("tokenizer.json") is None
    assert checkpoint.generation_config is None
    for name in ("b.jinja", "a.jinja"):
        (tmp_path / name).write_bytes(b"one\r\ntwo")
    assert checkpoint.file_names("*.jinja") == ["a.jinja", "b.jinja"]
    assert checkpoint.read_text("a.jinja") == "one\ntwo"
    for data, message in (
        (b"\xff\xfe", "a.jinja cannot be read: 'utf-8' codec"),
        (b"version https://git-lfs.github.com/spec/v1", "a.jinja is a Git-LFS pointer"),
    ):
        (tmp_path / "a.jinja").write_bytes(data)
        with pytest.raises(ModelError, match=message):
            checkpoint.read_text("a.jinja")
