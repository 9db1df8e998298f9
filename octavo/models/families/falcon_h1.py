"""Falcon-H1: attention and a state space side by side in each layer, and many factors."""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.blocks.attention import AttentionSpec
from octavo.models.blocks.mlp import MLPSpec, ScaledMLPSpec
from octavo.models.blocks.sum import SumSpec, Term
from octavo.models.families.llama import LlamaLike
from octavo.models.families.state_parts import Mamba2Fields, read_dt_range, read_expanded
from octavo.models.spec import ModelSpec

_FIELDS = Mamba2Fields(out_bias="projectors_bias")


def _read_factors(config: ConfigJson, name: str, count: int) -> tuple[float, ...]:
    return config.numbers(name, count) if config.has(name) else (1.0,) * count


def read(config: ConfigJson) -> ModelSpec:
    """Read Falcon-H1."""
    bias = config.flag("attention_bias", False)
    variant = LlamaLike(
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
        gate_up_modules=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down_module="feed_forward.down_proj",
        feed_forward_norm="pre_ff_layernorm",
        final_norm="model.final_layernorm",
        embed_scale=config.number("embedding_multiplier", default=1.0),
        logit_scale=config.number("lm_head_multiplier", default=1.0),
    )
    spec = variant.read(config)
    inner = config.optional_integer("mamba_d_ssm", least=1)
    mixer = _FIELDS.read(
        config,
        "mamba",
        inner_size=inner or read_expanded(config, "mamba_expand"),
        eps=config.number("rms_norm_eps"),
        dt_range=read_dt_range(config),
        norm=config.flag("mamba_rms_norm", False),
    )
    mixer = replace(
        mixer,
        factors=_read_factors(config, "ssm_multipliers", 5),
        norm_before_gate=mixer.norm is not None and config.flag("mamba_norm_before_gate", True),
    )
    layer = spec.layers[0]
    attention, mlp = layer.blocks
    assert isinstance(attention, AttentionSpec)
    assert isinstance(mlp, MLPSpec)
    key_factor = config.number("key_multiplier", default=1.0)
    mixers = SumSpec(
        (
            Term("mamba", mixer, *_in_and_out(config, "ssm")),
            Term(
                "attention",
                replace(attention, scale=attention.scale * key_factor),
                *_in_and_out(config, "attention"),
            ),
        )
    )
    gate_factor, down_factor = _read_factors(config, "mlp_multipliers", 2)
    scaled = ScaledMLPSpec(mlp.up, mlp.down, mlp.activation, gated=True, gate_factor=gate_factor)
    feed_forward = SumSpec((Term("mlp", scaled, result_factor=down_factor),))
    return replace(spec, layers=(layer.with_blocks([mixers, feed_forward]),) * len(spec.layers))


def _in_and_out(config: ConfigJson, name: str) -> tuple[float, float]:
    """Return the factors of a mixer's input and result."""
    return (
        config.number(f"{name}_in_multiplier", default=1.0),
        config.number(f"{name}_out_multiplier", default=1.0),
    )


ARCHITECTURES = {"FalconH1ForCausalLM": read}
