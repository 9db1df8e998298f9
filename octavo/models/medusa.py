"""Medusa heads, ready to run."""

from __future__ import annotations

from octavo.models.blocks.base import Parts
from octavo.models.heads import MedusaSpec
from octavo.system.tensor import Tensor, full


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
        self._ops = parts.ops
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
            hidden = self._ops.add(hidden, self._silu(linear(hidden)))
        return self._lm_heads[head](hidden, "float32")

    def _silu(self, x: Tensor) -> Tensor:
        """Return silu(x) of x [R, hidden_size]: silu(x) * 1."""
        rows, size = x.shape
        gate_up = self._ops.empty(rows, 2 * size, like=x)
        self._ops.copy_(gate_up[:, :size], x)
        self._ops.copy_(gate_up[:, size:], self._ops.to_device(full(x.shape, 1.0, "float32")))
        return self._ops.act_and_mul(gate_up, "silu")
