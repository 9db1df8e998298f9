"""Llama, and the families that differ from it by switches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from octavo.checkpoints.config_json import ConfigJson
from octavo.kernels.routing import Gate
from octavo.layers.rope_spec import RopeSpec
from octavo.models.blocks.attention import AttentionSpec, QueryScale, Sinks
from octavo.models.blocks.base import BlockSpec
from octavo.models.blocks.embedding import EmbedSpec
from octavo.models.blocks.head import HeadSpec
from octavo.models.blocks.layer import LayerSpec
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.mlp import Activation, MLPSpec
from octavo.models.blocks.norm import HeadNormsSpec, LayerNormSpec, NormSpec, RMSNormSpec
from octavo.models.families.base import (
    DEFAULT_MAX_MODEL_LEN,
    GATED,
    PLAIN,
    ROTARY_TABLES,
    Heads,
    model_spec,
    read_activation,
    read_lm_head,
    read_num_layers,
    read_windows,
    visible,
)
from octavo.models.positions import read_rope, scaled_max_model_len
from octavo.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class LlamaLike:
    """Differences of a family from Llama. The defaults are Llama's."""

    qkv_modules: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qkv_layout: Literal["rows", "by_group"] = "rows"
    """Layout of the projection, as in `LinearSpec`."""
    o_module: str = "self_attn.o_proj"
    gate_up_modules: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down_module: str = "mlp.down_proj"
    gated: bool = True
    """False: the MLP has no gate, and `gate_up_modules` has only the projection up."""
    input_norm: str | None = "input_layernorm"
    mixer_out_norm: str | None = None
    feed_forward_norm: str | None = "post_attention_layernorm"
    feed_forward_out_norm: str | None = None
    """Modules of a layer's norms, as in `LayerSpec`; None if the layer does not have the norm."""
    final_norm: str = "model.norm"
    embed_module: str = "model.embed_tokens"
    head_module: str = "lm_head"
    layer_names: str = "model.layers.{}."
    bare_prefix: str = "model."
    """Names, as in `ModelSpec`."""
    arrangement: Literal["sequential", "parallel"] = "sequential"
    residual_multiplier: float | None = None

    norm: Literal["rms", "layer"] = "rms"
    norm_weight: bool = True
    """True if layer norms have a weight."""
    norm_bias: bool = False
    """True if layer norms have a bias."""
    norm_offset: float = 0.0
    eps: float | None = None
    """Term of the norms; None: the field rms_norm_eps, or layer_norm_eps."""
    out_norm_eps: float | None = None
    """Term of the norms of blocks' results; None: that of the other norms."""
    final_norm_offset: float | None = None
    """Offset of the last norm's weight; None: `norm_offset`."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    activation: Activation | None = None
    """Activation; None: that of the field hidden_act."""
    alphas: tuple[str, str] | None = None
    """Value of `MLPSpec.alphas`."""
    feed_forwards: tuple[BlockSpec | None, ...] | None = None
    """Feed-forward block of each layer; None for a layer with the MLP that the fields above
    describe. None in place of the tuple: all layers have this MLP."""

    windows: tuple[int | None, ...] | None = None
    """Window of each layer; None: no layer has one."""
    ropes: tuple[RopeSpec | None, ...] | None = None
    """Rotary positions of each layer; None: `read_llama_rope` for all."""
    max_model_len: int | None = None
    """Context length; None: from the positions and max_position_embeddings."""
    scale: float | None = None
    """Factor on the attention scores; None: by the size of a head."""
    soft_cap: float | None = None
    qk_norm: Literal["none", "head", "all", "own", "unit"] = "none"
    """RMS norm of queries and keys, over each head or over all heads together; own: a layer norm
    over each head with separate weights; unit: over each head, without weights."""
    clip: float | None = None
    """Limit of queries, keys and values."""
    query_scale: QueryScale | None = None
    sinks: str | None = None
    """Tensor of the attention sinks."""
    out_norm: str | None = None
    inner_norm: str | None = None
    """Modules of norms within the blocks: `AttentionSpec.out_norm` and `MLPSpec.inner_norm`."""
    attention_gate: str | None = None
    """Module of a gate of the heads' results."""
    gate_activation: Gate = "sigmoid"
    gates_of_heads: bool = False
    value_size: int | None = None
    value_scale: float = 1.0
    """Fields of `AttentionSpec`."""
    queries_with_gates: bool = False
    """True if the first of `qkv_modules` computes the gate of a head directly after its query."""

    qk_norm_modules: tuple[str, str] = ("q_norm", "k_norm")
    norms_rotated: bool = False
    """Value of `AttentionSpec.norms_rotated`."""

    embed_scale: float | None = None
    embed_scale_given: bool = False
    """Value of `EmbedSpec.scale_given`."""
    embed_norm: bool = False
    """True if embeddings are normed, without a weight."""
    generates: bool = True
    """False for an encoder: it has no LM head, and a token sees all of its text."""
    tied: bool = False
    """Default for a config without tie_word_embeddings: True if the LM head is the embedding."""
    logit_scale: float | None = None
    logit_soft_cap: float | None = None
    ignored: tuple[str, ...] = ()
    """Patterns of names that are not weights, in addition to those of rotary tables."""

    def read(self, config: ConfigJson, mixer: BlockSpec | None = None) -> ModelSpec:
        """Read the remaining fields, and return the model.

        Args:
            config: config.json.
            mixer: the block in place of attention; None: attention.
        """
        heads = replace(Heads.read(config), value_size=self.value_size)
        hidden, inner = heads.hidden_size, config.integer("intermediate_size")
        num_layers = read_num_layers(config)
        ropes: Sequence[RopeSpec | None] = self.ropes or (read_llama_rope(config),) * num_layers
        max_model_len = self.max_model_len or _max_model_len(config, ropes)
        eps = self.eps
        if eps is None:
            eps = config.number("rms_norm_eps" if self.norm == "rms" else "layer_norm_eps")
        rows = (2 if self.gated else 1) * inner // len(self.gate_up_modules)
        mlp = MLPSpec(
            LinearSpec(tuple((m, rows) for m in self.gate_up_modules), hidden, self.mlp_bias),
            LinearSpec(((self.down_module, hidden),), inner, self.mlp_bias),
            self.activation
            or read_activation(config, "hidden_act", GATED if self.gated else PLAIN),
            gated=self.gated,
            alphas=self.alphas,
            inner_norm=None
            if self.inner_norm is None
            else RMSNormSpec(self.inner_norm, inner, eps),
        )

        def norm(module: str | None, eps: float = eps) -> NormSpec | None:
            if module is None:
                return None
            if self.norm == "layer":
                weight = module if self.norm_weight else None
                return LayerNormSpec(weight, hidden, eps, self.norm_bias, self.norm_offset)
            return RMSNormSpec(module, hidden, eps, self.norm_offset)

        out_eps = eps if self.out_norm_eps is None else self.out_norm_eps
        final_norm = norm(self.final_norm)
        if self.final_norm_offset is not None:
            final_norm = RMSNormSpec(self.final_norm, hidden, eps, self.final_norm_offset)
        qkv_proj = heads.qkv_proj(*self.qkv_modules, bias=self.qkv_bias, layout=self.qkv_layout)
        if self.attention_gate is not None:
            gates = heads.num_heads * (1 if self.gates_of_heads else heads.size_of_values)
            modules = *qkv_proj.modules, (self.attention_gate, gates)
            qkv_proj = replace(qkv_proj, modules=modules)
        if self.queries_with_gates:
            (module, size), *others = qkv_proj.modules
            qkv_proj = replace(qkv_proj, modules=((module, 2 * size), *others))

        def qk_norm(module: str, num_heads: int) -> RMSNormSpec | HeadNormsSpec | None:
            if self.qk_norm == "none":
                return None
            if self.qk_norm == "own":
                return HeadNormsSpec(f"self_attn.{module}", num_heads, heads.head_size, eps)
            if self.qk_norm == "unit":
                return RMSNormSpec(None, heads.head_size, eps)
            size = heads.head_size * (1 if self.qk_norm == "head" else num_heads)
            return RMSNormSpec(f"self_attn.{module}", size, eps, self.norm_offset)

        def layer(
            rope: RopeSpec | None, window: int | None, feed_forward: BlockSpec | None
        ) -> LayerSpec:
            attention = AttentionSpec(
                qkv_proj,
                heads.o_proj(self.o_module, bias=self.o_bias),
                heads.num_heads,
                heads.num_kv_heads,
                heads.head_size,
                heads.scale if self.scale is None else self.scale,
                rope,
                sliding_window=visible(window, max_model_len),
                soft_cap=self.soft_cap,
                q_norm=qk_norm(self.qk_norm_modules[0], heads.num_heads),
                k_norm=qk_norm(self.qk_norm_modules[1], heads.num_kv_heads),
                norms_rotated=self.norms_rotated,
                clip=self.clip,
                gated=self.attention_gate is not None or self.queries_with_gates,
                gate_activation=self.gate_activation,
                gates_of_heads=self.gates_of_heads,
                value_size=self.value_size,
                value_scale=self.value_scale,
                causal=self.generates,
                gates_follow_queries=self.queries_with_gates,
                query_scale=self.query_scale,
                sinks=None if self.sinks is None else Sinks(self.sinks, heads.num_heads),
                out_norm=None
                if self.out_norm is None
                else RMSNormSpec(self.out_norm, heads.num_heads * heads.head_size, eps),
            )
            return LayerSpec.of(
                mixer or attention,
                feed_forward or mlp,
                norm(self.input_norm),
                norm(self.feed_forward_norm),
                norm(self.mixer_out_norm, out_eps),
                norm(self.feed_forward_out_norm, out_eps),
                self.arrangement,
                self.residual_multiplier,
            )

        embed = EmbedSpec(
            self.embed_module,
            config.integer("vocab_size"),
            hidden,
            hidden,
            scale=self.embed_scale,
            scale_given=self.embed_scale_given,
            norm=RMSNormSpec(None, hidden, eps) if self.embed_norm else None,
            norm_given=not self.embed_norm,
        )
        lm_head = None
        if self.generates:
            lm_head = read_lm_head(config, embed, tied=self.tied, module=self.head_module)
        none = (None,) * num_layers
        kinds = list(zip(ropes, self.windows or none, self.feed_forwards or none, strict=True))
        # A mixture of experts is large, and its hash slow.
        keys = [(rope, window, id(block)) for rope, window, block in kinds]
        layers = {key: layer(*kind) for key, kind in dict(zip(keys, kinds, strict=True)).items()}
        return model_spec(
            config,
            embed=embed,
            layers=[layers[key] for key in keys],
            head=HeadSpec(
                final_norm,
                lm_head,
                scale=self.logit_scale,
                soft_cap=self.logit_soft_cap,
            ),
            head_module=self.head_module,
            max_model_len=max_model_len,
            layer_names=self.layer_names,
            bare_prefix=self.bare_prefix,
            ignored=(*ROTARY_TABLES, *self.ignored),
        )


