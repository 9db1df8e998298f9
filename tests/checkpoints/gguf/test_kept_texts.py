"""Kept texts of tokenizers: made once, and made again if anything is wrong with the kept ones."""

import pytest

from octavo.checkpoints.gguf.kept_texts import kept_texts
from octavo.errors import ModelError

HEADER = memoryview(b"a header")
TEXTS = {"tokenizer.json": '{"é": 1}', "tokenizer_config.json": "{}"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "octavo" / "tokenizers"


def make():
    make.calls += 1
    return TEXTS


@pytest.fixture(autouse=True)
def _no_calls():
    make.calls = 0


def kept(header=HEADER):
    return kept_texts(header, make)


def test_made_once(folder):
    assert kept() == kept() == TEXTS
    assert make.calls == 1
    kept(memoryview(b"another header"))
    assert make.calls == 2
    assert len([*folder.iterdir()]) == 2
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("data", [b"", b"abc", b"12345678"])
def test_damaged(folder, data):
    kept()
    (file,) = folder.iterdir()
    file.write_bytes(data)
    assert kept() == kept() == TEXTS
    assert make.calls == 2


def test_changed_byte(folder):
    kept()
    (file,) = folder.iterdir()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1  # in a text: it can still be decoded
    file.write_bytes(data)
    assert kept() == TEXTS
    assert make.calls == 2


def test_folder_of_others(folder):
    """Texts in a folder that others can write are neither read nor written."""
    kept()
    folder.chmod(0o777)
    assert kept() == TEXTS
    assert make.calls == 2


def test_no_folder(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert kept() == TEXTS


def test_the_least_recently_used_are_deleted(folder):
    kept(memoryview(b"0"))
    for i in range(1, 16):
        kept(memoryview(str(i).encode()))
    kept(memoryview(b"0"))
    kept(memoryview(b"16"))
    assert len([*folder.iterdir()]) == 16
    make.calls = 0
    kept(memoryview(b"0"))
    assert make.calls == 0
    kept(memoryview(b"1"))
    assert make.calls == 1


def test_errors_are_not_kept(folder):
    def fail():
        raise ModelError("no tokenizer")

    with pytest.raises(ModelError, match="no tokenizer"):
        kept_texts(HEADER, fail)
    assert kept() == TEXTS
