"""Parts that families with multi-head latent attention share."""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson
from octavo.layers.rope_spec import RopeSpec
from octavo.models.blocks.latent_attention import LatentAttentionSpec
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.norm import RMSNormSpec
from octavo.models.families.base import read_num_heads
from octavo.models.families.llama import read_max_position
from octavo.models.positions import read_rope, yarn_mscale

_LATENT_EPS = 1e-6
"""Term of the norms within the attention; the other norms have the field rms_norm_eps."""


def read_latent_rope(config: ConfigJson, *, is_neox: bool) -> RopeSpec:
    """Return the rotary positions of the rotated part of queries and keys."""
    return read_rope(
        config,
        head_size=config.integer("qk_rope_head_dim"),
        max_position=read_max_position(config),
        is_neox=is_neox,
    )


def read_latent_attention(config: ConfigJson, rope: RopeSpec | None) -> LatentAttentionSpec:
    """Return the attention of a layer.

    Args:
        config: config.json.
        rope: rotary positions; None: nothing is rotated.

    Raises:
        ModelError: the sizes are impossible, or only a part of a fused projection has a bias.
    """
    hidden, heads = config.integer("hidden_size"), read_num_heads(config)
    if config.has("num_key_value_heads"):
        config.refuse("num_key_value_heads", heads, "all heads share one latent")
    latent, rank = config.integer("kv_lora_rank"), config.optional_integer("q_lora_rank", least=1)
    key, rope_size = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    value, bias = config.integer("v_head_dim"), config.flag("attention_bias", False)
    queries, module = heads * (key + rope_size), "self_attn."
    if rank is None and bias:
        raise config.error("attention_bias", "biases need a q_lora_rank")
    first = ("q_proj", queries) if rank is None else ("q_a_proj", rank)
    kv_b: tuple[tuple[str, int, int], ...]
    kv_b = ((f"{module}kv_b_proj", heads * (key + value), latent),)
    if config.flag("split_kv_b", False):  # GGUF
        kv_b = (
            (f"{module}k_b_proj", heads * latent, key),
            (f"{module}v_b_proj", heads * value, latent),
        )
    latents = (f"{module}kv_a_proj_with_mqa", latent + rope_size)
    return LatentAttentionSpec(
        in_proj=LinearSpec(((f"{module}{first[0]}", first[1]), latents), hidden, bias),
        q_norm=None if rank is None else RMSNormSpec(f"{module}q_a_layernorm", rank, _LATENT_EPS),
        q_b_proj=None if rank is None else LinearSpec(((f"{module}q_b_proj", queries),), rank),
        kv_norm=RMSNormSpec(f"{module}kv_a_layernorm", latent, _LATENT_EPS),
        kv_b_proj=tuple(LinearSpec(((name, rows),), inputs) for name, rows, inputs in kv_b),
        o_proj=LinearSpec(((f"{module}o_proj", hidden),), heads * value, bias),
        num_heads=heads,
        key_size=key,
        rope_size=rope_size,
        value_size=value,
        latent_size=latent,
        scale=(key + rope_size) ** -0.5 * _temperature(config, rope) ** 2,
        positions=rope,
    )


def _temperature(config: ConfigJson, rope: RopeSpec | None) -> float:
    """Return YaRN's factor of queries, and of keys: that of mscale_all_dim; otherwise 1."""
    params = config.section("rope_parameters" if config.has("rope_parameters") else "rope_scaling")
    all_dim = params.optional_number("mscale_all_dim")
    if rope is None or rope.rope_type == "default" or not all_dim:
        return 1.0
    return yarn_mscale(params.number("factor"), all_dim)
