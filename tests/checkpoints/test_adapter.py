"""Folders of adapters: kinds that are refused by name, and damaged or hostile files."""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from octavo.checkpoints.adapter import AdapterData, PeftFolder, check_place
from octavo.errors import AdapterError, ModelError
from octavo.models.adapters import open_adapter_file
from tests.adapters import PREFIX, write_adapter
from tests.gguf_files import write_gguf

Q = "model.layers.0.self_attn.q_proj"
FACTORS = {
    f"{PREFIX}{Q}.lora_A.weight": torch.ones(4, 32),
    f"{PREFIX}{Q}.lora_B.weight": torch.ones(32, 4),
}
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "a", FACTORS)


def refusal(path: Path, root: Path | None = None) -> str:
    with pytest.raises(AdapterError) as caught:
        open_adapter_file(path, root)
    message = str(caught.value)
    assert len(message) < 1000
    assert str(path.name) in message
    return message


def test_an_adapter(folder: Path) -> None:
    file = open_adapter_file(folder)
    assert (file.kind, file.base, file.file.name) == ("LoRA", "org/base", WEIGHTS)
    assert list(file.factors) == [Q]
    assert file.factors[Q].rank == 4
    assert file.scale(Q) == 2.0


@pytest.mark.parametrize(
    ("fields", "tokens", "kind"),
    [
        ({"alora_invocation_tokens": [5, 6]}, (5, 6), "activated LoRA"),
        ({"alora_invocation_tokens": None}, (), "LoRA"),
        (
            {"alora_invocation_tokens": [5], "invocation_string": "x", "use_rslora": True},
            (5,),
            "activated rsLoRA",
        ),
    ],
)
def test_activated_lora(
    fields: dict[str, Any], tokens: tuple[int, ...], kind: str, folder: Path
) -> None:
    file = open_adapter_file(write_adapter(folder, FACTORS, **fields))
    assert (file.invocation_tokens, file.kind) == (tokens, kind)


def test_a_file_of_torch(folder: Path) -> None:
    """It is read without pickle; a transposed tensor is a view."""
    tensors = dict(FACTORS)
    tensors[f"{PREFIX}{Q}.lora_A.weight"] = torch.arange(128.0).view(32, 4).T
    (folder / WEIGHTS).unlink()
    torch.save(tensors, folder / "adapter_model.bin")
    file = open_adapter_file(folder)
    assert file.file.name == "adapter_model.bin"
    with AdapterData(file) as data:
        _, (a,) = data.read([file.factors[Q].a])
    assert (a == tensors[f"{PREFIX}{Q}.lora_A.weight"].numpy()).all()
    torch.save({"x": print}, folder / "adapter_model.bin")
    assert "cannot be read" in refusal(folder)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "peft_type",
            "IA3",
            "peft_type=IA3: (IA)³ is not supported; supported: LORA. Train a LoRA, or",
        ),
        (
            "peft_type",
            "OFT",
            "peft_type=OFT: this kind of adapter is not supported; supported: LORA",
        ),
        ("peft_type", "P_TUNING", "p-tuning is not supported; supported: LORA. Train a LoRA."),
        ("peft_type", ["LORA"], "is not supported; supported: LORA"),
        ("use_dora", True, f"has no magnitude of {Q}, and {CONFIG} says use_dora=true"),
        ("lora_bias", True, f"has no bias of {Q}, and {CONFIG} says lora_bias=true"),
        ("use_dora", 1, "it must be true or false"),
        ("bias", "all", "bias=all: LoRA with trained biases is not supported"),
        ("trainable_token_indices", [1, 2], "LoRA with trained tokens is not supported"),
        ("layer_replication", [[0, 4], [2, 5]], "repeated layers is not supported"),
        ("alora_invocation_tokens", [5, -6], "it must be a token id or a list of token ids"),
        ("alora_invocation_tokens", "hi", "it must be a token id or a list of token ids"),
        ("invocation_string", "hi", "invocation_string is set without alora_invocation_tokens"),
        ("use_qalora", True, "QA-LoRA is not supported"),
        ("init_lora_weights", "pissa_niter_16", "path_initial_model_for_weight_conversion"),
        ("init_lora_weights", "olora", "init_lora_weights=olora: the adapter belongs to a base"),
        ("init_lora_weights", "loftq", "In the program of the training, merge it into the model"),
        ("r", 0, "r=0 is not supported; it must be a whole number >= 1"),
        ("r", None, "the field r is missing"),
        ("r", True, "r=True is not supported"),
        ("lora_alpha", "16", "lora_alpha='16' is not supported; it must be a finite number"),
        ("lora_alpha", 10**400, "it must be a finite number"),
        ("lora_alpha", None, "the field lora_alpha is missing"),
        ("use_rslora", "yes", "it must be true or false"),
        ("rank_pattern", [1], "it must be an object"),
        ("rank_pattern", {"q_proj": 1.5}, "q_proj=1.5 is not supported"),
        ("alpha_pattern", {"q_proj": float("nan")}, "q_proj=nan is not supported"),
        ("alpha_pattern", {"(": 1}, "'(' is not a regular expression"),
        ("alpha_pattern", {"(a+)+b": 1}, "'(a+)+b' is not a regular expression that Octavo"),
        ("alpha_pattern", {".*a.*a.*": 1}, "too many alternatives besides"),
        ("alpha_pattern", {"a?" * 600: 1}, "it has more than 1000 characters"),
        ("rank_pattern", {f"a{i}|b": 1 for i in range(17)}, "more than 16 keys are regular"),
    ],
)
def test_configs_that_are_refused(field: str, value: Any, message: str, folder: Path) -> None:
    write_adapter(folder, FACTORS, **{field: value})
    assert message in refusal(folder)


