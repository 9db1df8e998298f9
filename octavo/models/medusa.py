"""Medusa heads, ready to run."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.models.blocks.base import Parts
from octavo.models.heads import MedusaSpec


class MedusaModel:
    """Model that guesses several tokens from one hidden state, each by a dedicated head.

    Args:
        spec: the heads.
        parts: the loaded weights and operations.
    """

    def __init__(self, spec: MedusaSpec, parts: Parts) -> None:
        self._blocks = [
            [linear.build(parts.of(f"blocks.{i}.{j}")) for j, linear in enumerate(block)]
            for i, block in enumerate(spec.blocks)
        ]
        self._lm_heads = [
            lm_head.build(parts.of(f"lm_heads.{i}")) for i, lm_head in enumerate(spec.lm_heads)
        ]

    def guess(self, head: int, hidden: Tensor) -> Tensor:
        """Return the logits of the token `head` + 2 positions later.

        Args:
            head: index of the head.
            hidden: [R, hidden_size], the input of the target's LM head.

        Returns:
            float32 [R, vocab_size].
        """
        for linear in self._blocks[head]:
            hidden = hidden + F.silu(linear(hidden))
        return self._lm_heads[head](hidden, torch.float32)
