"""Hash of a model: the same in any folder, and another one for any change."""

import shutil

import pytest

from octavo.checkpoints import identity
from octavo.checkpoints.identity import model_hash
from octavo.checkpoints.registry import open_checkpoint
from octavo.models.hub import resolve_model


def hash_of(folder, load_format="auto"):
    return model_hash(open_checkpoint(folder, load_format), folder)


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(resolve_model("octavo/stories"), tmp_path / "a")


def test_the_same_files_elsewhere_are_the_same_model(folder):
    found = hash_of(folder)
    other = folder.with_name("b")
    shutil.move(folder, other)
    assert hash_of(other) == found


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_other_bytes_are_another_model(folder, name, small, monkeypatch):
    if not small:
        monkeypatch.setattr(identity, "_SMALL", 0)
    found = hash_of(folder)
    data = bytearray((folder / name).read_bytes())
    data[-2] ^= 1
    (folder / name).write_bytes(data)
    assert hash_of(folder) != found


def test_both_tokenizers_count(folder):
    """`tokenizer_mode` chooses the one that is read."""
    found = {hash_of(folder)}
    for text in ("{}", "[]"):
        (folder / "tekken.json").write_text(text)
        found.add(hash_of(folder))
    assert len(found) == 3


def test_weights_that_nobody_reads_do_not_count(folder):
    found = hash_of(folder, "dummy")
    (folder / "model.safetensors").unlink()
    assert hash_of(folder, "dummy") == found


@pytest.mark.parametrize("in_folder", [True, False])
def test_tokenizer_of_a_gguf_file(folder, tmp_path, in_folder):
    checkpoint = open_checkpoint(folder, "auto")
    (tmp_path / "other").mkdir()
    file = tmp_path / "other" / "other.gguf"
    tokenizer = file.parent if in_folder else file
    found = []
    for content in (b"GGUF1", b"GGUF2", b"GGUF1"):
        file.write_bytes(content)
        found.append(model_hash(checkpoint, tokenizer))
    assert found[0] == found[2]
    assert len({*found, model_hash(checkpoint, folder)}) == 3
