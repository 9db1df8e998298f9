"""What the front end decides by itself; the rest is in tests/e2e."""

import pytest

from octavo import device
from octavo.engine.async_llm import server_batched_tokens
from octavo.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "gpus", "expected"), [("auto", 0, 512), ("auto", 1, 2048), ("cpu", 1, 512)]
)
def test_the_token_budget_of_a_server(name, gpus, expected, monkeypatch):
    monkeypatch.setattr(device, "num_cuda_devices", lambda: gpus)
    assert server_batched_tokens(name) == expected


def test_no_gpu_is_said_before_a_process_is_started(monkeypatch):
    monkeypatch.setattr(device, "num_cuda_devices", lambda: 0)
    with pytest.raises(ConfigError, match="device=cpu"):
        server_batched_tokens("cuda")
