"""Attention backends by name, on a CPU."""

import torch

from octavo.attention.base import AttentionBackend
from octavo.attention.reference import ReferenceAttention
from tests.torch_ops import cpu_attention


def make_backend(name: str, max_model_len: int = 1024) -> AttentionBackend:
    """Return cpu, reference or triton (interpreted)."""
    if name == "triton":
        from octavo.attention.triton import TritonAttention

        return TritonAttention(torch.device("cpu"), max_model_len)
    return {"cpu": cpu_attention, "reference": ReferenceAttention}[name]()
