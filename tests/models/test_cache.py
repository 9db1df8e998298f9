import pytest

from octavo.attention.base import NoLatents
from octavo.errors import ConfigError
from octavo.kernels.memory import placeholder
from octavo.models.cache import AttentionCache, LatentCache


@pytest.mark.parametrize(
    ("dtype", "head_nbytes"),
    [
        ("float32", 4 * 64),
        ("bfloat16", 2 * 64),
        ("float16", 2 * 64),
        ("fp8_e4m3", 64),
        ("fp8_e5m2", 64),
        ("int8", 64 + 4),  # and its scale
    ],
)
def test_a_block_of_attention(dtype, head_nbytes):
    assert AttentionCache(3, 64).block_nbytes(16, dtype) == 2 * 16 * 3 * head_nbytes
    assert AttentionCache(3, 64, 100).block_nbytes(16, dtype) == 2 * 16 * 3 * head_nbytes
    assert LatentCache(64).block_nbytes(16, dtype) == 16 * head_nbytes  # keys and values in one
    assert LatentCache(31).block_nbytes(8, "fp8_e4m3") == 8 * 31 + 8  # halves of 8 bytes


def test_equal_specs_are_one_key():
    assert len({AttentionCache(2, 8), AttentionCache(2, 8, None), AttentionCache(2, 8, 4)}) == 2


def test_backends_without_latents_refuse_them():
    class Other(NoLatents):
        name = "other"

    memory = placeholder(1, LatentCache(8).block_nbytes(16, "float32"), dtype="uint8")
    with pytest.raises(ConfigError, match=r"attention_backend=other.*use attention_backend=auto"):
        LatentCache(8).view(memory, 16, "float32", Other())
