"""The architectures: how each one's config.json is read and how its checkpoint names weights.

One small reader and one table of names for each family; the decoder itself is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from octavo.errors import ModelError
from octavo.layers.rope_spec import RopeSpec
from octavo.models.config_json import ConfigJson
from octavo.models.positions import (
    alibi_slopes_bloom,
    alibi_slopes_mpt,
    read_rope,
    scaled_max_model_len,
)
from octavo.models.spec import ModelSpec, checkpoint_dtype

# vLLM's assumption where a config names no context length.
_DEFAULT_MAX_MODEL_LEN = 2048
_DTYPES = {name: name for name in ("float32", "float16", "bfloat16", "float64")}
# Far beyond any model: what config.json claims is kept for each layer and head before it is checked
# against the weights.
_MOST_LAYERS, _MOST_HEADS = 4096, 65536
# Names in `architectures` for those of transformers.
_ALIASES = {"MPTForCausalLM": "MptForCausalLM"}
_GATED = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
_GATED["gelu_new"] = "gelu_tanh"
_PLAIN = {"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh"}
_PLAIN["gelu_pytorch_tanh"] = "gelu_tanh"
_SAMPLING = {"temperature": False, "top_p": False, "min_p": False, "repetition_penalty": False}
_SAMPLING |= {"top_k": True, "max_new_tokens": True}  # whole numbers


@dataclass(frozen=True)
class Family:
    """One architecture."""

    read: Callable[[ConfigJson], ModelSpec]
    names: Mapping[str, str | tuple[str, ...]]
    """The decoder's module -> the checkpoint's module, or modules to be stacked."""
    prefix: str
    """Beginning of the names that checkpoints saved from the bare model lack."""
    linear: Literal["rows", "conv1d"] = "rows"
    """Whether linear weights are [out, in] or, as GPT-2's Conv1D, [in, out]."""
    qkv: Literal["stacked", "by_head"] = "stacked"
    """Whether fused qkv rows are all q, all k, all v, or q, k, v of each head in turn (BLOOM)."""
    ignored: tuple[str, ...] = ()
    """Regular expressions of checkpoint names that hold no weights."""


def read_spec(folder: Path, *, trust_remote_code: bool) -> ModelSpec:
    """Reads a model folder; see `ModelSpec.from_folder`."""
    config = ConfigJson.load(folder / "config.json")
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or [type(name) for name in architectures] != [str]:
        raise config.error("architectures", f"it must name one of: {', '.join(FAMILIES)}")
    family = FAMILIES.get(_architecture(config))
    if family is None:
        raise config.error("architectures", f"supported: {', '.join(FAMILIES)}")
    if config.has("auto_map") and not trust_remote_code:
        raise config.error(
            "auto_map",
            "the model asks for code of its own, which Octavo never runs; trust_remote_code accepts"
            f" such a model and computes it as {architectures[0]} by Octavo's own decoder",
        )
    for name in ("quantization_config", "compression_config"):
        if config.has(name):
            raise config.error(name, "supported: checkpoints in float32, float16 or bfloat16")
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        config.refuse(name, 0, "mixtures of experts are not supported")
    config.refuse("use_bidirectional_attention", False, "only causal attention is supported")
    try:
        return family.read(config)
    except ArithmeticError as error:
        raise ModelError(
            f"{config.where}: its numbers do not go together ({error}); fetch the file again."
        ) from None


def _architecture(config: ConfigJson) -> str:
    name: str = config.get("architectures")[0]
    return _ALIASES.get(name, name)


def _num_layers(config: ConfigJson, *names: str) -> int:
    return config.integer(*names, "num_hidden_layers", most=_MOST_LAYERS)


def _num_heads(config: ConfigJson, *names: str) -> int:
    return config.integer(*names, "num_attention_heads", most=_MOST_HEADS)


