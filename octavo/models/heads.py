"""Specifications of heads that draft from another model's hidden states.

Names and shapes are those of vLLM's `MedusaModel`, `EagleLlamaForCausalLM` and
`LlamaForCausalLMEagle3`. MTP layers have the names of their model's checkpoint.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.blocks.attention import AttentionSpec
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.norm import RMSNormSpec
from octavo.models.families.base import ROTARY_TABLES
from octavo.models.families.llama import LlamaLike
from octavo.models.spec import ModelSpec
from octavo.models.weights import Names, Weight
from octavo.system.distributed import Rank
from octavo.system.dtypes import DTYPE_NBYTES

_MOST_HEADS, _MOST_LAYERS = 64, 16
MOST_LATE = 32
"""Hidden states of each request that an EAGLE head stores while no drafts are requested."""


@dataclass(frozen=True)
class HeadsSpec(ModelSpec):
    """Heads that read embeddings or hidden states of another model."""

    @abstractmethod
    def buffers_nbytes(self, num_tokens: int, num_reqs: int, dtype: str) -> int:
        """Return the bytes of buffers in the largest step, in addition to the recorded ones."""


@dataclass(frozen=True)
class MedusaSpec(HeadsSpec):
    """Medusa heads (Cai et al., 2024, section 2.1): head i guesses i + 2 positions ahead."""

    blocks: tuple[tuple[LinearSpec, ...], ...] = field(kw_only=True)
    """Blocks of each head, in sequence: x + silu(linear(x))."""
    lm_heads: tuple[LinearSpec, ...] = field(kw_only=True)

    def weights(self) -> list[Weight]:
        """Implement `ModelSpec`."""
        return list(self._weights())

    def _weights(self) -> Iterator[Weight]:
        for i, (block, lm_head) in enumerate(zip(self.blocks, self.lm_heads, strict=True)):
            for j, linear in enumerate(block):
                yield from linear.weights(Names(f"blocks.{i}.{j}."))
            yield from lm_head.weights(Names(f"lm_heads.{i}."))

    def buffers_nbytes(self, num_tokens: int, num_reqs: int, dtype: str) -> int:
        """Return the bytes of stored hidden states, their copies, and the logits of one head."""
        states = 4 * self.hidden_size * DTYPE_NBYTES[dtype]
        return num_reqs * (states + self.vocab_size * DTYPE_NBYTES["float32"])


def read_medusa(config: ConfigJson, target: ModelSpec) -> MedusaSpec:
    """Read the config.json of Medusa heads for `target`."""
    size = _read_sizes(config, target)
    num_heads = config.integer("num_heads", most=_MOST_HEADS)
    num_layers = config.integer("num_hidden_layers", "num_layers", default=1, most=_MOST_LAYERS)
    bias = config.flag("medusa_fc_bias", False)
    config.refuse("truncated_vocab_size", target.vocab_size, "heads must have the whole vocabulary")
    config.refuse("original_lm_head", False, "each head must have a separate LM head")
    return MedusaSpec(
        **_fields(target)
        | {
            "architecture": "MedusaModel",
            "layers": (),
            "encoders": (),
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


@dataclass(frozen=True)
class EagleSpec(HeadsSpec):
    """EAGLE head (Li et al., 2024, section 3.2): one layer guesses the next hidden state."""

    fc: LinearSpec = field(kw_only=True)
    """Projection of the next token's embedding and the hidden state; EAGLE-3: of three hidden
    states."""
    kept_layers: tuple[int, ...] = ()
    """EAGLE-3: layers of the target that provide the hidden states."""
    embed_norm: RMSNormSpec | None = None
    """EAGLE-3 and MTP: norm of the embedding before the layer."""
    hidden_norm: RMSNormSpec | None = None
    """EAGLE-3 and MTP: norm of the hidden state before the layer."""
    num_draft_tokens: int = 0
    """EAGLE-3: size of the head's vocabulary."""

    def weights(self) -> list[Weight]:
        """Implement `ModelSpec`."""
        weights = list(self.fc.weights(Names("fc.")))
        for name, norm in (("embed_norm.", self.embed_norm), ("hidden_norm.", self.hidden_norm)):
            if norm is not None:
                weights += norm.weights(Names(name))
        weights += self.layers[0].weights(Names("layers.0.", self.layer_names.format(0)))
        if self.num_draft_tokens:
            weights += self.head.weights(Names())
        return weights

    @property
    def input_size(self) -> int:
        """Size of the layer's input."""
        return 2 * self.hidden_size

    def buffers_nbytes(self, num_tokens: int, num_reqs: int, dtype: str) -> int:
        """Return the bytes of layer inputs, hidden states, and the logits of guesses."""
        states = (self.input_size + (2 * len(self.kept_layers) + 3) * self.hidden_size) * num_tokens
        states += (MOST_LATE + 1) * self.hidden_size * num_reqs
        guesses = num_reqs * (self.vocab_size + self.num_draft_tokens) * DTYPE_NBYTES["float32"]
        return states * DTYPE_NBYTES[dtype] + guesses


