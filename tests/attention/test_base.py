import pytest
import torch

from tests.attention.backends import make_backend
from tests.torch_ops import native_ops, reference_ops
from tests.triton import needs_triton


@pytest.mark.parametrize("name", ["cpu", "reference", pytest.param("triton", marks=needs_triton)])
def test_copy_blocks(name: str) -> None:
    backend = make_backend(name, 64)
    ops = native_ops() if name == "cpu" else reference_ops()
    memories = [torch.randint(256, (6, nbytes), dtype=torch.uint8) for nbytes in (512, 1024)]
    caches = [
        backend.typed(memory, "bfloat16").view(backend.kv_cache_shape(6, 16, 2, size))
        for memory, size in zip(memories, (4, 8), strict=True)
    ]
    before = [cache.view(torch.int16).clone() for cache in caches]
    ops.copy_blocks(memories, [])
    ops.copy_blocks(memories, [(1, 2), (2, 3), (5, 0)])  # 3 has the old content of 2
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache.view(torch.int16), old[[5, 1, 1, 2, 4, 5]])
