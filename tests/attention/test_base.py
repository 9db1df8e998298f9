import pytest
import torch

from octavo.attention.base import get_attention_backend
from octavo.errors import ConfigError
from tests.triton import needs_triton

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "device", "chosen"),
    [
        ("auto", "cpu", "cpu"),
        ("cpu", "cpu", "cpu"),
        ("reference", "cpu", "reference"),
        ("reference", "meta", "reference"),
        pytest.param("triton", "cpu", "triton", marks=needs_triton),
    ],
)
def test_choice(name: str, device: str, chosen: str) -> None:
    assert get_attention_backend(name, torch.device(device), 64).name == chosen


def test_unknown_backend() -> None:
    with pytest.raises(ConfigError, match="'flash' is unknown; choose auto, cpu, triton"):
        get_attention_backend("flash", CPU, 64)


def test_cpu_kernel_elsewhere() -> None:
    with pytest.raises(ConfigError, match="does not work on meta"):
        get_attention_backend("cpu", torch.device("meta"), 64)


@pytest.mark.parametrize("name", ["cpu", "reference", pytest.param("triton", marks=needs_triton)])
def test_copy_blocks(name: str) -> None:
    backend = get_attention_backend(name, CPU, 64)
    caches = [torch.randn(backend.kv_cache_shape(6, 16, 2, 8)) for _ in range(2)]
    shape = backend.kv_cache_shape(6, 16, 2, 8, torch.float8_e5m2)
    caches.append(torch.randn(shape).to(torch.float8_e5m2))
    before = [cache.clone() for cache in caches]
    backend.copy_blocks(caches, [])
    assert all(torch.equal(a, b) for a, b in zip(caches, before, strict=True))
    backend.copy_blocks(caches, [(1, 2), (2, 3), (5, 0)])  # 3 gets what 2 was
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache.float(), old.float()[[5, 1, 1, 2, 4, 5]])