def test_a_scale_beyond_float32(folder: Path) -> None:
    write_adapter(folder, FACTORS, lora_alpha=1e300)
    with pytest.raises(AdapterError, match="too large; lower alpha"):
        open_adapter_file(folder).scale(Q)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{Q}.lora_magnitude_vector.x y", "LoRA with other tensors than weights and biases"),
        ("model.embed_tokens.lora_embedding_A", "only one of the two factors (A, B) of model.e"),
        ("model.embed_tokens.token_adapter.trainable_tokens_delta", "LoRA with trained tokens"),
        ("\x1b[31m" * 50, "LoRA with other tensors than weights and biases"),
        (".lora_magnitude_vector" * 50, "names of tensors of more than 1000 characters"),
        ("", "LoRA with other tensors than weights and biases"),
    ],
)
def test_tensors_that_are_refused(name: str, message: str, folder: Path) -> None:
    write_adapter(folder, FACTORS | {f"{PREFIX}{name}": torch.ones(4)})
    assert message in refusal(folder)


def test_whole_modules(folder: Path) -> None:
    """Names of new and of old files."""
    weight, bias = torch.ones(3, 4), torch.ones(3)
    for name in ("score", "score.modules_to_save", "score.modules_to_save.default"):
        tensors = {f"{PREFIX}{name}.weight": weight, f"{PREFIX}score.bias": bias}
        write_adapter(folder, FACTORS | tensors, modules_to_save=["score", "classifier"])
        found = open_adapter_file(folder).trained
        assert list(found) == ["score"]
        assert {kind: it.shape for kind, it in found["score"].items()} == {
            "weight": (3, 4),
            "bias": (3,),
        }
    write_adapter(folder, FACTORS, modules_to_save=["score", "classifier"])
    assert "adapter_model.safetensors has no whole module; save" in refusal(folder)
    write_adapter(folder, FACTORS | tensors | {f"{PREFIX}score.weight": weight.clone()})
    assert "has the weight of score twice" in refusal(folder)
    write_adapter(folder, FACTORS | {f"{PREFIX}score.weight": weight.int()})
    assert "score.weight has type int32; supported" in refusal(folder)


@pytest.mark.parametrize(
    "tensors",
    [
        {f"{PREFIX}e.lora_embedding_A": torch.ones(1, 9)}
        | {f"{PREFIX}e.lora_embedding_B": torch.ones(4, 1)},
        {f"{PREFIX}e.weight": torch.ones(3, 4)},
    ],
)
def test_activated_lora_changes_no_embedding(
    tensors: dict[str, torch.Tensor], folder: Path
) -> None:
    """PEFT would change it for the tokens before the adapter, too."""
    write_adapter(folder, FACTORS | tensors, alora_invocation_tokens=[1])
    assert "activated LoRA (aLoRA) that changes e for all tokens" in refusal(folder)