def read_eagle(config: ConfigJson, target: ModelSpec) -> EagleSpec:
    """Read the config.json of an EAGLE head for `target`."""
    size = _read_sizes(config, target)
    config.refuse("num_hidden_layers", 1, "EAGLE heads have one layer")
    bias = config.flag("attention_bias", False)
    spec = LlamaLike(input_norm=None, qkv_bias=bias).read(config)
    return EagleSpec(
        **_fields(spec)
        | {
            "ignored": (*ROTARY_TABLES, r"(model\.)?embed_tokens\.weight", r"lm_head\.weight"),
            "model_class": "octavo.models.eagle:EagleModel",
        },
        fc=LinearSpec((("model.fc", size),), 2 * size, config.flag("bias", False)),
    )


def read_eagle3(config: ConfigJson, target: ModelSpec) -> EagleSpec:
    """Read the config.json of an EAGLE-3 head for `target`."""
    size, num_layers = _read_sizes(config, target), len(target.layers)
    config.refuse("num_hidden_layers", 1, "EAGLE heads have one layer")
    config.refuse("target_hidden_size", size, "it must be the hidden size")
    config.refuse("norm_before_residual", False, "the residual must be the hidden state itself")
    if num_layers < 4:
        raise config.error("architectures", "EAGLE-3 is for models of at least 4 layers")
    seen = [2, num_layers // 2, num_layers - 3]
    for section in (config, config.section("eagle_config")):
        section.refuse("eagle_aux_hidden_state_layer_ids", seen, f"for this model it is {seen}")
    spec = LlamaLike(input_norm=None, qkv_bias=config.flag("attention_bias", False)).read(config)
    layer = spec.layers[0]
    attention, mlp = layer.blocks
    assert isinstance(attention, AttentionSpec)
    qkv_proj = replace(attention.qkv_proj, inputs=2 * size)
    num_tokens = config.integer("draft_vocab_size", most=target.vocab_size)
    assert spec.head.lm_head is not None
    lm_head = replace(spec.head.lm_head, modules=(("lm_head", num_tokens),))
    eps = config.number("rms_norm_eps")
    return EagleSpec(
        **_fields(spec)
        | {
            "layers": (layer.with_blocks([replace(attention, qkv_proj=qkv_proj), mlp]),),
            "layer_names": "midlayer.",
            "head": replace(spec.head, lm_head=lm_head),
            "ignored": (*ROTARY_TABLES, r"(model\.)?embed_tokens\.weight", "d2t", "t2d"),
            "model_class": "octavo.models.eagle:Eagle3Model",
        },
        fc=LinearSpec((("model.fc", size),), 3 * size),
        # The numbers are those of the layers that read the states; layer i - 1 outputs them.
        kept_layers=tuple(i - 1 for i in seen),
        embed_norm=RMSNormSpec("midlayer.input_layernorm", size, eps),
        hidden_norm=RMSNormSpec("midlayer.hidden_norm", size, eps),
        num_draft_tokens=num_tokens,
    )


@dataclass(frozen=True)
class MTPSpec(EagleSpec):
    """MTP layer of a model: an EAGLE head that the model's own checkpoint contains.

    It has norms before its projection and after its layer (DeepSeek-V3, section 2.2). The LM head
    and further drafts use its normed output.
    """

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        *,
        architecture: str,
        prefix: str,
        layer: str,
        fc: str,
        embed_norm: str,
        hidden_norm: str,
        norm: str,
    ) -> MTPSpec:
        """Return the MTP layer of a model.

        Args:
            spec: the model, whose first layer stands for the MTP layer. The norms of the MTP layer
                are like the model's final norm.
            architecture: name of the MTP layer, for messages.
            prefix: prefix of the names of all tensors of the MTP layer.
            layer: prefix of the names of the layer's tensors, after `prefix`.
            fc: module of the projection, after `prefix`.
            embed_norm: module of the norm of embeddings, after `prefix`.
            hidden_norm: module of the norm of hidden states, after `prefix`.
            norm: module of the norm after the layer, after `prefix`.
        """
        size, like = spec.hidden_size, spec.head.norm
        assert isinstance(like, RMSNormSpec)
        return cls(
            **_fields(spec)
            | {
                "architecture": architecture,
                "layers": spec.layers[:1],
                "layer_names": prefix + layer,
                "head": replace(spec.head, norm=replace(like, module=prefix + norm)),
                "ignored": (rf"(?!{re.escape(prefix)}).*",),
                "model_class": "octavo.models.eagle:MTPModel",
            },
            fc=LinearSpec(((prefix + fc, size),), 2 * size),
            embed_norm=replace(like, module=prefix + embed_norm),
            hidden_norm=replace(like, module=prefix + hidden_norm),
        )

    def weights(self) -> list[Weight]:
        """Implement `ModelSpec`."""
        assert self.head.norm is not None
        return [*super().weights(), *self.head.norm.weights(Names("norm."))]