def read_max_position(config: ConfigJson) -> int:
    """Return the field max_position_embeddings."""
    return config.integer("max_position_embeddings", default=DEFAULT_MAX_MODEL_LEN)


def read_llama_rope(
    config: ConfigJson,
    *,
    theta: float = 10000.0,
    aliases: dict[str, str] | None = None,
    default_original: int | None = None,
    partial: float | None = None,
    is_neox: bool = True,
) -> RopeSpec:
    """Return the rotary positions of all layers; the arguments are those of `read_rope`."""
    return read_rope(
        config,
        head_size=Heads.read(config).head_size,
        max_position=read_max_position(config),
        theta=theta,
        aliases=aliases,
        default_original=default_original,
        partial=partial,
        is_neox=is_neox,
    )


def read_qwen_windows(config: ConfigJson) -> tuple[int | None, ...]:
    """Return the windows of Qwen's layers: from layer max_window_layers on, if enabled."""
    window = None
    if config.flag("use_sliding_window", False):
        window = config.optional_integer("sliding_window", least=1)
    first = config.integer("max_window_layers", default=28, least=0)
    layer_types = [
        "sliding_attention" if window is not None and i >= first else "full_attention"
        for i in range(read_num_layers(config))
    ]
    return read_windows(config, layer_types, window)


def _max_model_len(config: ConfigJson, ropes: Sequence[RopeSpec | None]) -> int:
    scaled = [
        scaled_max_model_len(rope, read_max_position(config))
        for rope in set(ropes)
        if rope is not None
    ]
    return min(scaled, default=read_max_position(config))


def read(config: ConfigJson) -> ModelSpec:
    """Read Llama."""
    bias = config.flag("attention_bias", False)
    mlp_bias = config.flag("mlp_bias", False)
    return LlamaLike(qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias).read(config)


ARCHITECTURES = {"LlamaForCausalLM": read}