A, B = FACTORS
MAGNITUDE, BIAS = f"{PREFIX}{Q}.lora_magnitude_vector", f"{PREFIX}{Q}.lora_B.bias"


@pytest.mark.parametrize(
    ("fields", "name", "kind"),
    [
        ({"use_dora": True}, MAGNITUDE, "DoRA"),
        ({"use_dora": True, "use_rslora": True}, f"{MAGNITUDE}.default.weight", "rsDoRA"),
        ({"lora_bias": True}, BIAS, "LoRA"),
        ({"lora_bias": True}, BIAS.replace("_B.", "_B.default."), "LoRA"),
    ],
)
def test_other_kinds(fields: dict[str, bool], name: str, kind: str, folder: Path) -> None:
    write_adapter(folder, FACTORS | {name: torch.ones(32)}, **fields)
    file = open_adapter_file(folder)
    assert file.kind == kind
    found = file.factors[Q]
    assert ((found.magnitude or found.bias).shape, len(found.tensors)) == ((32,), 3)
    write_adapter(folder, FACTORS | {name: torch.ones(32)})
    assert "a magnitude of" in refusal(folder) or "a bias of" in refusal(folder)
    write_adapter(folder, FACTORS | {name: torch.ones(31)}, **fields)
    assert "have different numbers of outputs" in refusal(folder)
    write_adapter(folder, {name: torch.ones(32)}, **fields)
    assert "only one of the two factors" in refusal(folder)
    for other in ({"lora_bias": True}, {"alora_invocation_tokens": [5]}):
        write_adapter(folder, FACTORS | {name: torch.ones(32)}, use_dora=True, **other)
        assert f"use_dora and {next(iter(other))} are set" in refusal(folder)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "has no factors of LoRA"),
        ({A: FACTORS[A]}, f"only one of the two factors (A, B) of {Q}"),
        (FACTORS | {A: torch.ones(5, 32)}, "A [5, 32] and B [32, 4]"),
        (FACTORS | {A: torch.ones(4)}, "are not [rank, inputs] and [outputs, rank]"),
        (FACTORS | {A: torch.ones(0, 32), B: torch.ones(32, 0)}, "A [0, 32]"),
        (FACTORS | {B: torch.ones(32, 4, dtype=torch.int8)}, "has type int8; supported: float64"),
        (FACTORS | {A.replace("lora_A.", "lora_A.x."): torch.ones(4, 32)}, "twice"),
    ],
)
def test_factors_that_are_wrong(
    tensors: dict[str, torch.Tensor], message: str, folder: Path
) -> None:
    write_adapter(folder, tensors)
    assert message in refusal(folder)


def header(text: str | bytes, data: bytes = bytes(1024), length: int | None = None) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(name: str, dtype: str, shape: list[int], begin: int, end: int) -> str:
    described = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    return f"{json.dumps(name)}:{json.dumps(described)}"


