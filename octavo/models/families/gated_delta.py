"""Qwen3.5, Qwen3-Next and OLMo Hybrid: linear attention with the gated delta rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.kernels.routing import Routing
from octavo.kernels.sizes import MAX_TAPS
from octavo.models.blocks.base import BlockSpec
from octavo.models.blocks.gated_delta import GatedDeltaSpec
from octavo.models.blocks.layer import LayerSpec
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.norm import RMSNormSpec
from octavo.models.families.base import read_num_heads, read_num_layers, text_part
from octavo.models.families.experts import ExpertNames, experts, read_num_experts, read_top_k
from octavo.models.families.llama import LlamaLike, read_llama_rope
from octavo.models.families.olmo2 import olmo2_like
from octavo.models.families.qwen_moe import read_feed_forwards, read_routing
from octavo.models.heads import MTPSpec
from octavo.models.spec import ModelSpec

_NOT_RUN = (r"(model\.)?(mtp|visual)\..*",)
"""Patterns of the names of weights of the MTP layer, and of those that process pictures."""
_QWEN = LlamaLike(norm_offset=1.0, qk_norm="head", queries_with_gates=True, ignored=_NOT_RUN)


def read_qwen3_5(config: ConfigJson) -> ModelSpec:
    """Read the text part of Qwen3.5."""
    if config.section("text_config").flag("tie_word_embeddings", False):
        config = config.replaced("tie_word_embeddings", True)
    modules = (("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"))
    spec = _read_qwen(config, _make_delta(config, *modules))
    return replace(spec, prefixes=(("model.", "model.language_model."),))


def read_qwen3_5_moe(config: ConfigJson) -> ModelSpec:
    """Read the text part of Qwen3.5 with experts in all layers."""
    num_experts = read_num_experts(config, "num_experts", "num_local_experts")
    block = experts(
        config,
        Routing(
            read_top_k(config, num_experts, "num_experts_per_tok"), "softmax", renormalize=True
        ),
        num_experts=num_experts,
        inner=config.integer("moe_intermediate_size"),
        names=ExpertNames(shared_gate="mlp.shared_expert_gate"),
        shared_inner=config.integer("shared_expert_intermediate_size"),
    )
    config = config.filled({"intermediate_size": config.get("moe_intermediate_size")})
    return with_experts(read_qwen3_5(config), (block,) * read_num_layers(config))


def with_experts(spec: ModelSpec, blocks: Sequence[BlockSpec | None]) -> ModelSpec:
    """Return the model with these feed-forward blocks; None: the layer's own."""
    made: dict[tuple[int, int], LayerSpec] = {}
    layers = []
    for layer, block in zip(spec.layers, blocks, strict=True):
        if block is not None:
            key = id(layer), id(block)
            layer = made.setdefault(key, layer.with_blocks([layer.blocks[0], block]))
        layers.append(layer)
    return replace(spec, layers=tuple(layers))


def read_qwen3_next(config: ConfigJson) -> ModelSpec:
    """Read Qwen3-Next, with or without experts.

    Its projections store the parts of each head of keys together.
    """
    split = config.flag("split_qkvz", False)  # GGUF
    in_proj = ("in_proj_qkv", "in_proj_z") if split else ("in_proj_qkvz",)
    delta = _make_delta(config, in_proj, ("in_proj_ba",))
    group = delta.num_heads // delta.num_key_heads
    values = group * delta.value_size
    parts = (delta.key_size, delta.key_size, values, values)
    rates_proj = _by_group(delta.rates_proj, delta.num_key_heads, (group, group))
    delta = replace(delta, rates_proj=rates_proj)
    if not split:
        delta = replace(delta, in_proj=_by_group(delta.in_proj, delta.num_key_heads, parts))
    spec = _read_qwen(config, delta)
    if config.integer("num_experts", "num_local_experts", default=0, least=0) == 0:
        return spec
    num_experts = read_num_experts(config, "num_experts", "num_local_experts")
    block = experts(
        config,
        read_routing(config, num_experts, renormalize=True),
        num_experts=num_experts,
        inner=config.integer("moe_intermediate_size"),
        names=ExpertNames(shared_gate="mlp.shared_expert_gate"),
        shared_inner=config.integer("shared_expert_intermediate_size"),
    )
    return with_experts(spec, read_feed_forwards(config, block))


