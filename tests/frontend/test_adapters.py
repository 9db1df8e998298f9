"""Adapters that a front end checks: each is read once, and none waits for another."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from octavo import LoRARequest
from octavo.checkpoints.registry import open_checkpoint
from octavo.config import BUILTIN_ADAPTERS, EngineConfig
from octavo.errors import AdapterError, UnsupportedError
from octavo.frontend import adapters
from octavo.frontend.adapters import AdapterFiles, no_pins
from octavo.messages import AdapterRef
from octavo.models.hub import resolve_adapter, resolve_folders
from octavo.models.registry import read_spec
from tests.adapters import builtin_model, make_factors, write_adapter

LETTERS, CALLS = (LoRARequest(name, i, name) for i, name in enumerate(BUILTIN_ADAPTERS, 1))


@pytest.fixture
def files() -> AdapterFiles:
    config = EngineConfig.from_kwargs(enable_lora=True)
    spec = read_spec(open_checkpoint(resolve_folders(config)[0]), config.model)
    return AdapterFiles(config, spec)


def content(found: AdapterRef | None) -> str:
    assert found is not None
    return found.content_hash


class Slow:
    """Reader that waits for `go` when it reads the letters, and counts what it reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.begun, self.names = threading.Event(), threading.Event(), list[str]()
        self._open = adapters.open_adapter
        monkeypatch.setattr(adapters, "open_adapter", self)

    def __call__(self, path: Path, *args: Any, **kwargs: Any) -> Any:
        self.names.append(path.name)
        if path.name == "stories-letters":
            self.begun.set()
            assert self.go.wait(60)
        return self._open(path, *args, **kwargs)


def test_an_adapter_that_is_slow_to_read(
    files: AdapterFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others pass meanwhile. All that name it wait for one read, even if the first gives up."""
    slow = Slow(monkeypatch)

    async def scenario() -> None:
        first, *others = (asyncio.create_task(files.resolve_async(LETTERS)) for _ in range(20))
        await asyncio.to_thread(slow.begun.wait, 60)
        calls = await files.resolve_async(CALLS)
        assert calls is not None
        assert Path(calls.path).name == "stories-llama-calls"
        assert files.resolve(CALLS) == calls
        first.cancel()
        slow.go.set()
        found = await asyncio.gather(*others)
        assert {it.path for it in found if it is not None} == {
            str(resolve_adapter(LETTERS.lora_path))
        }

    asyncio.run(scenario())
    assert sorted(slow.names) == ["stories-letters", "stories-llama-calls"]


def test_an_adapter_that_could_not_be_read_is_tried_again(
    files: AdapterFiles, tmp_path: Path
) -> None:
    request = LoRARequest("a", 1, str(tmp_path / "a"))
    with pytest.raises(AdapterError, match="There is no adapter"):
        files.resolve(request)
    factors = make_factors(builtin_model())
    write_adapter(tmp_path / "a", factors)
    first = files.resolve(request)
    assert first is not None
    write_adapter(tmp_path / "a", factors, lora_alpha=9)
    assert files.resolve(request) == first
    again = LoRARequest("a", 1, str(tmp_path / "a"), load_inplace=True)
    second = files.resolve(again)
    assert second is not None
    assert second.content_hash != first.content_hash
    assert content(files.resolve(request)) == second.content_hash
    (tmp_path / "a" / "adapter_config.json").unlink()
    with pytest.raises(AdapterError, match=r"has no adapter_config.json"):
        files.resolve(again)
    assert content(files.resolve(request)) == second.content_hash


def test_adapters_that_are_added_and_removed(files: AdapterFiles) -> None:
    assert files.add(LETTERS)
    assert not files.add(LETTERS)
    assert files.add(replace(LETTERS, load_inplace=True))
    assert files.add(CALLS)
    with pytest.raises(AdapterError):
        files.add(LoRARequest("none", 3, "./none"))
    assert files.numbers == {1, 2}
    assert files.remove(1)
    assert not files.remove(1)
    assert files.numbers == {2}
    with pytest.raises(UnsupportedError, match="raise max_cpu_loras"):
        raise no_pins(2)


def test_hub_ids(files: AdapterFiles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a root they are looked for on the hub, once; within a root they are folders."""
    downloads = []

    def download(name: str, **kwargs: Any) -> Path:
        downloads.append(name)
        return write_adapter(tmp_path / "downloaded", make_factors(builtin_model()))

    monkeypatch.setattr(adapters, "resolve_adapter", download)
    request = LoRARequest("a", 1, "org/poems")
    for _ in range(2):
        found = files.resolve(request)
        assert found is not None
        assert found.path == str(tmp_path / "downloaded")
    assert downloads == ["org/poems"]
    with pytest.raises(AdapterError, match="There is no adapter"):
        files.resolve(request, tmp_path)


def test_a_slow_hub_delays_no_adapter_on_the_disk(
    files: AdapterFiles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """More downloads than threads, and a caller who gives up."""
    go, begun = threading.Event(), list[str]()

    def download(name: str, **kwargs: Any) -> Path:
        begun.append(name)
        assert go.wait(100)
        raise AdapterError(f"{name} cannot be downloaded.")

    monkeypatch.setattr(adapters, "resolve_adapter", download)

    async def scenario() -> None:
        waiting = [
            asyncio.create_task(files.resolve_async(LoRARequest("a", 1, f"org/a{i}")))
            for i in range(100)
        ]
        while len(begun) < adapters._THREADS:
            await asyncio.sleep(0.001)
        found = await files.resolve_async(LETTERS)
        assert found is not None
        assert found.request is LETTERS
        waiting[0].cancel()
        go.set()
        errors = await asyncio.gather(*waiting, return_exceptions=True)
        assert {type(it) for it in errors[1:]} == {AdapterError}
        assert isinstance(errors[0], asyncio.CancelledError)

    asyncio.run(scenario())
    assert files.numbers == {1}
