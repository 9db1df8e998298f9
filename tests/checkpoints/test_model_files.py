"""Folders without a model: the message names their content and the fix."""

import json
import shutil
from pathlib import Path

import pytest

from octavo import LLM
from octavo.checkpoints.base import shorten_names
from octavo.config import BUILTIN_MODEL
from octavo.errors import ModelError
from octavo.models.hub import resolve_model

POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)
ADAPTER = json.dumps({"peft_type": "LORA", "base_model_name_or_path": "org/base"})
CONFIG = "config.json"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"is empty; name a folder with config\.json"),
        ({"notes.txt": ""}, r"has no config\.json: a model is a folder"),
        (
            {"adapter_config.json": ADAPTER},
            "is an adapter for org/base, not a model. Name the model, and add enable_lora",
        ),
        (
            {"adapter_config.json": "{"},
            "is an adapter, not a model. Name the model, and add enable_lora",
        ),
        ({"a-Q4.gguf": "GGUF"}, r"a-Q4\.gguf is damaged at the version"),
        ({"a.gguf": "GGUF", "b.gguf": ""}, r"holds several GGUF models: a\.gguf, b\.gguf"),
        # The tokenizer is missing, too: the config is checked first.
        ({CONFIG: "{"}, r"config\.json is damaged or cut off"),
        ({CONFIG: POINTER}, r"config\.json is a Git-LFS pointer.*`git lfs pull`"),
    ],
)
def test_what_the_folder_is(files: dict[str, str], message: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ModelError, match=message):
        LLM(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("model.safetensors", POINTER, r"model\.safetensors is a Git-LFS pointer"),
        ("tokenizer.json", POINTER, r"tokenizer\.json is a Git-LFS pointer"),
        ("tokenizer_config.json", POINTER, r"tokenizer_config\.json is a Git-LFS pointer"),
        ("chat_template.jinja", POINTER, r"chat_template\.jinja is a Git-LFS pointer"),
        ("pytorch_model.bin", POINTER, r"pytorch_model\.bin is a Git-LFS pointer"),
        # Next to a config.json, but instead of the weights.
        ("adapter_config.json", ADAPTER, "is an adapter for org/base"),
        ("a-Q4.gguf", "GGUF", r"holds GGUF files; name one of them, such as .*a-Q4\.gguf"),
        ("notes.txt", "", r"holds no \*\.safetensors files: .*Download the model again"),
    ],
)
def test_one_file_is_none_of_a_model(name: str, text: str, message: str, tmp_path: Path) -> None:
    folder = shutil.copytree(resolve_model(BUILTIN_MODEL), tmp_path / "model")
    if not (folder / name).exists():
        (folder / "model.safetensors").unlink()
    (folder / name).write_text(text)
    load_format = "pt" if name.endswith(".bin") else "auto"
    with pytest.raises(ModelError, match=message):
        LLM(str(folder), load_format=load_format, max_model_len=64)


def test_names_in_messages():
    assert shorten_names(["a.b", "", "b\0", "x" * 999]) == f"a.b, '', 'b\\x00', {'x' * 200}"
    assert shorten_names(list("abcdefgh")) == "a, b, c, d, e, f and 2 more"
