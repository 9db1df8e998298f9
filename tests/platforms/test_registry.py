"""Platform of a `device`; plug-ins are in tests/examples."""

import pytest

from octavo.errors import ConfigError
from octavo.platforms.registry import get_platform
from octavo.system import device


@pytest.mark.parametrize(
    ("name", "gpus", "found"),
    [("auto", 0, "cpu"), ("auto", 1, "cuda"), ("cpu", 1, "cpu"), ("cuda", 2, "cuda")],
)
def test_choice(name, gpus, found, monkeypatch):
    monkeypatch.setattr(device, "num_cuda_devices", lambda: gpus)
    assert get_platform(name).name == found


def test_the_token_budget_of_a_server():
    assert get_platform("cpu").server_batched_tokens == 512


def test_no_gpu_is_said_before_anything_is_started(monkeypatch):
    monkeypatch.setattr(device, "num_cuda_devices", lambda: 0)
    with pytest.raises(ConfigError, match="device=cpu"):
        get_platform("cuda")


def test_an_unknown_device():
    with pytest.raises(ConfigError, match="device='tpu' is unknown; choose auto, cpu, cuda"):
        get_platform("tpu")
