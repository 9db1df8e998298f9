"""AFMoE (Trinity): gated attention, norms of results; layers without a window have no positions."""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.families.base import read_num_layers, read_windows
from octavo.models.families.experts import ExpertNames, read_biased_experts, read_sparse_layers
from octavo.models.families.llama import LlamaLike, read_llama_rope
from octavo.models.spec import ModelSpec

_NAMES = ExpertNames(
    router="mlp.router.gate", shared="mlp.shared_experts.", choice_bias="mlp.expert_bias"
)


def read(config: ConfigJson) -> ModelSpec:
    """Read AFMoE."""
    period = config.integer("global_attn_every_n_layers", default=4)
    kinds = [
        "sliding_attention" if (i + 1) % period else "full_attention"
        for i in range(read_num_layers(config))
    ]
    windows = read_windows(config, kinds, config.optional_integer("sliding_window", least=1))
    rope = read_llama_rope(config)
    block = read_biased_experts(config, _NAMES, scale=config.number("route_scale", default=1.0))
    dense = config.integer("num_dense_layers", default=1, least=0)
    scaled = config.flag("mup_enabled", False)
    bias = config.flag("attention_bias", False)
    return LlamaLike(
        mixer_out_norm="post_attention_layernorm",
        feed_forward_norm="pre_mlp_layernorm",
        feed_forward_out_norm="post_mlp_layernorm",
        embed_scale=config.integer("hidden_size") ** 0.5 if scaled else None,
        embed_scale_given=scaled,
        windows=windows,
        ropes=tuple(None if window is None else rope for window in windows),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        attention_gate="self_attn.gate_proj",
        feed_forwards=read_sparse_layers(config, block, dense=dense),
    ).read(config)


ARCHITECTURES = {"AfmoeForCausalLM": read}
