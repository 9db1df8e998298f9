"""RWKV 7, in the form of flash-linear-attention: time mix and channel mix in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.blocks.embedding import EmbedSpec
from octavo.models.blocks.head import HeadSpec
from octavo.models.blocks.layer import LayerSpec
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.low_rank import LowRankSpec
from octavo.models.blocks.norm import LayerNormSpec
from octavo.models.blocks.rwkv7 import ChannelMixSpec, TimeMixSpec, TokenShiftSpec
from octavo.models.families.base import model_spec, read_lm_head, read_num_layers
from octavo.models.families.llama import read_max_position
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read RWKV 7."""
    config.refuse("hidden_act", "sqrelu", "the channel mix needs sqrelu")
    config.refuse("attn", None, "layers with attention are not supported")
    config.refuse("norm_first", True, "the embedding needs a norm")
    hidden, count = config.integer("hidden_size"), read_num_layers(config)
    values = config.get("value_dim")
    if values not in (None, hidden, [hidden] * count):
        raise config.error("value_dim", f"supported: {hidden}, the hidden size")
    eps, bias = config.number("norm_eps"), config.flag("norm_bias", True)

    def norm(module: str) -> LayerNormSpec:
        return LayerNormSpec(module, hidden, eps, bias)

    mixer = _read_time_mix(config, hidden, eps)
    channels = _read_channel_mix(config, hidden)
    norms = norm("attn_norm"), norm("ffn_norm")
    later = LayerSpec.of(mixer, channels, *norms)
    first = LayerSpec.of(replace(mixer, value_rate=None), channels, *norms)
    embed_norm = norm("model.pre_norm")
    vocab_size = config.integer("vocab_size")
    embed = EmbedSpec("model.embeddings", vocab_size, hidden, hidden, norm=embed_norm)
    spec = model_spec(
        config,
        embed=embed,
        layers=[first] + [later] * (count - 1),
        head=HeadSpec(norm("model.norm"), read_lm_head(config, embed, tied=False)),
        max_model_len=read_max_position(config),
        layer_names="model.layers.{}.",
        bare_prefix="model.",
        ignored=(r"(model\.)?layers\.0\.attn\.v_lora\..*",),  # the first layer has no other value
    )
    return replace(spec, prefixes=(("model.pre_norm.", "model.layers.0.pre_norm."),))


def _read_time_mix(config: ConfigJson, hidden: int, eps: float) -> TimeMixSpec:
    """Return the time mix of all layers after the first."""
    size = config.optional_integer("head_dim", least=1)
    if size is None:
        size = max(1, hidden // config.integer("num_heads"))
    if hidden % size:
        raise config.error("head_dim", f"it must divide the hidden size {hidden}")

    def linear(name: str) -> LinearSpec:
        return LinearSpec(((f"attn.{name}_proj", hidden),), hidden)

    def low_rank(
        name: str,
        field: str,
        activation: Literal["none", "tanh", "sigmoid"] = "none",
        bias: bool = True,
    ) -> LowRankSpec:
        module, rank = f"attn.{name}_lora.lora", config.integer(field)
        down = LinearSpec(((f"{module}.0", rank),), hidden)
        return LowRankSpec(down, LinearSpec(((f"{module}.2", hidden),), rank, bias), activation)

    return TimeMixSpec(
        shift=TokenShiftSpec(tuple(f"attn.x_{name}" for name in "rwkvag"), (1, 1, hidden)),
        receptance=linear("r"),
        key=linear("k"),
        value=linear("v"),
        decay=low_rank("w", "decay_low_rank_dim", "tanh"),
        rate=low_rank("a", "a_low_rank_dim"),
        gate=low_rank("g", "gate_low_rank_dim", "sigmoid", bias=False),
        value_rate=low_rank("v", "v_low_rank_dim"),
        out_proj=linear("o"),
        module="attn",
        num_heads=hidden // size,
        head_size=size,
        eps=size * eps,
    )


def _read_channel_mix(config: ConfigJson, hidden: int) -> ChannelMixSpec:
    inner = config.optional_integer("intermediate_size", least=1)
    if inner is None:
        inner = max(1, int(hidden * config.positive("hidden_ratio", 4.0)))
        inner = -(-inner // 32) * 32
    return ChannelMixSpec(
        up=LinearSpec((("ffn.key", inner),), hidden),
        down=LinearSpec((("ffn.value", hidden),), inner),
        activation="relu2",
        gated=False,
        shift=TokenShiftSpec(("ffn.x_k",), (hidden,)),
    )


ARCHITECTURES = {"RWKV7ForCausalLM": read}