def _spec(
    config: ConfigJson,
    *,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    intermediate_size: int,
    max_model_len: int,
    num_kv_heads: int | None = None,
    head_size: int | None = None,
    windows: tuple[int | None, ...] | None = None,
    **switches: Any,
) -> ModelSpec:
    """Puts a spec together from what the families read differently and what all have alike."""
    num_kv_heads = num_kv_heads or num_heads
    if head_size is None:
        head_size = hidden_size // num_heads
        if hidden_size % num_heads:
            raise ModelError(
                f"{config.where}: {num_heads} heads do not divide hidden size {hidden_size}; "
                "name head_dim."
            )
    if num_heads % num_kv_heads:
        raise config.error("num_key_value_heads", f"it must divide {num_heads} attention heads")
    windows = windows or (None,) * num_layers
    switches.setdefault("embed_size", hidden_size)
    switches.setdefault("layer_scales", (head_size**-0.5,) * num_layers)
    folder = Path(config.where).parent
    eos_token_ids = config.token_ids("eos_token_id")
    defaults: dict[str, float | int] = {}
    if (folder / "generation_config.json").exists():
        generation = ConfigJson.load(folder / "generation_config.json")
        eos_token_ids += generation.token_ids("eos_token_id")
        for name, whole in _SAMPLING.items():
            if generation.has(name):
                key = "max_tokens" if name == "max_new_tokens" else name
                defaults[key] = (
                    generation.integer(name, least=-1) if whole else generation.number(name)
                )
    bos_token_ids = config.token_ids("bos_token_id")
    return ModelSpec(
        architecture=_architecture(config),
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_size=head_size,
        intermediate_size=intermediate_size,
        # A window as long as the context hides nothing.
        layer_windows=tuple(w if w is not None and w < max_model_len else None for w in windows),
        max_model_len=max_model_len,
        eos_token_ids=tuple(dict.fromkeys(eos_token_ids)),
        bos_token_id=bos_token_ids[0] if bos_token_ids else None,
        dtype=_dtype(config, folder),
        generation_config=defaults,
        **switches,
    )


def _dtype(config: ConfigJson, folder: Path) -> str:
    for name in ("dtype", "torch_dtype"):
        if config.has(name):
            return config.choice(name, _DTYPES)
    return checkpoint_dtype(folder)


def _windows(
    config: ConfigJson, layer_types: list[str], window: int | None
) -> tuple[int | None, ...]:
    """The window of each layer from its type."""
    if config.has("layer_types"):
        layer_types = config.get("layer_types")
        if not isinstance(layer_types, list) or len(layer_types) != _num_layers(config):
            raise config.error("layer_types", "it must name one type for each layer")
    result: list[int | None] = []
    for kind in layer_types:
        if kind not in ("full_attention", "sliding_attention"):
            raise config.error("layer_types", "supported: full_attention, sliding_attention")
        if kind == "sliding_attention" and window is None:
            raise config.error("sliding_window", "layers with sliding attention need a length")
        result.append(window if kind == "sliding_attention" else None)
    return tuple(result)


def _llama_like(
    config: ConfigJson,
    *,
    ropes: tuple[RopeSpec, ...] | None = None,
    activation: str = "hidden_act",
    default_activation: str | None = None,
    rope_options: dict[str, Any] | None = None,
    scale_context: bool = True,
    **switches: Any,
) -> ModelSpec:
    """Llama and all that differ from it by switches."""
    num_layers = _num_layers(config)
    num_heads = _num_heads(config)
    hidden_size = config.integer("hidden_size")
    head_size = config.optional_integer("head_dim", least=1)
    max_position = config.integer("max_position_embeddings", default=_DEFAULT_MAX_MODEL_LEN)
    if ropes is None:
        rope = read_rope(
            config,
            head_size=head_size or hidden_size // num_heads,
            max_position=max_position,
            **(rope_options or {}),
        )
        ropes = (rope,)
        switches["layer_ropes"] = (0,) * num_layers
    switches.setdefault("tie_word_embeddings", config.flag("tie_word_embeddings", default=False))
    return _spec(
        config,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=config.optional_integer("num_key_value_heads", least=1),
        head_size=head_size,
        intermediate_size=config.integer("intermediate_size"),
        max_model_len=(
            scaled_max_model_len(ropes[0], max_position) if scale_context else max_position
        ),
        norm_eps=config.number("rms_norm_eps"),
        activation=config.choice(activation, _GATED, default_activation),
        ropes=ropes,
        **switches,
    )


def _llama(config: ConfigJson) -> ModelSpec:
    bias = config.flag("attention_bias", False)
    return _llama_like(config, qkv_bias=bias, o_bias=bias, mlp_bias=config.flag("mlp_bias", False))