@dataclass(frozen=True)
class LMHeadSpec(ModelSpec):
    """LM head of a model, without the final norm."""

    def weights(self) -> list[Weight]:
        """Implement `ModelSpec`."""
        return list(self.head.weights(Names()))


def read_lm_head(target: ModelSpec, draft: ModelSpec, rank: Rank) -> LMHeadSpec | None:
    """Return the target's LM head if `draft` must load it, else None.

    EAGLE (not EAGLE-3) and MTP layers guess with the target's LM head. If several ranks share the
    target, each rank has only a part of the LM head. Ranks that do not draft cannot compute their
    parts for the rank that drafts.
    """
    if rank.size == 1 or not isinstance(draft, EagleSpec) or draft.num_draft_tokens:
        return None
    return LMHeadSpec(
        **_fields(target)
        | {
            "layers": (),
            "encoders": (),
            "head": replace(target.head, norm=None),
            "ignored": (".*",),
            "model_class": "octavo.models.eagle:LMHead",
        }
    )


def _read_sizes(config: ConfigJson, target: ModelSpec) -> int:
    """Return the hidden size; check that hidden size and vocabulary are the target's."""
    size = config.integer("hidden_size")
    if size != target.hidden_size:
        raise config.error(
            "hidden_size", f"the model that is drafted for has {target.hidden_size}; use its heads"
        )
    vocab_size = config.integer("vocab_size")
    if vocab_size != target.vocab_size:
        raise config.error(
            "vocab_size", f"the model that is drafted for has {target.vocab_size}; use its heads"
        )
    return size


def _fields(spec: ModelSpec) -> dict[str, Any]:
    return {f.name: getattr(spec, f.name) for f in fields(ModelSpec)}