TWO = (entry(A, "F32", [4, 32], 0, 512), entry(B, "F32", [32, 4], 512, 1024))
HOSTILE = {
    "no bytes": b"",
    "few bytes": b"\x01\x02",
    "header of 10 GB": header("{}", length=10 * 2**30),
    "header beyond the file": header("{}", b"", 4096),
    "negative length": b"\xff" * 8 + b"{}",
    "no JSON": header("not JSON"),
    "a list": header("[]"),
    "not UTF-8": header(b'{"\xff\xfe":{}}'),
    "deep": header("[" * 100_000 + "]" * 100_000),
    "deep objects": header('{"a":' * 100_000 + "1" + "}" * 100_000),
    "overlap": header("{" + TWO[0] + "," + entry(B, "F32", [32, 4], 256, 768) + "}"),
    "same place": header("{" + TWO[0] + "," + entry(B, "F32", [32, 4], 0, 512) + "}"),
    "beyond the end": header("{" + TWO[0] + "," + entry(B, "F32", [32, 4], 2**40, 2**41) + "}"),
    "negative offset": header("{" + entry(A, "F32", [4, 32], -512, 0) + "}"),
    "reversed": header("{" + entry(A, "F32", [4, 32], 512, 0) + "}"),
    "too small a place": header("{" + TWO[0] + "," + entry(B, "F32", [32, 4], 512, 900) + "}"),
    "sizes that overflow": header("{" + entry(A, "F32", [2**33, 2**33], 0, 1024) + "}"),
    "negative size": header("{" + entry(A, "F32", [-4, -32], 0, 512) + "}"),
    "size of text": header('{"a":{"dtype":"F32","shape":["4"],"data_offsets":[0,16]}}'),
    "unknown type": header("{" + entry(A, "F3", [4, 32], 0, 512) + "}"),
    "no type": header('{"a":{"shape":[4],"data_offsets":[0,16]}}'),
    "a number": header('{"a":1}'),
    "one key twice": header("{" + TWO[0] + "," + TWO[0] + "}", bytes(1024)),
    "cut off": header("{" + ",".join(TWO) + "}", bytes(1000)),
    "more bytes": header("{" + ",".join(TWO) + "}", bytes(2000)),
    "Git-LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_weights(case: str, folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(HOSTILE[case])
    assert "download" in refusal(folder)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "1", '"LORA"', "{", '{"r": 1' + "0" * 5000 + "}", '{"a":' * 100_000, "\xff"],
)
def test_hostile_configs(text: str, folder: Path) -> None:
    (folder / CONFIG).write_text(text, "latin-1")
    refusal(folder)


@pytest.mark.parametrize("size", [2**20 + 1, 2**35])
def test_a_config_that_is_too_large(size: int, folder: Path) -> None:
    with (folder / CONFIG).open("wb") as stream:
        stream.truncate(size)
    assert "more than" in refusal(folder)


@pytest.mark.parametrize("name", [WEIGHTS, "adapter_model.bin", "a.gguf"])
def test_a_file_that_is_cut_off_while_it_is_read(name: str, folder: Path) -> None:
    """A map of the file would end the process with SIGBUS."""
    path = folder
    (folder / WEIGHTS).unlink()
    if name == "a.gguf":
        path = folder / name
        kind = {f"{x}.type": y for x, y in (("general", "adapter"), ("adapter", "lora"))}
        named = {f"blk.0.attn_q.weight.lora_{x}": (0, (4, 4), bytes(64)) for x in "ab"}
        write_gguf(path, kind | {"general.architecture": "llama"}, named)
        contents = path.read_bytes()
    elif name == WEIGHTS:
        contents = save(FACTORS)
    else:
        torch.save(FACTORS, folder / name)
        contents = (folder / name).read_bytes()
    ends = threading.Event()

    def change() -> None:
        while not ends.is_set():
            (folder / name).write_bytes(contents)  # first empties the file

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(100):
            with contextlib.suppress(AdapterError):
                file = open_adapter_file(path)
                with AdapterData(file) as data, contextlib.suppress(ModelError, OSError):
                    data.read([next(iter(file.factors.values())).a])
    finally:
        ends.set()
        thread.join()


