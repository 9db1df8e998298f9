"""Rules of a mixture of experts, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Gate = Literal["silu", "gelu", "gelu_tanh", "sigmoid", "relu2", "swigluoai", "softplus"]
"""Activation of a gate. swigluoai: x * sigmoid(1.702 * x), and the factor is up + 1 (gpt-oss)."""
Score = Literal["softmax", "sigmoid", "sqrt_softplus", "none"]
"""Function of a router's logits."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Rules by which `Ops.route` chooses experts and computes their weights.

    Attributes:
        top_k: experts of a token.
        score: function of the logits.
        soft_cap: cap of the logits before this function, cap * tanh(logit / cap) (Laguna); 0: none.
        groups: number of equal parts of the experts; a token uses experts of some parts only.
        top_groups: number of the parts that a token uses.
        group_best: a part's score is the sum of this number of its largest scores.
        softmax_chosen: True if the weights are the softmax of the chosen experts' scores.
        tolerance: not 0: a chosen expert's weight is a softmax over its score and those of experts
            that are not chosen yet, and whose relative distance from it is at most this number
            (SparseMixer, arXiv 2409.12136).
        renormalize: True if the weights are divided by their sum.
        epsilon: term that is added to this sum.
        least: lower bound of the sum with this term.
        scale: factor of all weights.
    """

    top_k: int
    score: Score
    soft_cap: float = 0.0
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    softmax_chosen: bool = False
    tolerance: float = 0.0
    renormalize: bool = False
    epsilon: float = 0.0
    least: float = 0.0
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class ExpertActivation:
    """Activation between the two products of an expert.

    Attributes:
        name: the function, as for gates; without a gate it is relu2 or gelu.
        gated: True if the result is act(gate) * up.
        limit: bound of gates from above, and of the magnitude of up; 0: none.
    """

    name: Gate
    gated: bool = True
    limit: float = 0.0
