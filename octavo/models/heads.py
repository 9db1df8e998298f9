"""Heads that draft from another model's hidden states: what their folders hold. No torch.

Names and shapes are those of vLLM's `MedusaModel`, `EagleLlamaForCausalLM` and
`LlamaForCausalLMEagle3`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from octavo.dtypes import DTYPE_NBYTES
from octavo.models.blocks.linear import LinearSpec
from octavo.models.config_json import ConfigJson
from octavo.models.spec import ModelSpec
from octavo.models.weights import Names, Weight

_MOST_HEADS, _MOST_LAYERS = 64, 16


@dataclass(frozen=True)
class HeadsSpec(ModelSpec):
    """Heads are no model of their own: they take embeddings or hidden states from another."""

    @abstractmethod
    def buffers_nbytes(self, num_tokens: int, num_reqs: int, dtype: str) -> int:
        """Bytes that they work in, beside what is recorded, in the largest step."""


@dataclass(frozen=True)
class MedusaSpec(HeadsSpec):
    """Medusa (Cai et al., 2024, section 2.1): head i guesses the token i + 2 places on."""

    blocks: tuple[tuple[LinearSpec, ...], ...] = field(kw_only=True)
    """Of each head: x + silu(linear(x)), one after the other."""
    lm_heads: tuple[LinearSpec, ...] = field(kw_only=True)

    def weights(self, *, quantized: bool = False) -> list[Weight]:
        """See `ModelSpec`."""
        return list(self._weights())

    def _weights(self) -> Iterator[Weight]:
        for i, (block, lm_head) in enumerate(zip(self.blocks, self.lm_heads, strict=True)):
            for j, linear in enumerate(block):
                yield from linear.weights(Names(f"blocks.{i}.{j}."))
            yield from lm_head.weights(Names(f"lm_heads.{i}."))

    def buffers_nbytes(self, num_tokens: int, num_reqs: int, dtype: str) -> int:
        """Hidden states that are kept, some of them on their way, and logits of one head."""
        states = 4 * self.hidden_size * DTYPE_NBYTES[dtype]
        return num_reqs * (states + self.vocab_size * DTYPE_NBYTES["float32"])


def read_medusa(config: ConfigJson, target: ModelSpec) -> MedusaSpec:
    """Reads the config.json of Medusa heads for `target`."""
    size = _read_sizes(config, target)
    num_heads = config.integer("num_heads", most=_MOST_HEADS)
    num_layers = config.integer("num_hidden_layers", "num_layers", default=1, most=_MOST_LAYERS)
    bias = config.flag("medusa_fc_bias", False)
    config.refuse("truncated_vocab_size", target.vocab_size, "heads must have the whole vocabulary")
    config.refuse("original_lm_head", False, "each head must have an LM head of its own")
    return MedusaSpec(
        **_fields(target)
        | {
            "architecture": "MedusaModel",
            "layers": (),
            "bare_prefix": "medusa_heads.",
            "ignored": (),
            "model_class": "octavo.models.medusa:MedusaModel",
        },
        blocks=tuple(
            tuple(
                LinearSpec(((f"medusa_heads.blocks.{i}.layers.{j}", size),), size, bias)
                for j in range(num_layers)
            )
            for i in range(num_heads)
        ),
        lm_heads=tuple(
            LinearSpec(((f"medusa_heads.lm_heads.{i}", target.vocab_size),), size)
            for i in range(num_heads)
        ),
    )


def _read_sizes(config: ConfigJson, target: ModelSpec) -> int:
    """The hidden size, which must be the target's, as the vocabulary must."""
    size = config.integer("hidden_size")
    if size != target.hidden_size:
        raise config.error(
            "hidden_size", f"the model that is drafted for has {target.hidden_size}; take its heads"
        )
    vocab_size = config.integer("vocab_size")
    if vocab_size != target.vocab_size:
        raise config.error(
            "vocab_size", f"the model that is drafted for has {target.vocab_size}; take its heads"
        )
    return size


def _fields(spec: ModelSpec) -> dict[str, Any]:
    return {f.name: getattr(spec, f.name) for f in fields(ModelSpec)}
