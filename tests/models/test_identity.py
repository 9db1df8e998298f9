"""Hash of a model: the same in any folder, and another one for any change."""

import shutil

import pytest

from octavo.models import identity
from octavo.models.hub import resolve_model
from octavo.models.identity import model_hash


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(resolve_model("octavo/stories"), tmp_path / "a")


def test_the_same_files_elsewhere_are_the_same_model(folder):
    found = model_hash(folder, folder, "auto")
    other = folder.with_name("b")
    shutil.move(folder, other)
    assert model_hash(other, other, "auto") == found


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_other_bytes_are_another_model(folder, name, small, monkeypatch):
    if not small:
        monkeypatch.setattr(identity, "_SMALL", 0)
    found = model_hash(folder, folder, "auto")
    data = bytearray((folder / name).read_bytes())
    data[-2] ^= 1
    (folder / name).write_bytes(data)
    assert model_hash(folder, folder, "auto") != found


def test_weights_that_nobody_reads_do_not_count(folder):
    found = model_hash(folder, folder, "dummy")
    (folder / "model.safetensors").unlink()
    assert model_hash(folder, folder, "dummy") == found
