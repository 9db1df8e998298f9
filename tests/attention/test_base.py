import pytest
import torch

from octavo.attention.base import copy_blocks
from tests.attention.backends import make_backend
from tests.triton import needs_triton


@pytest.mark.parametrize("name", ["cpu", "reference", pytest.param("triton", marks=needs_triton)])
def test_copy_blocks(name: str) -> None:
    backend = make_backend(name, 64)
    caches = [torch.randn(backend.kv_cache_shape(6, 16, 2, 8)) for _ in range(2)]
    shape = backend.kv_cache_shape(6, 16, 2, 8, torch.float8_e5m2)
    caches.append(torch.randn(shape).to(torch.float8_e5m2))
    before = [cache.clone() for cache in caches]
    copy_blocks(caches, [])
    assert all(torch.equal(a, b) for a, b in zip(caches, before, strict=True))
    copy_blocks(caches, [(1, 2), (2, 3), (5, 0)])  # 3 has the old content of 2
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache.float(), old.float()[[5, 1, 1, 2, 4, 5]])