def read_olmo_hybrid(config: ConfigJson) -> ModelSpec:
    """Read OLMo Hybrid: norms follow attention, but precede linear attention."""
    rope, params = None, config.section("rope_parameters")
    if params.has("rope_theta") or "rope_theta" not in params.names():  # null: no positions
        rope = read_llama_rope(config)
    variant = replace(olmo2_like(config), ropes=(rope,) * read_num_layers(config))
    heads = read_num_heads(config, "linear_num_key_heads")
    key_size = config.integer("hidden_size") * 3 // (4 * heads)
    size = config.integer("linear_key_head_dim", default=max(1, key_size))
    config = config.filled({"linear_key_head_dim": size, "linear_value_head_dim": 2 * size})
    delta = _make_delta(
        config,
        ("q_proj", "k_proj", "v_proj", "g_proj"),
        ("b_proj", "a_proj"),
        "o_proj",
        ("q_conv1d", "k_conv1d", "v_conv1d"),
        "o_norm",
        eps=1e-5,
    )
    if config.flag("linear_allow_neg_eigval", True):
        delta = replace(delta, beta_scale=2.0)
    hidden, eps = config.integer("hidden_size"), config.number("rms_norm_eps")
    norm, feed_forward_norm = (
        RMSNormSpec(f"{name}_layer_norm", hidden, eps) for name in ("attention", "feedforward")
    )
    spec = with_delta(
        config,
        variant.read(config),
        lambda layer: LayerSpec.of(delta, layer.blocks[1], norm, feed_forward_norm),
        last_is_full=True,
    )
    # transformers renames a norm of layers with attention when it saves a model.
    renamed = tuple(
        (f"model.layers.{i}.post_attention_layernorm", f"model.layers.{i}.feedforward_layer_norm")
        for i in range(len(spec.layers))
    )
    return replace(spec, prefixes=renamed)


def read_qwen3_5_mtp(config: ConfigJson) -> MTPSpec | None:
    """Read the MTP layer of Qwen3.5; None: the model has none."""
    config.refuse("mtp_use_dedicated_embeddings", False, "the MTP layer must share the embedding")
    return _read_qwen_mtp(config, "Qwen3_5MTP", "mtp_num_hidden_layers", 0)


def read_qwen3_next_mtp(config: ConfigJson) -> MTPSpec | None:
    """Read the MTP layer of Qwen3-Next; None: the model has none.

    Published configs have no field for it, so a config without the field has one layer.
    """
    return _read_qwen_mtp(config, "Qwen3NextMTP", "num_nextn_predict_layers", 1)


def _read_qwen_mtp(
    config: ConfigJson, architecture: str, field: str, default: int
) -> MTPSpec | None:
    """Return the MTP layer, as vLLM computes it; None: the model has none.

    Args:
        config: config.json.
        architecture: vLLM's name of the layer.
        field: field with the number of MTP layers.
        default: number for a config without the field.
    """
    if config.integer(field, default=default, least=0) == 0:
        return None
    config.refuse(field, 1, "one MTP layer is supported")
    return MTPSpec.of(
        _read_attention(config),
        architecture=architecture,
        prefix="mtp.",
        layer="layers.0.",
        fc="fc",
        embed_norm="pre_fc_norm_embedding",
        hidden_norm="pre_fc_norm_hidden",
        norm="norm",
    )


def _read_qwen(config: ConfigJson, delta: GatedDeltaSpec) -> ModelSpec:
    spec = _read_attention(config)
    return with_delta(config, spec, lambda layer: layer.with_blocks([delta, layer.blocks[1]]))


def _read_attention(config: ConfigJson) -> ModelSpec:
    """Return the model with attention in every layer."""
    bias = config.flag("attention_bias", False)
    rope = read_llama_rope(config, aliases={"mrope": "default"}, partial=0.25)
    ropes = (rope,) * read_num_layers(config)
    return replace(_QWEN, ropes=ropes, qkv_bias=bias, o_bias=bias).read(config)