def _mistral(config: ConfigJson) -> ModelSpec:
    window = config.optional_integer("sliding_window", least=1)
    kind = "full_attention" if window is None else "sliding_attention"
    layer_types = [kind] * _num_layers(config)
    return _llama_like(config, windows=_windows(config, layer_types, window))


def _qwen_windows(config: ConfigJson) -> tuple[int | None, ...]:
    window = None
    if config.flag("use_sliding_window", False):
        window = config.optional_integer("sliding_window", least=1)
    first = config.integer("max_window_layers", default=28, least=0)
    layer_types = [
        "sliding_attention" if window is not None and i >= first else "full_attention"
        for i in range(_num_layers(config))
    ]
    return _windows(config, layer_types, window)


def _qwen2(config: ConfigJson) -> ModelSpec:
    return _llama_like(config, windows=_qwen_windows(config), qkv_bias=True)


def _qwen3(config: ConfigJson) -> ModelSpec:
    bias = config.flag("attention_bias", False)
    config.integer("head_dim")  # without it, transformers assumes 128 rather than divides
    return _llama_like(
        config, windows=_qwen_windows(config), qkv_bias=bias, o_bias=bias, qk_norm=True
    )


def _gemma(config: ConfigJson, **switches: Any) -> ModelSpec:
    bias = config.flag("attention_bias", False)
    num_layers = _num_layers(config)
    config.integer("head_dim")
    return _llama_like(
        config,
        activation="hidden_activation",
        default_activation="gelu_pytorch_tanh",
        layer_scales=(config.positive("query_pre_attn_scalar", 256.0) ** -0.5,) * num_layers,
        norm_weight_offset=1.0,
        norm_placement="sandwich",
        embed_scale=config.integer("hidden_size") ** 0.5,
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        o_bias=bias,
        **switches,
    )


def _gemma2(config: ConfigJson) -> ModelSpec:
    layer_types = [
        "full_attention" if i % 2 else "sliding_attention" for i in range(_num_layers(config))
    ]
    window = config.integer("sliding_window", default=4096)
    return _gemma(
        config,
        windows=_windows(config, layer_types, window),
        attn_logit_softcap=config.optional_number("attn_logit_softcapping"),
        final_logit_softcap=config.optional_number("final_logit_softcapping"),
    )


def _gemma3(config: ConfigJson) -> ModelSpec:
    # transformers reads this field but does not apply it for Gemma 3.
    config.refuse("attn_logit_softcapping", None, "Gemma 3 has no soft cap in its attention")
    pattern = config.integer("sliding_window_pattern", "_sliding_window_pattern", default=6)
    layer_types = [
        "sliding_attention" if (i + 1) % pattern else "full_attention"
        for i in range(_num_layers(config))
    ]
    window = config.integer("sliding_window", default=4096)
    windows = _windows(config, layer_types, window)
    head_size = config.integer("head_dim")
    max_position = config.integer("max_position_embeddings")
    full = read_rope(
        config,
        head_size=head_size,
        max_position=max_position,
        layer_type="full_attention",
        theta=1e6,
    )
    local = read_rope(
        config,
        head_size=head_size,
        max_position=max_position,
        layer_type="sliding_attention",
        theta_field="rope_local_base_freq",
    )
    return _gemma(
        config,
        windows=windows,
        ropes=(full, local),
        layer_ropes=tuple(0 if w is None else 1 for w in windows),
        # max_position_embeddings is the scaled length already.
        scale_context=False,
        qk_norm=True,
        final_logit_softcap=config.optional_number("final_logit_softcapping"),
    )


def _phi3(config: ConfigJson) -> ModelSpec:
    window = config.optional_integer("sliding_window", least=1)
    return _llama_like(
        config,
        windows=(window,) * _num_layers(config),
        rope_options={
            "aliases": {"su": "longrope", "yarn": "longrope"},
            "default_original": 4096,
            "partial": True,
        },
    )


