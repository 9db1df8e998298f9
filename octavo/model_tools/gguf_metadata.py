"""Parameters of a model as metadata of a GGUF file, by the keys of llama.cpp's converter."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

from octavo.checkpoints.gguf.architectures import Architecture
from octavo.errors import ConfigError
from octavo.layers.rope_spec import RopeSpec
from octavo.models.blocks.altup import AltUpLayerSpec
from octavo.models.blocks.attention import Alibi, AttentionSpec
from octavo.models.blocks.experts import ExpertsSpec
from octavo.models.blocks.gated_delta import GatedDeltaSpec
from octavo.models.blocks.mlp import MLPSpec, SparseMLPSpec
from octavo.models.blocks.norm import LayerNormSpec
from octavo.models.blocks.short_conv import ShortConvSpec
from octavo.models.spec import ModelSpec

_PATTERNS = ("olmo2", "exaone4", "granite_swa", "gemma3n", "gemma4")
"""Architectures whose files name the layers with sliding windows."""


def model_metadata(spec: ModelSpec, kind: str, architecture: Architecture) -> dict[str, Any]:
    """Return the parameters of a model.

    Args:
        spec: the model.
        kind: its `general.architecture`.
        architecture: the architecture of this name.

    Raises:
        ConfigError: the model has no blocks that GGUF describes.
    """
    attentions, mlps = attention_blocks(spec), _feed_forward_blocks(spec)
    mixtures, norm = _expert_blocks(spec), spec.head.norm
    if not attentions or not (mlps or mixtures) or norm is None:
        raise ConfigError(f"{spec.architecture} cannot be written to GGUF: its blocks differ.")
    whole = next((a for a in attentions if a.sliding_window is None), attentions[0])
    local = next((a for a in attentions if a.sliding_window is not None), whole)
    inner, window = [mlp.down.inputs for mlp in mlps], local.sliding_window or 0
    inner = inner or [mixtures[0].inner]  # a model without dense layers does not use it
    values: dict[str, Any] = {
        "context_length": spec.max_model_len,
        "embedding_length": spec.hidden_size,
        "block_count": len(spec.layers),
        "feed_forward_length": inner[0] if len(set(inner)) == 1 else inner,
        "attention.head_count": whole.num_heads,
        "attention.head_count_kv": whole.num_kv_heads,
        "attention.key_length": whole.head_size,
        "attention.value_length": whole.head_size,
        "vocab_size": spec.vocab_size,
    }
    name = "layer_norm_epsilon" if isinstance(norm, LayerNormSpec) else "layer_norm_rms_epsilon"
    values[f"attention.{name}"] = float(norm.eps)
    if architecture.windowed and (window or kind not in _PATTERNS):
        values["attention.sliding_window"] = window
        if kind in _PATTERNS:
            pattern = [a.sliding_window is not None for a in attentions]
            values["attention.sliding_window_pattern"] = pattern
    scale = spec.head.scale
    if scale is not None and "Cohere" not in architecture.name:
        scale = 1 / scale  # Granite divides
    optional = {
        "attn_logit_softcapping": whole.soft_cap,
        "final_logit_softcapping": spec.head.soft_cap,
        "attention.scale": whole.scale,
        "attention.clamp_kqv": whole.clip,
        "embedding_scale": spec.embed.scale,
        "residual_scale": spec.layers[0].residual_multiplier,
        "logit_scale": scale,
    }
    rope = first_rope(spec)
    if rope is not None:
        values |= {"rope.freq_base": float(rope.theta), "rope.dimension_count": rope.rotary_dim}
        values |= _scaling(rope, kind)
    if isinstance(local.positions, RopeSpec):
        optional["rope.freq_base_swa"] = local.positions.theta
    if mixtures:
        values |= _experts(mixtures[0])
    known = set(architecture.fields.values())
    values |= {k: float(v) for k, v in optional.items() if k in known and v is not None}
    values |= _own_values(spec, kind, whole, local)
    return {f"{kind}.{key}": value for key, value in values.items()}


def attention_blocks(spec: ModelSpec) -> list[AttentionSpec]:
    """Return the attention of each layer."""
    blocks = [block for layer in spec.layers for block in layer.blocks]
    return [block for block in blocks if isinstance(block, AttentionSpec)]


def linear_blocks(spec: ModelSpec) -> list[GatedDeltaSpec]:
    """Return the linear attention of each layer that has it."""
    blocks = [block for layer in spec.layers for block in layer.blocks]
    return [block for block in blocks if isinstance(block, GatedDeltaSpec)]


def _feed_forward_blocks(spec: ModelSpec) -> list[MLPSpec]:
    """Return the feed-forward block of each layer."""
    blocks = [block for layer in spec.layers for block in layer.blocks]
    return [b for b in blocks if isinstance(b, MLPSpec) and b.layer_input is None]


def _expert_blocks(spec: ModelSpec) -> list[ExpertsSpec]:
    """Return the mixture of experts of each layer that has one."""
    blocks = [block for layer in spec.layers for block in layer.blocks]
    return [block for block in blocks if isinstance(block, ExpertsSpec)]


def _experts(block: ExpertsSpec) -> dict[str, Any]:
    """Return the description of a mixture of experts."""
    values: dict[str, Any] = {
        "expert_count": block.router.num_experts,
        "expert_used_count": block.router.routing.top_k,
        "expert_feed_forward_length": block.inner,
    }
    if block.shared is not None:
        values["expert_shared_feed_forward_length"] = block.shared.down.inputs
    return values


def first_rope(spec: ModelSpec) -> RopeSpec | None:
    """Return the rotary positions of the first layer that has some, one without a window first."""
    attentions = attention_blocks(spec)
    ordered = sorted(attentions, key=lambda a: a.sliding_window is not None)
    return next((a.positions for a in ordered if isinstance(a.positions, RopeSpec)), None)


def _scaling(rope: RopeSpec, kind: str) -> dict[str, Any]:
    """Return the description of scaled positions."""
    match rope.rope_type:
        case "linear":
            return {
                "rope.scaling.type": "linear",
                "rope.scaling.factor": float(rope.factor),
                "context_length": rope.original_max_position,
            }
        case "yarn":
            values: dict[str, Any] = {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": float(rope.factor),
                "rope.scaling.original_context_length": rope.original_max_position,
                "rope.scaling.yarn_beta_fast": float(rope.beta_fast),
                "rope.scaling.yarn_beta_slow": float(rope.beta_slow),
            }
            usual = 0.1 * math.log(max(1.0, rope.factor)) + 1
            if kind == "mistral3":  # the factor is (usual) / (0.1 * multiplier * log(factor) + 1)
                multiplier = (usual / rope.attention_factor - 1) / (usual - 1) if usual > 1 else 1.0
                return values | {"rope.scaling.yarn_log_multiplier": multiplier}
            if not math.isclose(rope.attention_factor, usual):
                values["rope.scaling.yarn_attn_factor"] = float(rope.attention_factor)
            return values
        case "longrope":
            return {
                "rope.scaling.type": "longrope",
                "rope.scaling.original_context_length": rope.original_max_position,
                "rope.scaling.attn_factor": float(rope.attention_factor),
            }
    return {}


def _own_values(
    spec: ModelSpec, kind: str, whole: AttentionSpec, local: AttentionSpec
) -> dict[str, Any]:
    """Return the values of keys that only this architecture has.

    Args:
        spec: the model.
        kind: its `general.architecture`.
        whole: attention of a layer without a window.
        local: attention of a layer with a window, if there is one.
    """
    attentions = attention_blocks(spec)
    match kind:
        case "mistral3" if whole.query_scale is not None:
            return {"attention.temperature_scale": float(whole.query_scale.beta)}
        case "granite_swa":
            rotated = [attention.positions is not None for attention in attentions]
            return {} if all(rotated) else {"attention.rope_pattern": rotated}
        case "command-r" | "cohere2":
            return {"rope.scaling.type": "none"}
        case "stablelm" | "gptneox":
            return {"use_parallel_residual": spec.layers[0].arrangement == "parallel"}
        case "mpt" if isinstance(whole.positions, Alibi):
            power = 2 ** math.ceil(math.log2(whole.num_heads))
            first = 1 if power == whole.num_heads else 2
            bias = -math.log2(whole.positions.slopes[0]) * power / first
            clip = {} if whole.clip is None else {"attention.clamp_kqv": float(whole.clip)}
            return {"attention.max_alibi_bias": bias, **clip}
        case "lfm2":
            convolutions = [block for layer in spec.layers for block in layer.blocks]
            taps = {b.conv.taps for b in convolutions if isinstance(b, ShortConvSpec)} or {3}
            return {
                "attention.head_count_kv": [
                    whole.num_kv_heads * any(isinstance(b, AttentionSpec) for b in layer.blocks)
                    for layer in spec.layers
                ],
                "shortconv.l_cache": taps.pop(),
            }
        case "qwen35":
            return _qwen35(spec, whole)
        case "gemma3n" | "gemma4":
            inputs = spec.embed.layer_inputs
            values: dict[str, Any] = {
                "attention.shared_kv_layers": sum(a.source is not None for a in attentions),
                "embedding_length_per_layer_input": 0 if inputs is None else inputs.size,
            }
            return values | (_gemma3n(spec) if kind == "gemma3n" else _gemma4(attentions, local))
    return {}


def _qwen35(spec: ModelSpec, whole: AttentionSpec) -> dict[str, Any]:
    linear = [
        any(isinstance(block, GatedDeltaSpec) for block in layer.blocks) for layer in spec.layers
    ]
    values: dict[str, Any] = {"attention.recurrent_layers": linear}
    every = linear.index(False) + 1
    if linear == [(i + 1) % every > 0 for i in range(len(linear))]:
        values["full_attention_interval"] = every
    if isinstance(whole.positions, RopeSpec):
        # Texts have the same positions in all sections.
        pairs = whole.positions.rotary_dim // 2
        sections = [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0]
        values["rope.dimension_sections"] = sections
    for delta in linear_blocks(spec)[:1]:
        values |= {
            "ssm.conv_kernel": delta.taps,
            "ssm.state_size": delta.key_size,
            "ssm.group_count": delta.num_key_heads,
            "ssm.time_step_rank": delta.num_heads,
            "ssm.inner_size": delta.num_heads * delta.value_size,
        }
    return values


def _gemma3n(spec: ModelSpec) -> dict[str, Any]:
    layer = spec.layers[0]
    assert isinstance(layer, AltUpLayerSpec)
    blocks = _feed_forward_blocks(spec)
    shares = [block.sparsity if isinstance(block, SparseMLPSpec) else 0.0 for block in blocks]
    return {
        "altup.active_idx": layer.active,
        "altup.num_inputs": layer.num_streams,
        "activation_sparsity_scale": [
            NormalDist().inv_cdf(share) if share else -math.inf for share in shares
        ],
    }


def _gemma4(attentions: list[AttentionSpec], local: AttentionSpec) -> dict[str, Any]:
    heads = [attention.num_kv_heads for attention in attentions]
    values: dict[str, Any] = {
        "attention.head_count_kv": heads[0] if len(set(heads)) == 1 else heads,
        "attention.key_length_swa": local.head_size,
        "attention.value_length_swa": local.head_size,
        "rope.dimension_count_swa": local.head_size,
    }
    if isinstance(local.positions, RopeSpec):
        values["rope.freq_base_swa"] = float(local.positions.theta)
    return values