def test_a_link_that_changes_after_its_check(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder becomes a link that leads out of the root, or a file becomes a pipe."""
    other = shutil.copytree(folder, tmp_path / "other" / "a")
    kept = tmp_path / "other" / "kept"

    def swap(path: Path, root: Path | None) -> None:
        check_place(path, root)
        other.rename(kept)
        other.symlink_to(folder)

    monkeypatch.setattr("octavo.models.adapters.check_place", swap)
    with pytest.raises(AdapterError, match="has changed while it was read"):
        open_adapter_file(other, other.parent)
    other.unlink()
    kept.rename(other)

    def pipe(path: Path, root: Path | None) -> None:
        check_place(path, root)
        (other / WEIGHTS).unlink()
        os.mkfifo(other / WEIGHTS)

    monkeypatch.setattr("octavo.models.adapters.check_place", pipe)
    assert "is not a regular file" in refusal(other)


def test_parts_of_larger_tensors(folder: Path) -> None:
    """Reading them would take the memory of the larger ones."""
    (folder / WEIGHTS).unlink()
    name = f"{PREFIX}{Q}.lora_B.weight"
    torch.save(FACTORS | {name: torch.ones(32, 4096)[:, :4]}, folder / "adapter_model.bin")
    file = open_adapter_file(folder)
    with AdapterData(file) as data, pytest.raises(AdapterError, match="parts of larger ones"):
        data.read([file.factors[Q].b])


@settings(
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_damaged_files_raise_adapter_errors(data: st.DataObject, folder: Path) -> None:
    """A changed or cut-off file is read, or refused with the one error."""
    write_adapter(folder, FACTORS)
    name = data.draw(st.sampled_from([CONFIG, WEIGHTS]))
    contents = bytearray((folder / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        contents[data.draw(st.integers(0, min(len(contents) - 1, 400)))] = data.draw(
            st.integers(0, 255)
        )
    if data.draw(st.booleans()):
        del contents[data.draw(st.integers(0, len(contents))) :]
    (folder / name).write_bytes(contents)
    with contextlib.suppress(AdapterError):
        assert open_adapter_file(folder).factors


def test_places(folder: Path, tmp_path: Path) -> None:
    """With a root, neither paths nor links lead elsewhere; without one, they may."""
    assert open_adapter_file(folder, tmp_path).base == "org/base"
    other = tmp_path / "other"
    other.mkdir()
    assert f"is outside of {other} (lora_root)" in refusal(folder, other)
    assert "is outside of" in refusal(other / ".." / "a", other)
    (other / "link").symlink_to(folder)
    assert open_adapter_file(other / "link").base == "org/base"
    assert "is outside of" in refusal(other / "link", other)
    inner = other / "inner"
    inner.mkdir()
    (inner / CONFIG).write_bytes((folder / CONFIG).read_bytes())
    (inner / WEIGHTS).symlink_to(folder / WEIGHTS)
    assert open_adapter_file(inner).base == "org/base"
    assert f"{WEIGHTS} is outside of" in refusal(inner, other)
    assert open_adapter_file(other / "link", tmp_path).base == "org/base"


def test_folders_that_are_no_adapters(folder: Path, tmp_path: Path) -> None:
    assert "There is no adapter" in refusal(tmp_path / "none")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert f"has no {CONFIG}" in refusal(empty)
    (folder / WEIGHTS).unlink()
    assert f"has no {WEIGHTS}" in refusal(folder)
    os.mkfifo(folder / WEIGHTS)
    assert "is not a regular file" in refusal(folder)
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(folder / WEIGHTS)
    refusal(folder)
    text = tmp_path / "text.gguf"
    text.write_text("text")
    assert "not a GGUF file" in refusal(text)


@pytest.mark.skipif(
    importlib.util.find_spec("peft") is None,
    reason="peft is not installed; it belongs to the extra dev",
)
@settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    keys=st.lists(
        st.lists(
            st.sampled_from(
                ["q_proj", "proj", "self_attn", "layers", "0", "1", r"\d", ".*", "(0|1)", "^model"]
            ),
            min_size=1,
            max_size=4,
        ).map(".".join),
        max_size=5,
        unique=True,
    ).filter(lambda keys: all(key.count("*") <= 1 for key in keys))
)
def test_patterns_find_what_peft_finds(keys: list[str], folder: Path) -> None:
    from peft.utils.other import get_pattern_key

    alphas = {key: index + 1.0 for index, key in enumerate(keys)}
    modules = [f"model.layers.{i}.self_attn.{x}" for i in (0, 1, 10) for x in ("q_proj", "k_proj")]
    tensors = {}
    for module in modules:
        tensors |= {name.replace(Q, module): tensor.clone() for name, tensor in FACTORS.items()}
    write_adapter(folder, tensors, alpha_pattern=alphas, lora_alpha=400)
    file = open_adapter_file(folder)
    for module in modules:
        expected = alphas.get(get_pattern_key(list(alphas), module), 400)
        assert file.scale(module) == expected / 4


def test_errors_are_found_by_their_code(folder: Path) -> None:
    write_adapter(folder, FACTORS, use_qalora=True)
    with pytest.raises(AdapterError) as caught:
        PeftFolder(folder)
    assert (caught.value.status, caught.value.code) == (400, "invalid_adapter")
    assert re.search("Train without it, or merge it into the model", caught.value.message)
