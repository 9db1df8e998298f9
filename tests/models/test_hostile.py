"""Malicious or broken model folders: rejected at once, with a ModelError."""

import json
import os
import resource
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from octavo.config import EngineConfig
from octavo.errors import ConfigError, ModelError
from octavo.models.hub import resolve_model
from octavo.plan.memory import Scratch
from octavo.plan.memory_plan import make_memory_plan, resolve_dtype, resolve_max_model_len
from octavo.plan.setup import WorkerSetup
from octavo.platforms.cpu import memory_budget
from tests.models.cases import CASES
from tests.models.configs.dense import MPT
from tests.models.harness import load, make_hf, save_and_load, save_config, spec_of


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    architecture, config = CASES["llama"]
    make_hf(architecture, **config).save_pretrained(folder)
    load(folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


@pytest.fixture(autouse=True)
def in_little_memory(whole: Path) -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB


def header(folder: Path, text: bytes, length: int | None = None, data: bytes = b"") -> None:
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def entry(dtype: str = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> bytes:
    return json.dumps({"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def link(path: Path, to: str) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(to)


def directory(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def index(folder: Path, name: Any) -> None:
    text = json.dumps({"weight_map": {"model.norm.weight": name}})
    (folder / "model.safetensors.index.json").write_text(text)


FOLDERS: dict[str, Callable[[Path], object]] = {
    "fifo as weights": lambda p: fifo(p / "model.safetensors"),
    "fifo as config": lambda p: fifo(p / "config.json"),
    "fifo as generation config": lambda p: fifo(p / "generation_config.json"),
    "fifo as index": lambda p: fifo(p / "model.safetensors.index.json"),
    "directory as weights": lambda p: directory(p / "model.safetensors"),
    "directory as config": lambda p: directory(p / "config.json"),
    "endless config": lambda p: link(p / "config.json", "/dev/zero"),
    "endless weights": lambda p: link(p / "model.safetensors", "/dev/zero"),
    "link to itself": lambda p: link(p / "config.json", "config.json"),
    "deep config": lambda p: (p / "config.json").write_text("[" * 10**6),
    "deep value": lambda p: (p / "config.json").write_text('{"x":' + "[" * 10**6),
    "large config": lambda p: os.truncate(p / "config.json", 2**40),
    "deep header": lambda p: header(p, b"[" * 10**6),
    "deep header value": lambda p: header(p, b'{"x":' + b"[" * 10**6),
    "no header": lambda p: header(p, b""),
    "header longer than the file": lambda p: header(p, b"{}", 2**63),
    "header of all the memory": lambda p: (
        header(p, b"{}", 2**34),
        os.truncate(p / "model.safetensors", 2**35),
    ),
    "header of the wrong kind": lambda p: header(p, b"[1]"),
    "header without fields": lambda p: header(p, b'{"x": {}}'),
    "type unknown": lambda p: header(p, entry("F99"), None, b"1234"),
    "negative shape": lambda p: header(p, entry(shape=(-1,)), None, b"1234"),
    "shape of floats": lambda p: header(p, entry(shape=(1.5,)), None, b"1234"),
    "shape beyond memory": lambda p: header(p, entry(shape=(2**40, 2**40)), None, b"1234"),
    "offsets turned round": lambda p: header(p, entry(offsets=(4, 0)), None, b"1234"),
    "offsets beyond the end": lambda p: header(p, entry(offsets=(0, 2**62)), None, b"1234"),
    "overlapping": lambda p: header(
        p, entry()[:-1] + b"," + entry()[1:].replace(b"x", b"y"), None, b"1234"
    ),
    "index of a file outside": lambda p: index(p, "../model.safetensors"),
    "index of a file far outside": lambda p: index(p, "/etc/passwd"),
    "index of a hidden way out": lambda p: index(p, "a/../../model.safetensors"),
    "index of a folder": lambda p: index(p, "."),
    "index of a number": lambda p: index(p, 7),
    "index of a list": lambda p: index(p, ["model.safetensors"]),
    "index of nothing": lambda p: index(p, ""),
    "deep index": lambda p: (p / "model.safetensors.index.json").write_text('{"a":' * 10**6),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folders(name: str, folder: Path) -> None:
    FOLDERS[name](folder)
    with pytest.raises(ModelError):
        load(folder)


@pytest.mark.parametrize("changes", [{"shape": (2,)}, {"dtype": "F16"}, {"dtype": "F99"}])
def test_the_wrong_tensor_is_named(changes: dict[str, Any], folder: Path) -> None:
    header(folder, entry(**changes), None, b"1234")
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged .*\(x has .*\); download"):
        load(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_no_file_of_a_folder_is_waited_for(name: str, folder: Path) -> None:
    fifo(folder / name)
    with pytest.raises(ModelError, match=f"{name} is not a regular file"):
        resolve_model(str(folder))


def test_links_to_files_are_followed(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A download from the hub consists of links."""
    elsewhere = tmp_path_factory.mktemp("blobs")
    for file in list(folder.iterdir()):
        file.rename(elsewhere / file.name)
        file.symlink_to(elsewhere / file.name)
    assert resolve_model(str(folder)) == folder
    load(folder)


@pytest.mark.parametrize("kind", ["fifo", "text", "pickle", "cut"])
def test_pytorch_files(kind: str, folder: Path) -> None:
    file = folder / "pytorch_model.bin"
    torch.save({"x": torch.ones(9)}, file)
    data = file.read_bytes()
    if kind == "fifo":
        fifo(file)
    else:
        damaged = {"text": b"hello", "pickle": b"\x80\x02(]q\x00.", "cut": data[: len(data) // 2]}
        file.write_bytes(damaged[kind])
    with pytest.raises(ModelError):
        load(folder, load_format="pt")


ODD = [0, -1, 1, 2, 3, 7, 10**9, 2**31, 2**63, 10**30, 10**400, 0.5, -0.5, 1e-300, 1e300, 1e308]
ODD += [True, None, "", "x", [], [1], {}, float("nan"), float("inf"), [[[]]], "float64", "\0"]


@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.data())
def test_configs_with_odd_values(folder: Path, data: st.DataObject) -> None:
    """Any config.json is rejected, or planned for, or too large for the machine."""
    architecture, config = CASES[data.draw(st.sampled_from(list(CASES)))]
    save_config(folder, architecture, config)
    fields = json.loads((folder / "config.json").read_text())
    for _ in range(data.draw(st.integers(1, 3))):
        section = fields
        name = data.draw(st.sampled_from(sorted(section)))
        while isinstance(section[name], dict) and section[name] and data.draw(st.booleans()):
            section = section[name]
            name = data.draw(st.sampled_from(sorted(section)))
        section[name] = data.draw(st.sampled_from(ODD))
    (folder / "config.json").write_text(json.dumps(fields))
    engine = EngineConfig.from_kwargs(max_num_seqs=1, num_gpu_blocks_override=3, max_model_len=-1)
    try:
        spec = spec_of(folder)
        setup = WorkerSetup(
            config=engine,
            spec=spec,
            model_path=folder,
            dtype=resolve_dtype(engine, spec),
            max_model_len=resolve_max_model_len(engine, spec),
            max_num_batched_tokens=1,
        )
        budget = memory_budget(setup, (Scratch(0, 0, 0),))
        make_memory_plan(engine, spec, budget, max_num_batched_tokens=1)
    except (ModelError, ConfigError):
        return
    # Layers may share a cache; those of Falcon-H1 have two.
    assert len(spec.caches) <= 2 * len(spec.layers) <= 8192
    assert spec.max_model_len < 2**31


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_checkpoint_in_float64(dtype: str, quantization: str | None, folder: Path) -> None:
    model = make_hf(*CASES["llama"][:1], **CASES["llama"][1]).double()
    wide = save_and_load(model, folder, dtype, quantization=quantization)
    assert wide.spec.dtype == "float64"
    narrow = save_and_load(model.float(), folder, dtype, quantization=quantization)
    one, other = (model.head.lm_head.weight.data.numpy() for model in (wide, narrow))
    assert np.array_equal(one, other)
    assert wide.spec.loading_nbytes("float32") == 1.5 * narrow.spec.loading_nbytes("float32")
    config = EngineConfig.from_kwargs(model=str(folder))
    assert resolve_dtype(EngineConfig.from_kwargs(dtype="float32"), wide.spec) == "float32"
    with pytest.raises(ConfigError, match=r"float64.*set dtype=float32"):
        resolve_dtype(config, wide.spec)
    for name in ("dtype", "torch_dtype"):  # a config that names no type: the weights decide
        fields = json.loads((folder / "config.json").read_text())
        fields.pop(name, None)
        (folder / "config.json").write_text(json.dumps(fields))
    save_file({"x": torch.ones(1, dtype=torch.float64)}, folder / "model.safetensors")
    assert spec_of(folder).dtype == "float64"


def test_mpt_by_its_first_name(folder: Path) -> None:
    spec = save_config(folder, "MptForCausalLM", MPT)
    fields = json.loads((folder / "config.json").read_text())
    first = fields | {"architectures": ["MPTForCausalLM"], "norm_type": "low_precision_layernorm"}
    (folder / "config.json").write_text(json.dumps(first))
    assert replace(spec_of(folder), architecture="MptForCausalLM") == spec
