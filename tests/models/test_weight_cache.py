"""Weights kept from one start to the next: found again whole, or packed anew."""

import errno
import logging
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.checkpoints.registry import open_checkpoint
from octavo.config import EngineConfig, cache_folder
from octavo.kernels.native import NativeOps
from octavo.models import weight_cache
from octavo.models.weight_cache import WeightCache, read_ahead, weights_key
from tests.models.cases import CASES
from tests.models.configs.sizes import VOCAB
from tests.models.harness import generate, load, make_hf, make_prompts, spec_of
from tests.models.weight_cache_race import keep, memory, read

KEY = b"made of this"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a tiny Llama."""
    folder = tmp_path / "model"
    make_hf("LlamaForCausalLM", **CASES["llama"][1]).save_pretrained(folder)
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> WeightCache:
    return WeightCache(tmp_path / "cache", 2**30)


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows with every packed weight."""
    calls: list[str] = []
    for name in ("pack_weight", "quantize_weight"):
        original = getattr(NativeOps, name)

        def counted(*args: Any, name: str = name, original: Any = original, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(NativeOps, name, counted)
    return calls


def logits(folder: Path, cache: WeightCache, **options: Any) -> Tensor:
    model = load(folder, cache=cache, **options)
    if cache.writer is not None:
        cache.writer.join()
    return generate(model, make_prompts(VOCAB, (20,)), 2).logits[0]


@settings(max_examples=25, deadline=None)
@given(
    nbytes=st.integers(1, 3 * 2**21 + 5),
    place=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
    cut=st.integers(1, 100),
)
def test_whatever_is_damaged_is_not_read(
    tmp_path_factory: pytest.TempPathFactory, nbytes: int, place: float, bit: int, cut: int
) -> None:
    """Any changed bit, and any wrong length, is detected."""
    cache = WeightCache(tmp_path_factory.mktemp("cache") / "cache", 2**30)
    data = memory(nbytes)
    keep(cache, KEY, data)
    file = cache.file(KEY)
    whole = bytearray(file.read_bytes())
    again = read(cache, KEY, len(data))
    assert again is not None
    assert (again == data).all()
    assert read(cache, KEY + b"!", len(data)) is None
    whole[int(place * len(whole))] ^= 1 << bit
    for damaged in (bytes(whole), bytes(whole[:-cut]), bytes(whole) + b"!" * cut, b""):
        file.write_bytes(damaged)
        assert read(cache, KEY, len(data)) is None
        assert not file.exists()


def test_pages_that_changed_places_are_not_read(cache: WeightCache) -> None:
    data = memory(3 * 2**20)
    keep(cache, KEY, data)
    pages = data.reshape(-1, 4096).copy()
    pages[[5, 6]] = pages[[6, 5]]
    with open(cache.file(KEY), "r+b") as file:
        file.write(pages.data)
    assert read(cache, KEY, len(data)) is None


def test_weights_of_another_key_are_not_read(cache: WeightCache) -> None:
    data = memory(4096)
    keep(cache, KEY, data)
    os.rename(cache.file(KEY), cache.file(b"other"))
    assert read(cache, b"other", len(data)) is None


def test_what_others_could_have_put_there_is_refused(
    cache: WeightCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = memory(4096)
    keep(cache, KEY, data)
    file = cache.file(KEY)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    good = file.read_bytes()

    file.chmod(0o666)
    assert read(cache, KEY, 4096) is None
    (tmp_path / "elsewhere").write_bytes(good)
    file.symlink_to(tmp_path / "elsewhere")
    assert read(cache, KEY, 4096) is None
    os.mkfifo(file)
    assert read(cache, KEY, 4096) is None
    assert not file.exists()
    assert (tmp_path / "elsewhere").read_bytes() == good

    keep(cache, KEY, data)
    file.parent.chmod(0o777)
    assert read(cache, KEY, 4096) is None
    file.parent.chmod(0o700)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert read(cache, KEY, 4096) is None
        keep(cache, b"other", data)
    assert not cache.file(b"other").exists()


def test_least_recently_used_goes_first(cache: WeightCache, tmp_path: Path) -> None:
    cache = WeightCache(tmp_path / "cache", 3 * 5000)
    keys = [b"a", b"b", b"c"]
    for i, key in enumerate(keys):
        keep(cache, key, memory(4096, i))
        os.utime(cache.file(key), (i, i))
    assert read(cache, b"a", 4096) is not None  # used now
    keep(cache, b"d", memory(4096))
    assert [key for key in [*keys, b"d"] if cache.file(key).exists()] == [b"a", b"c", b"d"]
    keep(cache, b"too large", memory(16384))
    assert not cache.file(b"too large").exists()
    assert cache.file(b"a").exists(), "nothing goes for what would not fit all the same"


def test_files_in_use_stay(cache: WeightCache, tmp_path: Path) -> None:
    """Files that other ranks have just written are not deleted for an expert cache."""
    cache = WeightCache(tmp_path / "cache", 3 * 5000)
    for key in (b"old", b"rank 0"):
        keep(cache, key, memory(4096))
    os.utime(cache.file(b"old"), (1, 1))
    assert cache._make_room(10_000, used_since=2) >= 10_000
    assert not cache.file(b"old").exists()
    assert cache._make_room(15_000, used_since=2) < 15_000
    assert cache.file(b"rank 0").exists()


def test_the_disk_is_never_filled(
    cache: WeightCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default bound and the user's bound both respect the free space."""
    for bound, free, fits in ((None, 8 * 2**30, 2**31), (2**40, 2**31, 2**30), (2**40, 2**29, 0)):
        cache = WeightCache(tmp_path, bound)
        disk = os.statvfs_result((4096, 4096, 2**20, free // 4096, free // 4096, *[0] * 5))
        monkeypatch.setattr(os, "statvfs", lambda _, disk=disk: disk)
        assert cache._make_room(fits) == fits
        assert cache._make_room(fits + 1) == fits


@pytest.mark.parametrize("failing", ["write", "fsync", "folder"])
def test_a_write_that_fails_leaves_nothing(
    failing: str,
    cache: WeightCache,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if failing == "write":
        chunks = iter(range(2))
        original = weight_cache._sum
        monkeypatch.setattr(
            weight_cache, "_sum", lambda c: full() if next(chunks, None) is None else original(c)
        )
    elif failing == "fsync":
        monkeypatch.setattr(os, "fsync", full)
    else:
        cache.file(KEY).parent.write_text("no folder")
    keep(cache, KEY, memory(3 * 2**21))
    assert "cannot be kept in" in caplog.text
    if failing != "folder":
        assert [file.name for file in cache.file(KEY).parent.iterdir()] == ["lock"]


def test_what_a_dead_process_left_is_removed(cache: WeightCache) -> None:
    """Its lock ends with it; the next write removes its unfinished file."""
    folder = cache.file(KEY).parent
    code = f"""
import os
import numpy as np
from octavo.models.weight_cache import WeightCache
os.fsync = lambda _: os._exit(9)
WeightCache(__import__("pathlib").Path({str(folder)!r}), 2**30).keep(
    {KEY!r}, np.zeros(4096, np.uint8), lambda: True)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    assert len(list(folder.iterdir())) == 2
    assert read(cache, KEY, 4096) is None
    keep(cache, KEY, memory(4096))
    assert {file.name for file in folder.iterdir()} == {"lock", cache.file(KEY).name}


def test_processes_that_evict_each_other(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.models.weight_cache_race", str(tmp_path / "cache")]
    root = Path(__file__).parents[2]
    processes = [subprocess.Popen([*command, seed], cwd=root) for seed in "01"]
    assert [process.wait(200) for process in processes] == [0, 0]
    files = list((tmp_path / "cache").iterdir())
    assert len(files) == 2, "the lock and the last one"


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("case", ["llama", "opt", "bloom"])
def test_the_second_load_packs_nothing(
    case: str, quantization: str | None, tmp_path: Path, cache: WeightCache, packs: list[str]
) -> None:
    architecture, config = CASES[case]
    make_hf(architecture, **config).save_pretrained(tmp_path / "model")
    first = logits(tmp_path / "model", cache, quantization=quantization)
    assert packs
    packs.clear()
    calls: list[tuple[int, int]] = []
    second = logits(
        tmp_path / "model",
        cache,
        quantization=quantization,
        progress=lambda done, total: calls.append((done, total)),
    )
    assert packs == []
    assert torch.equal(first, second)
    assert len(calls) == 1
    assert calls[0][0] == calls[0][1] > 0


def test_a_damaged_file_is_made_again(
    folder: Path, cache: WeightCache, packs: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    first = logits(folder, cache)
    (file,) = cache.file(KEY).parent.glob("*.weights")
    whole = file.read_bytes()
    file.write_bytes(whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:])
    packs.clear()
    assert torch.equal(logits(folder, cache), first)
    assert packs
    assert "is damaged; packing the weights again" in caplog.text
    assert file.read_bytes() == whole


def test_weights_that_changed_are_packed_anew(
    folder: Path, cache: WeightCache, packs: list[str]
) -> None:
    """The weights have the same size and time, in the same place."""
    first = logits(folder, cache)
    file = folder / "model.safetensors"
    info = file.stat()
    with file.open("r+b") as stream:
        stream.seek(info.st_size // 2)
        stream.write(b"\0" * 4096)
    os.utime(file, ns=(info.st_atime_ns, info.st_mtime_ns))
    packs.clear()
    assert not torch.equal(logits(folder, cache), first)
    assert packs


def test_weights_that_change_while_they_are_read_are_not_kept(
    folder: Path, cache: WeightCache
) -> None:
    file = folder / "model.safetensors"
    logits(folder, cache, progress=lambda done, total: os.utime(file))
    assert list(cache.file(KEY).parent.glob("*.weights")) == []


def test_the_key_tells_apart_what_is_packed_otherwise(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, checkpoint = spec_of(folder), open_checkpoint(folder)
    keys = [weights_key(spec, checkpoint, "float32"), weights_key(spec, checkpoint, "bfloat16")]
    for form in ("int8", "int4"):
        quantized = spec_of(folder, quantization=form)
        keys.append(weights_key(quantized, checkpoint, "float32"))
    for name, value in (("isa", "another"), ("panel", 16)):
        with monkeypatch.context() as patch:
            patch.setattr(weight_cache._native, name, lambda value=value: value)
            keys.append(weights_key(spec, checkpoint, "float32"))
    os.link(folder / "model.safetensors", folder / "model-2.safetensors")
    keys.append(weights_key(spec, checkpoint, "float32"))
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert weights_key(spec, open_checkpoint(folder, "dummy"), "float32") is None


def test_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def folder_of(**settings: Any) -> Path | None:
        cache = WeightCache.from_config(EngineConfig.from_kwargs(**settings))
        return None if cache is None else cache.file(KEY).parent

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert folder_of() == tmp_path / "octavo" / "weights"
    assert folder_of(weight_cache=str(tmp_path / "mine")) == tmp_path / "mine"
    assert folder_of(weight_cache="off") is None
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "octavo"
    monkeypatch.setenv("HOME", "nowhere")
    assert folder_of() is None


def test_reading_ahead_reads_the_weights_or_what_was_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("only done on Linux")
    files: list[Path] = []
    monkeypatch.setattr(weight_cache, "_read_file", lambda file, _: files.append(file) or 0)
    config = EngineConfig.from_kwargs(weight_cache=str(tmp_path / "cache"))
    cache = WeightCache.from_config(config)
    assert cache is not None

    def ahead() -> None:
        read_ahead(config, spec_of(folder), open_checkpoint(folder), "float32")
        for thread in threading.enumerate():
            if thread.name == "octavo-read-ahead":
                thread.join()

    ahead()
    logits(folder, cache, dtype="float32")
    ahead()
    assert files == [folder / "model.safetensors", *(tmp_path / "cache").glob("*.weights")]


def test_reading_ahead_ends_at_its_bound(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * (5 * 2**20))
    os.sync()
    assert weight_cache._read_file(file, 2**40) == 5 * 2**20
    assert weight_cache._read_file(file, 3 * 2**20) == 3 * 2**20


@pytest.mark.parametrize("trouble", ["none", "read only", "vanishes"])
def test_an_engine_starts_whatever_is_wrong(
    trouble: str,
    folder: Path,
    tmp_path: Path,
    packs: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second start generates the same tokens, with the cache or without it."""
    where = tmp_path / "cache"
    caplog.set_level(logging.INFO)

    def tokens() -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        settings = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": "8M"}
        with LLM(str(folder), weight_cache=str(where), max_model_len=64, **settings) as llm:
            (output,) = llm.generate([{"prompt_token_ids": [1, 2, 3]}], params)
        for thread in threading.enumerate():
            if thread.name == "octavo-weight-cache":
                thread.join()
        return list(output.outputs[0].token_ids)

    if trouble == "read only":  # for root, too
        monkeypatch.setattr(
            weight_cache.tempfile, "mkstemp", lambda *_, **__: os.open("/proc/self/nothing", 0)
        )
    first = tokens()
    if trouble == "vanishes":
        for file in where.iterdir():
            file.unlink()
        where.rmdir()
    packs.clear()
    assert tokens() == first
    assert (packs == []) == (trouble == "none")
    assert ("cannot be kept" in caplog.text) == (trouble == "read only")
