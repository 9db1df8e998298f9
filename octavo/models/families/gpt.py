"""Models with layer norms and plain MLPs: GPT-2, its successors, and encoders like BERT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.checkpoints.config_json import ConfigJson
from octavo.layers.rope_spec import RopeSpec
from octavo.models.blocks.attention import Alibi, AttentionSpec, RelativeBias
from octavo.models.blocks.embedding import EmbedSpec
from octavo.models.blocks.head import HeadSpec
from octavo.models.blocks.layer import Arrangement, LayerSpec
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.mlp import Activation, MLPSpec
from octavo.models.blocks.norm import LayerNormSpec
from octavo.models.families.base import (
    ROTARY_TABLES,
    Heads,
    model_spec,
    plain_mlp,
    read_lm_head,
    visible,
)
from octavo.models.positions import scaled_max_model_len
from octavo.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class GPTLike:
    """Sizes, parts and names of a model with layer norms and, usually, an MLP without a gate."""

    heads: Heads
    num_layers: int
    inner_size: int
    activation: Activation
    eps: float
    """Term of the norms."""
    positions: RopeSpec | Alibi | None = None
    """Positions of attention; None: the embedding has them."""
    max_position: int
    """Context length before a scale of rotary positions."""

    embed: EmbedSpec
    layer_names: str
    bare_prefix: str
    """Names, as in `ModelSpec`."""
    qkv_modules: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    o_module: str
    mlp_modules: tuple[str, ...]
    """Modules of the projections up and down; if the MLP has a gate, `gated`: of gate, up and down,
    or of gate and up in one, and down."""
    norm_modules: tuple[str, str | None]
    """Modules of the norms of attention and MLP; None: the MLP has none."""
    final_norm: str | None
    head_module: str = "lm_head"
    masks: tuple[str, ...] = ()
    """Patterns of names of masks, which some checkpoints store next to the weights."""

    qkv_layout: Literal["rows", "conv1d", "by_group", "by_shard"] = "rows"
    qkv_shards: int = 1
    """Number of parts of the heads, for by_shard."""
    layout: Literal["rows", "conv1d"] = "rows"
    """Layouts of the linear weights, as in `LinearSpec`."""
    attention_bias: bool = False
    mlp_bias: bool = False
    gated: bool = False
    gated_bias: bool = False
    """True if gate and up have a bias; that of the projection down is `mlp_bias`."""
    gate_layout: Literal["rows", "halves"] = "rows"
    """Layout of gate and up in one module, as in `LinearSpec`."""
    norm_bias: bool = True
    head_bias: bool = False
    arrangement: Arrangement = "sequential"
    scales: tuple[float, ...] | None = None
    """Factor on the attention scores of each layer; None: by the size of a head."""
    window: int | None = None
    clip: float | None = None
    bias: RelativeBias | None = None
    head_project: LinearSpec | None = None
    generates: bool = True
    """False for an encoder: it has no LM head, and a token sees all of its text."""
    tied: bool = False
    """Default for a config without tie_word_embeddings."""

    def read(self, config: ConfigJson) -> ModelSpec:
        """Return the model."""
        heads, hidden = self.heads, self.heads.hidden_size
        max_model_len = self.max_position
        if isinstance(self.positions, RopeSpec):
            max_model_len = scaled_max_model_len(self.positions, self.max_position)

        def norm(module: str | None) -> LayerNormSpec | None:
            if module is None:
                return None
            return LayerNormSpec(module, hidden, self.eps, bias=self.norm_bias)

        mlp = self._mlp()

        def layer(scale: float) -> LayerSpec:
            attention = AttentionSpec(
                heads.qkv_proj(
                    *self.qkv_modules,
                    bias=self.attention_bias,
                    layout=self.qkv_layout,
                    shards=self.qkv_shards,
                ),
                heads.o_proj(self.o_module, bias=self.attention_bias, layout=self.layout),
                heads.num_heads,
                heads.num_kv_heads,
                heads.head_size,
                scale,
                self.positions,
                sliding_window=visible(self.window, max_model_len),
                clip=self.clip,
                bias=self.bias,
                causal=self.generates,
            )
            first, second = map(norm, self.norm_modules)
            return LayerSpec.of(attention, mlp, first, second, arrangement=self.arrangement)

        scales = self.scales or (heads.scale,) * self.num_layers
        layers = {scale: layer(scale) for scale in scales}
        lm_head = None
        if self.generates:
            lm_head = read_lm_head(
                config, self.embed, tied=self.tied, bias=self.head_bias, module=self.head_module
            )
        return model_spec(
            config,
            embed=self.embed,
            layers=[layers[scale] for scale in scales],
            head=HeadSpec(norm(self.final_norm), lm_head, project=self.head_project),
            head_module=self.head_module,
            max_model_len=max_model_len,
            layer_names=self.layer_names,
            bare_prefix=self.bare_prefix,
            ignored=(*ROTARY_TABLES, *self.masks),
        )

    def _mlp(self) -> MLPSpec:
        """Return the feed-forward block of all layers."""
        hidden, inner = self.heads.hidden_size, self.inner_size
        *ups, down = self.mlp_modules
        if not self.gated:
            return plain_mlp(
                ups[0],
                down,
                hidden,
                inner,
                self.activation,
                bias=self.mlp_bias,
                layout=self.layout,
            )
        rows = 2 * inner // len(ups)
        up = LinearSpec(
            tuple((module, rows) for module in ups), hidden, self.gated_bias, self.gate_layout
        )
        return MLPSpec(
            up, LinearSpec(((down, hidden),), inner, self.mlp_bias), self.activation, gated=True
        )
