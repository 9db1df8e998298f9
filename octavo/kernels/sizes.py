"""Sizes of packed data for the memory plan."""

from __future__ import annotations

from octavo.system.block_types import BLOCK_TYPES
from octavo.system.dtypes import DTYPE_NBYTES

PANEL = 64
"""Multiple that the outputs of a packed weight are padded to: the widest panel of all ISAs."""


_MORE = {"q3_k": 4, "q4_k": 4, "q5_k": 4, "q2_k": 16, "iq4_xs": 2}
"""Bytes of a block that packing adds: scales of 4 or 6 bits become bytes."""

MAX_LORA_RANK = 512
"""Largest rank of an adapter of an embedding: kMaxLoraRank in csrc/lora_embedding.h."""
MAX_TAPS = 8
"""Largest number of weights of a channel in `Ops.causal_conv`: kMaxTaps in csrc/state_args.h."""


def packed_nbytes(n: int, k: int, dtype: str) -> int:
    """Return the bytes of a weight of shape [n, k] once packed."""
    multiple = 32 if dtype == "bfloat16" else 2
    return -(-n // PANEL) * PANEL * (-(-k // multiple) * multiple) * DTYPE_NBYTES[dtype]


def quantized_nbytes(n: int, k: int, format: str, group_size: int, *, ordered: bool = False) -> int:
    """Return the bytes of a weight of shape [n, k] once quantized and packed.

    Args:
        n: outputs.
        k: inputs, padded to whole groups, with int8 to a multiple of 64, with fp8 of 32.
        format: `octavo.kernels.base.QuantFormat`.
        group_size: inputs that share a scale; 0: all of them, or a block type.
        ordered: True if the weight has an order of its inputs.
    """
    if ordered:
        return quantized_nbytes(n, k, format, group_size) + order_nbytes(k)
    outputs = -(-n // PANEL) * PANEL
    if format in BLOCK_TYPES:
        block = BLOCK_TYPES[format]
        if format == "nvfp4":  # one factor for all blocks of an output
            return outputs * (4 + k // 32 * (block.nbytes - 4))
        return outputs * k // block.numbers * (block.nbytes + _MORE.get(format, 0))
    if format == "int8":
        return outputs * (-(-k // 64) * 64 + 4)
    if format == "nf4":
        return outputs * -(-k // group_size) * (group_size // 2 + 4)
    if format == "int8_groups":
        return outputs * -(-k // group_size) * (group_size + 5)
    if format == "fp8":
        return outputs * (-(-k // 32) * 32 + 4 * -(-k // (group_size or k)))
    return outputs * -(-k // group_size) * (group_size // 2 + 2 + (format == "int4_zeros"))


def lora_panels(rank: int, n: int, k: int, dtype: str) -> tuple[int, int]:
    """Return the bytes of the packed matrices A [rank, k] and B [n, rank] of an adapter."""
    size = DTYPE_NBYTES[dtype]
    return -(-rank // 16) * 16 * k * size, -(-n // 64) * 64 * rank * size


def lora_nbytes(rank: int, n: int, k: int, dtype: str, *, affine: bool = False) -> int:
    """Return the bytes of an adapter's packed weights for n outputs of a layer of k inputs.

    Args:
        rank: rank of the adapter.
        n: number of outputs.
        k: number of inputs.
        dtype: type of the packed weights.
        affine: True for weights with gains and offsets, which are float32 numbers.
    """
    return sum(lora_panels(rank, n, k, dtype)) + affine * -(-n // 64) * 64 * 2 * 4


def lora_scratch_nbytes(rank: int, slices: int, k: int, threads: int) -> int:
    """Return an upper bound of the bytes that `Ops.add_lora` uses; see csrc/lora.h.

    These are x A^T of 32 rows in each thread, or its sums over chunks of 512 inputs.

    Args:
        rank: largest rank of an adapter.
        slices: number of stacked modules of the layer.
        k: number of its inputs.
        threads: number of threads.
    """
    row = slices * -(-rank // 16) * 16 * 4
    return 32 * row * (threads + -(-k // 512))


def delta_rule_nbytes(key_size: int, value_size: int, *, by_channel: bool) -> int:
    """Return an upper bound of the bytes that `Ops.gated_delta_rule` uses in each thread.

    These are a head's state, in whole tiles of columns, and keys and queries of 32 tokens; with a
    decay for each channel, also the decays, and keys times them. See csrc/delta_rule.h.
    """
    tokens = (4 if by_channel else 2) * 32 * (-(-key_size // 16) * 16)
    return 4 * (tokens + key_size * -(-value_size // 32) * 32)


def head_linear_nbytes(k: int) -> int:
    """Return an upper bound of the bytes that `Ops.head_linear` uses in each thread.

    These are 256 rows of x, and their sums with a panel; see csrc/head_linear.h.
    """
    return 256 * (2 * (-(-k // 32) * 32) + 4 * PANEL)


def order_nbytes(k: int) -> int:
    """Return the bytes of an order of k inputs, in whole cache lines."""
    return -(-k // 16) * 64


def ssd_nbytes(state_size: int, head_size: int) -> int:
    """Return an upper bound of the bytes that `Ops.ssd` uses in each thread.

    These are a head's state, and the inputs and results of 32 tokens; see csrc/state.h.
    """
    width, rows = -(-head_size // 32) * 32, -(-state_size // 16) * 16
    return 4 * (state_size * width + 2 * 32 * (width + rows))


def selective_scan_nbytes(state_size: int) -> int:
    """Return an upper bound of the bytes that `Ops.selective_scan` uses in each thread.

    These are states and rates of 128 channels, and B and C of 32 tokens; see csrc/state.h.
    """
    return 4 * (2 * 128 * state_size + 2 * 32 * -(-state_size // 16) * 16)


def wkv7_nbytes(size: int) -> int:
    """Return an upper bound of the bytes that `Ops.wkv7` uses in each thread.

    These are a head's state, in whole tiles of columns, and seven rows for each of 32 tokens; see
    csrc/wkv7.h.
    """
    width = -(-size // 32) * 32
    return 4 * (7 * 32 * width + size * width)