def _opt(config: ConfigJson) -> ModelSpec:
    config.refuse("layer_norm_elementwise_affine", True, "norms without weights are not supported")
    hidden_size = config.integer("hidden_size")
    pre = config.flag("do_layer_norm_before", True)
    bias = config.flag("enable_bias", True)
    positions = config.integer("max_position_embeddings")
    return _spec(
        config,
        hidden_size=hidden_size,
        embed_size=config.integer("word_embed_proj_dim", default=hidden_size),
        num_layers=_num_layers(config),
        num_heads=_num_heads(config),
        intermediate_size=config.integer("ffn_dim"),
        max_model_len=positions,
        positions="learned",
        num_learned_positions=positions,
        learned_position_offset=2,
        norm="layer",
        norm_eps=1e-5,
        norm_bias=True,
        norm_placement="pre" if pre else "post",
        final_norm=pre and not config.flag("_remove_final_layer_norm", False),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        activation=config.choice("activation_function", _PLAIN, "relu"),
        gated_mlp=False,
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
    )


def _gpt2(config: ConfigJson) -> ModelSpec:
    config.refuse("add_cross_attention", False, "cross attention is not supported")
    hidden_size = config.integer("n_embd", "hidden_size")
    num_layers = _num_layers(config, "n_layer")
    num_heads = _num_heads(config, "n_head")
    positions = config.integer("n_positions", "max_position_embeddings")
    scale = 1.0
    if config.flag("scale_attn_weights", True):
        scale = (hidden_size // num_heads) ** -0.5
    by_layer = config.flag("scale_attn_by_inverse_layer_idx", False)
    return _spec(
        config,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        intermediate_size=config.integer("n_inner", default=4 * hidden_size),
        max_model_len=positions,
        positions="learned",
        num_learned_positions=positions,
        norm="layer",
        norm_eps=config.number("layer_norm_epsilon", default=1e-5),
        norm_bias=True,
        layer_scales=tuple(scale / (i + 1 if by_layer else 1) for i in range(num_layers)),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        activation=config.choice("activation_function", _PLAIN, "gelu_new"),
        gated_mlp=False,
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
    )


def _bloom(config: ConfigJson) -> ModelSpec:
    config.refuse(
        "apply_residual_connection_post_layernorm", False, "supported: residuals before the norm"
    )
    hidden_size = config.integer("n_embed", "hidden_size")
    num_heads = _num_heads(config, "n_head")
    return _spec(
        config,
        hidden_size=hidden_size,
        num_layers=_num_layers(config, "n_layer"),
        num_heads=num_heads,
        intermediate_size=4 * hidden_size,
        max_model_len=config.integer("seq_length", default=_DEFAULT_MAX_MODEL_LEN),
        positions="alibi",
        alibi_slopes=alibi_slopes_bloom(num_heads),
        embed_norm=True,
        norm="layer",
        norm_eps=config.number("layer_norm_epsilon", default=1e-5),
        norm_bias=True,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        activation="gelu_tanh",
        gated_mlp=False,
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
    )


def _mpt(config: ConfigJson) -> ModelSpec:
    config.refuse("no_bias", True, "supported: MPT without biases")
    config.refuse("logit_scale", None, "a scale on the logits is not supported")
    attention = config.section("attn_config")
    attention.refuse("attn_type", "multihead_attention", "supported: multihead_attention")
    attention.refuse("alibi", True, "supported: ALiBi positions")
    attention.refuse("prefix_lm", False, "only causal attention is supported")
    attention.refuse("qk_ln", False, "norms on queries and keys are not supported for MPT")
    attention.refuse("rope", False, "supported: ALiBi positions")
    if config.get("norm_type") not in (None, "layernorm", "low_precision_layernorm"):
        raise config.error("norm_type", "supported: layernorm, low_precision_layernorm")
    hidden_size = config.integer("d_model", "hidden_size")
    num_heads = _num_heads(config, "n_heads")
    num_layers = _num_layers(config, "n_layers")
    scale = attention.number("softmax_scale", default=(hidden_size // num_heads) ** -0.5)
    bias_max = attention.number("alibi_bias_max", default=8.0)
    return _spec(
        config,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        intermediate_size=config.integer("expansion_ratio", default=4) * hidden_size,
        max_model_len=config.integer("max_seq_len", default=_DEFAULT_MAX_MODEL_LEN),
        positions="alibi",
        alibi_slopes=alibi_slopes_mpt(num_heads, bias_max),
        norm="layer",
        norm_eps=config.number("layer_norm_epsilon", default=1e-5),
        layer_scales=(scale,) * num_layers,
        qkv_clip=attention.optional_number("clip_qkv"),
        activation="gelu",
        gated_mlp=False,
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
    )


_LLAMA_NAMES: dict[str, str | tuple[str, ...]] = {
    "embed_tokens": "model.embed_tokens",
    "norm": "model.norm",
    "lm_head": "lm_head",
    "layer": "model.layers.{}",
    "input_norm": "input_layernorm",
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "o_proj": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "down_proj": "mlp.down_proj",
}
_GEMMA_NAMES = _LLAMA_NAMES | {
    "post_attn_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}
_PHI3_NAMES = _LLAMA_NAMES | {
    "qkv_proj": "self_attn.qkv_proj",
    "gate_up_proj": "mlp.gate_up_proj",
}
_OPT_NAMES: dict[str, str | tuple[str, ...]] = {
    "embed_tokens": "model.decoder.embed_tokens",
    "embed_positions": "model.decoder.embed_positions",
    "project_in": "model.decoder.project_in",
    "project_out": "model.decoder.project_out",
    "norm": "model.decoder.final_layer_norm",
    "lm_head": "lm_head",
    "layer": "model.decoder.layers.{}",
    "input_norm": "self_attn_layer_norm",
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o_proj": "self_attn.out_proj",
    "mlp_norm": "final_layer_norm",
    "up_proj": "fc1",
    "down_proj": "fc2",
}
_GPT2_NAMES: dict[str, str | tuple[str, ...]] = {
    "embed_tokens": "transformer.wte",
    "embed_positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "lm_head": "lm_head",
    "layer": "transformer.h.{}",
    "input_norm": "ln_1",
    "qkv_proj": "attn.c_attn",
    "o_proj": "attn.c_proj",
    "mlp_norm": "ln_2",
    "up_proj": "mlp.c_fc",
    "down_proj": "mlp.c_proj",
}
_BLOOM_NAMES: dict[str, str | tuple[str, ...]] = {
    "embed_tokens": "transformer.word_embeddings",
    "embed_norm": "transformer.word_embeddings_layernorm",
    "norm": "transformer.ln_f",
    "lm_head": "lm_head",
    "layer": "transformer.h.{}",
    "input_norm": "input_layernorm",
    "qkv_proj": "self_attention.query_key_value",
    "o_proj": "self_attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "up_proj": "mlp.dense_h_to_4h",
    "down_proj": "mlp.dense_4h_to_h",
}
_MPT_NAMES: dict[str, str | tuple[str, ...]] = {
    "embed_tokens": "transformer.wte",
    "norm": "transformer.norm_f",
    "lm_head": "lm_head",
    "layer": "transformer.blocks.{}",
    "input_norm": "norm_1",
    "qkv_proj": "attn.Wqkv",
    "o_proj": "attn.out_proj",
    "mlp_norm": "norm_2",
    "up_proj": "ffn.up_proj",
    "down_proj": "ffn.down_proj",
}
_ROTARY = (r".*\.rotary_emb\.inv_freq",)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(_llama, _LLAMA_NAMES, "model.", ignored=_ROTARY),
    "MistralForCausalLM": Family(_mistral, _LLAMA_NAMES, "model.", ignored=_ROTARY),
    "Qwen2ForCausalLM": Family(_qwen2, _LLAMA_NAMES, "model.", ignored=_ROTARY),
    "Qwen3ForCausalLM": Family(_qwen3, _LLAMA_NAMES, "model.", ignored=_ROTARY),
    "Gemma2ForCausalLM": Family(_gemma2, _GEMMA_NAMES, "model.", ignored=_ROTARY),
    "Gemma3ForCausalLM": Family(_gemma3, _GEMMA_NAMES, "model.", ignored=_ROTARY),
    "Phi3ForCausalLM": Family(_phi3, _PHI3_NAMES, "model.", ignored=_ROTARY),
    "OPTForCausalLM": Family(_opt, _OPT_NAMES, "model."),
    "GPT2LMHeadModel": Family(
        _gpt2,
        _GPT2_NAMES,
        "transformer.",
        linear="conv1d",
        ignored=(r".*\.attn\.(bias|masked_bias)",),  # the causal mask
    ),
    "BloomForCausalLM": Family(_bloom, _BLOOM_NAMES, "transformer.", qkv="by_head"),
    "MptForCausalLM": Family(_mpt, _MPT_NAMES, "transformer."),
}