def with_delta(
    config: ConfigJson,
    spec: ModelSpec,
    make: Callable[[LayerSpec], LayerSpec],
    *,
    last_is_full: bool = False,
) -> ModelSpec:
    """Return the model with linear attention in the layers that have it.

    Args:
        config: config.json.
        spec: the model with attention in every layer.
        make: returns a layer with linear attention, from one with attention.
        last_is_full: True if a config without layer_types has at least one layer with attention.
    """
    count, every = len(spec.layers), config.integer("full_attention_interval", default=4)
    default = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(count)]
    if last_is_full and every > count:
        default[-1] = "full_attention"
    kinds = config.get("layer_types") or default
    if not isinstance(kinds, list) or len(kinds) != count:
        raise config.error("layer_types", "it must name one type for each layer")
    if any(kind not in ("linear_attention", "full_attention") for kind in kinds):
        raise config.error("layer_types", "supported: linear_attention, full_attention")
    linear = make(spec.layers[0])
    layers = zip(kinds, spec.layers, strict=True)
    return replace(spec, layers=tuple(linear if k == "linear_attention" else x for k, x in layers))


def _make_delta(
    config: ConfigJson,
    in_modules: tuple[str, ...],
    rates_modules: tuple[str, ...],
    out_module: str = "out_proj",
    convs: tuple[str, ...] = ("conv1d",),
    norm: str = "norm",
    eps: float | None = None,
) -> GatedDeltaSpec:
    """Return the linear attention of a config.

    Args:
        config: config.json.
        in_modules: modules with queries, keys, values and gates: one module with all, two (the
            gates are in the second), or one for each.
        rates_modules: modules with betas and decays.
        out_module: module of the output projection.
        convs: modules of the convolutions.
        norm: module of the norm.
        eps: term of the norm; None: the field rms_norm_eps.
    """
    config.refuse("hidden_act", "silu", "linear attention needs silu")
    hidden = config.integer("hidden_size")
    key_heads = read_num_heads(config, "linear_num_key_heads")
    heads = read_num_heads(config, "linear_num_value_heads")
    if heads % key_heads:
        raise config.error("linear_num_value_heads", f"it must be a multiple of {key_heads}")
    key_size, value_size = (config.integer(f"linear_{x}_head_dim") for x in ("key", "value"))
    keys, values = key_heads * key_size, heads * value_size
    sizes = {1: (2 * keys + 2 * values,), 2: (2 * keys + values, values)}
    sizes[4] = (keys, keys, values, values)
    rates = {1: (2 * heads,), 2: (heads, heads)}

    def linear(modules: tuple[str, ...], outputs: tuple[int, ...], inputs: int) -> LinearSpec:
        names = (f"linear_attn.{module}" for module in modules)
        return LinearSpec(tuple(zip(names, outputs, strict=True)), inputs)

    return GatedDeltaSpec(
        in_proj=linear(in_modules, sizes[len(in_modules)], hidden),
        rates_proj=linear(rates_modules, rates[len(rates_modules)], hidden),
        out_proj=linear((out_module,), (hidden,), values),
        norm=RMSNormSpec(
            f"linear_attn.{norm}", value_size, config.number("rms_norm_eps") if eps is None else eps
        ),
        module="linear_attn",
        convs=convs,
        num_key_heads=key_heads,
        num_heads=heads,
        key_size=key_size,
        value_size=value_size,
        taps=config.integer("linear_conv_kernel_dim", least=2, most=MAX_TAPS),
        tiled=heads > key_heads and config.flag("linear_tiled_values", False),
    )


def _by_group(linear: LinearSpec, groups: int, parts: tuple[int, ...]) -> LinearSpec:
    return replace(linear, layout="by_group", groups=groups, group_parts=parts)


ARCHITECTURES = {
    "Qwen3_5ForCausalLM": read_qwen3_5,
    "Qwen3_5ForConditionalGeneration": text_part(read_qwen3_5),
    "Qwen3_5MoeForCausalLM": read_qwen3_5_moe,
    "Qwen3_5MoeForConditionalGeneration": text_part(read_qwen3_5_moe),
    "Qwen3NextForCausalLM": read_qwen3_next,
    "OlmoHybridForCausalLM": read_olmo_hybrid,
}
MTP_LAYERS = {
    "Qwen3_5ForCausalLM": read_qwen3_5_mtp,
    "Qwen3_5ForConditionalGeneration": read_qwen3_5_mtp,
    "Qwen3NextForCausalLM": read_qwen3_next_mtp,
}
