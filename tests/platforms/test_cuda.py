"""Parts of an engine on a GPU, with stand-ins for torch's answers."""

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.checkpoints.registry import open_checkpoint
from octavo.config import BUILTIN_MODEL, EngineConfig
from octavo.errors import ConfigError
from octavo.models.blocks.attention import Alibi, AttentionSpec, Sinks
from octavo.models.hub import resolve_model
from octavo.models.registry import read_spec
from octavo.plan.setup import WorkerSetup
from octavo.platforms.cuda import CUDAPlatform
from octavo.system import device

MIB = 2**20
PATH = resolve_model(BUILTIN_MODEL)
SPEC = read_spec(open_checkpoint(PATH))
CUDA = torch.device("cuda", 0)


class Gpu:
    """Stand-in for torch.cuda with one card, of 1000 MiB."""

    def __init__(
        self, capability: tuple[int, int], available: bool = True, free: int = 900 * MIB
    ) -> None:
        self.capability, self.available, self.free = capability, available, free

    def is_available(self) -> bool:
        return self.available

    def current_device(self) -> int:
        return 0

    def get_device_capability(self, device: object) -> tuple[int, int]:
        return self.capability

    def get_device_name(self, device: object) -> str:
        return "Card"

    def mem_get_info(self, device: object) -> tuple[int, int]:
        return self.free, 1000 * MIB


def setup(dtype: str = "float16", **settings: Any) -> WorkerSetup:
    config = EngineConfig.from_kwargs(**settings)
    return WorkerSetup(config, SPEC, Path(PATH), dtype, 64, 32)


def open_device(monkeypatch: pytest.MonkeyPatch, gpu: Gpu, asked: WorkerSetup) -> torch.device:
    intervals: list[float] = []
    monkeypatch.setattr(device, "num_cuda_devices", lambda: 1)
    monkeypatch.setattr(torch, "cuda", gpu)
    monkeypatch.setattr(sys, "setswitchinterval", intervals.append)
    opened = CUDAPlatform().open_device(asked)
    assert intervals == [device.SWITCH_INTERVAL]
    return opened


@pytest.mark.parametrize(
    ("gpu", "dtype", "message"),
    [
        (Gpu((9, 0), available=False), "bfloat16", "torch .* cannot use the GPU"),
        (Gpu((6, 1)), "float16", "Card has compute capability 6.1.*device=cpu"),
        (Gpu((7, 5)), "bfloat16", "Card has compute capability 7.5.*dtype=float16"),
        (Gpu((9, 0), free=MIB), "float16", "Card has 1 MiB free of 1,000 MiB"),
        (Gpu((7, 5)), "float16", None),
        (Gpu((9, 0)), "bfloat16", None),
    ],
)
def test_the_card(
    gpu: Gpu, dtype: str, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if message is None:
        assert open_device(monkeypatch, gpu, setup(dtype)) == CUDA
    else:
        with pytest.raises(ConfigError, match=message):
            open_device(monkeypatch, gpu, setup(dtype))


def test_settings_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="Card has 900 MiB free of 1,000 MiB"):
        open_device(monkeypatch, Gpu((9, 0)), setup(gpu_memory_utilization=1e-4))


@pytest.mark.parametrize("name", ["num_threads", "numa_node"])
def test_settings_for_processors_only(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=1 is for device=cpu"):
        CUDAPlatform().check_settings(setup(**{name: 1}).config.device)


@pytest.mark.parametrize(
    ("dtype", "changes", "message"),
    [
        ("bfloat16", {}, "pip install flashinfer-python"),
        ("bfloat16", {"positions": Alibi((0.5, 0.25))}, "attention_backend=triton"),
        ("bfloat16", {"sinks": Sinks("sinks", 2)}, "attention sinks.*attention_backend=triton"),
        ("bfloat16", {"causal": False}, "encoders.*attention_backend=triton"),
        ("float32", {}, "attention_backend=triton"),
    ],
)
def test_what_flashinfer_cannot_do(
    dtype: str, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    asked = setup(dtype, attention_backend="flashinfer")
    if changes:
        layer = SPEC.layers[0]
        attention, mlp = layer.blocks
        assert isinstance(attention, AttentionSpec)
        attention = replace(attention, **changes)
        asked = replace(asked, spec=replace(SPEC, layers=(layer.with_blocks([attention, mlp]),)))
    with pytest.raises(ConfigError, match=message):
        CUDAPlatform().make_attention_backend(asked, CUDA)


def test_other_backends() -> None:
    reference = setup(attention_backend="reference")
    assert CUDAPlatform().make_attention_backend(reference, CUDA).name == "reference"
    with pytest.raises(ConfigError, match="attention_backend=cpu does not work on device=cuda"):
        CUDAPlatform().make_attention_backend(setup(attention_backend="cpu"), CUDA)


@pytest.mark.parametrize("package", ["torch", "triton"])
def test_a_missing_package_names_the_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name != package or None)
    message = rf"device=cuda needs the package {package}.*pip install 'octavo\[cuda\]'"
    with pytest.raises(ConfigError, match=message):
        CUDAPlatform().make_ops(setup().config.device, CUDA)


def test_work_beside_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the launched steps on the device, and the host waits for it at the end."""
    calls: list[str] = []

    class Stream:
        def __init__(self, where: torch.device) -> None:
            assert where == CUDA

        def wait_stream(self, other: str) -> None:
            calls.append(f"wait for {other}")

        def synchronize(self) -> None:
            calls.append("synchronize")

    @contextlib.contextmanager
    def current(stream: Stream) -> Iterator[None]:
        calls.append("begin")
        yield
        calls.append("end")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda where: "the steps")
    monkeypatch.setattr(torch.cuda, "stream", current)
    with CUDAPlatform().beside_steps(CUDA):
        assert torch.is_inference_mode_enabled()
        calls.append("work")
    assert calls == ["wait for the steps", "begin", "work", "end", "synchronize"]
