import pytest

from octavo.models.cache import AttentionCache


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


def test_equal_specs_are_one_key():
    assert len({AttentionCache(2, 8), AttentionCache(2, 8, None), AttentionCache(2, 8, 4)}) == 2
