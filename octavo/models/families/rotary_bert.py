"""Encoders like BERT with rotary positions or ALiBi: GTE, Nomic BERT, and those of Jina, which may
be named XLM-RoBERTa."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from octavo.checkpoints.config_json import ConfigJson
from octavo.checkpoints.tasks import FACTORS, read_tasks
from octavo.kernels.routing import ExpertActivation, Routing
from octavo.layers.rope_spec import RopeSpec
from octavo.models.blocks.attention import Alibi
from octavo.models.families import base
from octavo.models.families.bert import BertLike, read_roberta
from octavo.models.families.classifiers import Layer, families
from octavo.models.families.experts import ExpertNames, experts, read_num_experts, read_top_k
from octavo.models.positions import alibi_slopes_bloom, read_rope
from octavo.models.spec import ModelSpec


def _rope(config: ConfigJson, theta: float) -> RopeSpec:
    config.refuse("position_embedding_type", "rope", "only rotary ones are supported")
    heads = base.Heads.read(config)
    length = config.integer("max_position_embeddings")
    return read_rope(config, head_size=heads.head_size, max_position=length, theta=theta)


def _gte(config: ConfigJson, prefix: str, theta: float) -> ModelSpec:
    """Read GTE, by its names in transformers (Gte, as Snowflake's) or in Alibaba's code (New)."""
    config.refuse("layer_norm_type", "layer_norm", "only layer norms are supported")
    config.refuse("pack_qkv", True, "only one matrix for queries, keys and values is supported")
    config.refuse("logn_attention_scale", False, "a scale by the length is not supported")
    scaling = config.section("rope_scaling")
    ntk = scaling.get("type", "rope_type") == "ntk"
    if ntk:  # with a fixed factor, in Alibaba's code
        scaling.refuse("mixed_b", None, "only scaling without it is supported")
        config = config.replaced("rope_scaling", None)
    rope = _rope(config, theta)
    if ntk:
        factor = scaling.positive("factor")
        stretched = factor ** (2 / rope.rotary_dim)
        rope = replace(rope, theta=rope.theta * factor, rope_type="linear", factor=stretched)
    spec = BertLike(
        prefix=prefix,
        qkv_modules=("attention.qkv_proj",),
        o_module="attention.o_proj",
        mlp_modules=("mlp.up_gate_proj", "mlp.down_proj"),
        norm_modules=("attn_ln", "mlp_ln"),
        gated=True,
        gate_layout="halves",
    ).read(config, rope)
    return replace(spec, max_model_len=config.integer("max_position_embeddings"))


def _nomic(config: ConfigJson) -> ModelSpec:
    """Read Nomic BERT, with the fields of transformers or of Nomic's code, also with experts."""
    if not config.has("n_embd"):
        config.refuse("num_experts", 0, "mixtures of experts need the fields of Nomic's code")
        return _nomic_like().read(config, _rope(config, 1000.0))
    for name in _NOMIC_OFF:
        config.refuse(name, False, "only models without it are supported")
    config.refuse("rotary_emb_fraction", 1.0, "only rotation of whole heads is supported")
    for new, old in _NOMIC.items():
        config = config.replaced(new, config.get(*old))
    activation = config.choice("activation_function", {"swiglu": "silu", "gelu": "gelu"})
    gated = activation == "silu"
    bias = config.flag("mlp_fc1_bias", True)
    config.refuse("mlp_fc2_bias", bias, "both projections have a bias, or none has")
    like = replace(
        _nomic_like(),
        attention_bias=config.flag("qkv_proj_bias", True),
        mlp_modules=_NOMIC_MLP if gated else ("mlp.fc1", "mlp.fc2"),
        gated=gated,
        gated_bias=bias,
        mlp_bias=bias,
    )
    config = config.replaced("hidden_act", activation)
    return _with_experts(like.read(config, _rope(config, 1000.0)), config)


_NOMIC_MLP = ("mlp.fc12", "mlp.fc11", "mlp.fc2")


def _nomic_like() -> BertLike:
    return BertLike(
        prefix="nomic_bert.",
        embed_norm="emb_ln",
        qkv_modules=("attn.Wqkv",),
        o_module="attn.out_proj",
        mlp_modules=_NOMIC_MLP,
        norm_modules=("norm1", "norm2"),
        layer_names="encoder.layers.{}.",
        attention_bias=False,
        mlp_bias=False,
        gated=True,
    )


def _with_experts(spec: ModelSpec, config: ConfigJson) -> ModelSpec:
    """Return the model with mixtures of experts in every n-th layer (Nomic Embed v2).

    Nussbaum and Duderstadt, "Training Sparse Mixture Of Experts Text Embedding Models", arXiv
    2502.07972, section 3.
    """
    every = config.integer("moe_every_n_layers", default=0, least=0)
    if not config.get("num_experts") or not every:
        return spec
    config.refuse("activation_function", "gelu", "only experts with GELU are supported")
    config.refuse("num_shared_experts", 0, "experts that all tokens use are not supported")
    config.refuse("expert_choice_router", False, "only tokens that choose experts are supported")
    config.refuse("ffn_div", 1, "only experts with the inner size n_inner are supported")
    known = {"False": False, "None": False, "0": False, "True": True, "1": True}
    asked = str(config.get("moe_normalize_expert_weights"))
    if asked not in known:
        raise config.error("moe_normalize_expert_weights", "supported: false, true")
    num_experts = read_num_experts(config, "num_experts")
    mixture = experts(
        config,
        Routing(read_top_k(config, num_experts, "moe_top_k"), "softmax", renormalize=known[asked]),
        num_experts=num_experts,
        inner=config.integer("intermediate_size"),
        names=ExpertNames(
            router="mlp.router.layer", experts="mlp.experts.mlp.", up=("w1",), down="w2"
        ),
        activation=ExpertActivation("gelu", gated=False),
        stacked="rows",
    )
    # An expert's second matrix is stored like its first one: [inner, hidden size].
    down = tuple(replace(linear, layout="conv1d") for linear in mixture.down)
    mixture = replace(mixture, down=down, bias="mlp.experts.bias")
    plain = spec.layers[0]
    layer = plain.with_blocks([plain.blocks[0], mixture])
    layers = [layer if i % every == 1 else plain for i in range(len(spec.layers))]
    return replace(spec, layers=tuple(layers))


_NOMIC_OFF: tuple[str, ...] = (
    "prenorm",
    "parallel_block",
    "use_rms_norm",
    "rotary_emb_interleaved",
    "causal",
    "rotary_emb_scale_base",
)
"""Features of Nomic's code that its models do not use."""
_NOMIC = {
    "hidden_size": ("n_embd",),
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    "intermediate_size": ("n_inner",),
    # The code scales positions by the length of a text that is longer than those of its training.
    "max_position_embeddings": ("max_trained_positions", "n_positions"),
    "layer_norm_eps": ("layer_norm_epsilon",),
    "rope_theta": ("rotary_emb_base",),
}
"""Fields of transformers, and those of Nomic's code."""


def _jina_v3(config: ConfigJson) -> ModelSpec:
    """Read jina-embeddings-v3 as transformers publishes it: without adapters."""
    return BertLike(
        prefix="roberta.",
        embed_norm="emb_ln",
        qkv_modules=("mixer.Wqkv",),
        o_module="mixer.out_proj",
        mlp_modules=("mlp.fc1", "mlp.fc2"),
        norm_modules=("norm1", "norm2"),
        layer_names="encoder.layers.{}.",
    ).read(config, _rope(config, 20000.0))


def read_flash(config: ConfigJson) -> ModelSpec:
    """Read XLM-RoBERTa with rotary positions as Jina publishes it, maybe with adapters of tasks."""
    config.refuse("position_embedding_type", "rotary", "only rotary ones are supported")
    config = config.replaced("position_embedding_type", "rope")
    spec = _jina_v3(config.replaced("rope_theta", config.get("rotary_emb_base") or 10000.0))
    if read_tasks(config):
        spec = replace(spec, ignored=(*spec.ignored, FACTORS))
    return spec


def _xlm_roberta(config: ConfigJson) -> ModelSpec:
    is_flash = config.get("position_embedding_type") == "rotary"
    return read_flash(config) if is_flash else read_roberta(config)


def _jina_v2(config: ConfigJson) -> ModelSpec:
    """Read jina-embeddings-v2, whose MLP has a gate with GELU."""
    config.refuse("position_embedding_type", "alibi", "only ALiBi is supported")
    config.refuse("feed_forward_type", "geglu", "only GEGLU is supported")
    gate_up: tuple[str, ...] = ("mlp.gated_layers",)
    if config.flag("split_gate", False):  # in GGUF
        gate_up = "mlp.gated_layers_w", "mlp.gated_layers_v"
    return BertLike(
        mlp_modules=(*gate_up, "mlp.wo"),
        norm_modules=("attention.output.LayerNorm", "mlp.layernorm"),
        gated=True,
    ).read(
        config.replaced("hidden_act", "gelu"),
        Alibi(alibi_slopes_bloom(base.read_num_heads(config))),
    )


_DENSE: tuple[Layer, ...] = (("classifier.dense", "tanh"),)
ARCHITECTURES = {
    **families("New", partial(_gte, prefix="new.", theta=1e4), (("new.pooler.dense", "tanh"),)),
    **families("Gte", partial(_gte, prefix="gte.", theta=1.6e5), (("gte.pooler.dense", "tanh"),)),
    **families("NomicBert", _nomic, (("nomic_bert.pooler.dense", "tanh"),)),
    **families("JinaBert", _jina_v2, (("bert.pooler.dense", "tanh"),)),
    **families("JinaEmbeddingsV3", _jina_v3, _DENSE, "classifier.out_proj"),
    **families("XLMRoberta", _xlm_roberta, _DENSE, "classifier.out_proj"),
}
