"""BERT, and the encoders that differ from it in names, positions and sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from octavo.checkpoints.config_json import ConfigJson
from octavo.layers.rope_spec import RopeSpec
from octavo.models.blocks.attention import Alibi, RelativeBias
from octavo.models.blocks.embedding import EmbedSpec, PositionsSpec, TokenTypesSpec
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.norm import LayerNormSpec
from octavo.models.blocks.pooler import DenseSpec, PoolerSpec
from octavo.models.families import base
from octavo.models.families.classifiers import Layer, families
from octavo.models.families.gpt import GPTLike
from octavo.models.spec import ModelSpec

_ACTIVATIONS = base.PLAIN | {"gelu_python": "gelu"}
_XLM_UNKNOWN = 3
"""Id of the unknown token in the vocabulary of XLM-RoBERTa, which config.json does not have."""
_HEADS = r"(cls|lm_head|predictions|sop_classifier|(vocab|generator|discriminator)_\w+)\..*"
"""Pattern of the names of heads that were trained with the encoder, and are not computed."""


@dataclass(frozen=True, kw_only=True)
class BertLike:
    """Differences of an encoder from BERT. The defaults are BERT's."""

    prefix: str = "bert."
    """Beginning of the names in checkpoints of a model with a head."""
    skips: bool = False
    """True if the table of positions begins with rows up to that of the padding token (RoBERTa)."""
    types: bool = True
    """True if there are token types."""
    qkv_modules: tuple[str, ...] = tuple(
        f"attention.self.{part}" for part in ("query", "key", "value")
    )
    o_module: str = "attention.output.dense"
    mlp_modules: tuple[str, ...] = ("intermediate.dense", "output.dense")
    norm_modules: tuple[str, str] = ("attention.output.LayerNorm", "output.LayerNorm")
    embed_norm: str = "embeddings.LayerNorm"
    layer_names: str = "encoder.layer.{}."
    """Names, without `prefix`."""
    attention_bias: bool = True
    mlp_bias: bool = True
    gated: bool = False
    gated_bias: bool = False
    gate_layout: Literal["rows", "halves"] = "rows"
    """Fields of `GPTLike`."""
    project: str | None = None
    """Module of a projection of the embedding, whose size is the field embedding_size."""
    bias: str | None = None
    """Table of relative positions, without `prefix`; the field relative_attention_num_buckets."""

    def read(self, config: ConfigJson, positions: RopeSpec | Alibi | None = None) -> ModelSpec:
        """Return the encoder.

        Args:
            config: config.json.
            positions: positions of attention; None: the embedding has learned ones.
        """
        config.refuse("is_decoder", False, "only encoders are supported")
        config.refuse("add_cross_attention", False, "only encoders are supported")
        if positions is None:
            config.refuse("position_embedding_type", "absolute", "only learned ones are supported")
        hidden, eps = config.integer("hidden_size"), config.number("layer_norm_eps")
        skipped = 0
        if self.skips:
            skipped = config.integer("pad_token_id", default=1, least=0) + 1
        rows = config.integer("max_position_embeddings", least=1 + skipped) - skipped
        embeddings, size, project = f"{self.prefix}embeddings.", hidden, None
        if self.project is not None:
            size = config.integer("embedding_size")
            module = f"{self.prefix}{self.project}"
            project = LinearSpec(((module, hidden),), size, bias=True)
        types = None
        if self.types:
            number = config.integer("type_vocab_size", least=0)
            if number:
                types = TokenTypesSpec(f"{embeddings}token_type_embeddings", number)
        size_of_head = config.optional_integer("head_dim", least=1)
        number = base.read_num_heads(config)
        heads = base.Heads.of(config, hidden, number, head_size=size_of_head)
        known = base.GATED if self.gated else _ACTIVATIONS
        return GPTLike(
            heads=heads,
            num_layers=base.read_num_layers(config),
            inner_size=config.integer("intermediate_size"),
            activation=base.read_activation(config, "hidden_act", known),
            eps=eps,
            positions=positions,
            max_position=rows,
            embed=EmbedSpec(
                f"{embeddings}word_embeddings",
                config.integer("vocab_size"),
                size,
                hidden,
                project=project,
                projects_sum=project is not None,
                positions=PositionsSpec(f"{embeddings}position_embeddings", rows, skipped)
                if positions is None
                else None,
                token_types=types,
                norm=LayerNormSpec(f"{self.prefix}{self.embed_norm}", size, eps),
            ),
            layer_names=self.prefix + self.layer_names,
            bare_prefix=self.prefix,
            qkv_modules=self.qkv_modules,
            o_module=self.o_module,
            mlp_modules=self.mlp_modules,
            norm_modules=self.norm_modules,
            final_norm=None,
            masks=(r".*position_ids", rf"({self.prefix})?pooler\..*", _HEADS),
            attention_bias=self.attention_bias,
            mlp_bias=self.mlp_bias,
            gated=self.gated,
            gated_bias=self.gated_bias,
            gate_layout=self.gate_layout,
            arrangement="post",
            bias=None
            if self.bias is None
            else RelativeBias(
                f"{self.prefix}{self.bias}",
                config.integer("relative_attention_num_buckets"),
                heads.num_heads,
            ),
            generates=False,
        ).read(config)


def read_roberta(config: ConfigJson) -> ModelSpec:
    """Read RoBERTa, XLM-RoBERTa or CamemBERT."""
    config.refuse("lora_adaptations", None, "adapters of tasks need rotary positions")
    return BertLike(prefix="roberta.", skips=True).read(config)


def _bge_m3(config: ConfigJson) -> ModelSpec:
    """Read BGE-M3 with its heads for weights of tokens and for vectors of tokens.

    Chen et al., "BGE M3-Embedding", arXiv 2402.03216. The architecture's name is vLLM's, for
    `hf_overrides`: the checkpoint names XLMRobertaModel.
    """
    spec = read_roberta(config)
    size, begin = spec.hidden_size, config.integer("bos_token_id", default=0, least=0)
    end, pad = (
        config.integer(f"{name}_token_id", default=default, least=0)
        for name, default in (("eos", 2), ("pad", 1))
    )
    weights, vectors = (
        DenseSpec(LinearSpec(((f"{file}.pt/linear", outputs),), size, bias=True, exact=True))
        for file, outputs in (("sparse_linear", 1), ("colbert_linear", size))
    )
    poolers = (
        PoolerSpec("embed", ("cls",), size, activation="normalize"),
        PoolerSpec(
            "token_embed", ("all",), size, (vectors,), activation="normalize", edges=(begin, None)
        ),
        PoolerSpec(
            "token_classify",
            ("all",),
            1,
            (weights,),
            activation="relu",
            edges=(begin, end),
            sparse=True,
            weightless=(begin, pad, end, _XLM_UNKNOWN),
        ),
    )
    return replace(spec, poolers=poolers)


def _distilbert(config: ConfigJson) -> ModelSpec:
    names = {"hidden_size": "dim", "intermediate_size": "hidden_dim", "hidden_act": "activation"}
    names |= {"num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}
    return BertLike(
        prefix="distilbert.",
        types=False,
        qkv_modules=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        o_module="attention.out_lin",
        mlp_modules=("ffn.lin1", "ffn.lin2"),
        norm_modules=("sa_layer_norm", "output_layer_norm"),
        layer_names="transformer.layer.{}.",
    ).read(config.filled({new: config.get(old) for new, old in names.items()}))


def _electra(config: ConfigJson) -> ModelSpec:
    projects = config.integer("embedding_size") != config.integer("hidden_size")
    project = "embeddings_project" if projects else None
    return BertLike(prefix="electra.", project=project).read(config)


def _mpnet(config: ConfigJson) -> ModelSpec:
    # transformers reads the padding token's id nowhere: it is 1.
    return BertLike(
        prefix="mpnet.",
        skips=True,
        types=False,
        qkv_modules=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        o_module="attention.attn.o",
        norm_modules=("attention.LayerNorm", "output.LayerNorm"),
        bias="encoder.relative_attention_bias",
    ).read(config.replaced("pad_token_id", 1))


def _albert(config: ConfigJson) -> ModelSpec:
    config.refuse("inner_group_num", 1, "only groups of one layer are supported")
    layer = "albert_layers.0."
    spec = BertLike(
        prefix="albert.",
        qkv_modules=tuple(f"{layer}attention.{part}" for part in ("query", "key", "value")),
        o_module=f"{layer}attention.dense",
        mlp_modules=(f"{layer}ffn", f"{layer}ffn_output"),
        norm_modules=(f"{layer}attention.LayerNorm", f"{layer}full_layer_layer_norm"),
        layer_names="encoder.albert_layer_groups.{}.",
        project="encoder.embedding_hidden_mapping_in",
    ).read(config)
    layers, groups = len(spec.layers), config.integer("num_hidden_groups")
    # As transformers computes it, with its rounding.
    shared = tuple(int(i / (layers / groups)) for i in range(layers))
    return replace(spec, shared_layers=shared)


_DENSE: tuple[Layer, ...] = (("classifier.dense", "tanh"),)
ARCHITECTURES = {
    **families("Bert", BertLike().read, (("bert.pooler.dense", "tanh"),)),
    **families("Roberta", read_roberta, _DENSE, "classifier.out_proj"),
    "BgeM3EmbeddingModel": _bge_m3,
    **families("Camembert", read_roberta, _DENSE, "classifier.out_proj"),
    **families("DistilBert", _distilbert, (("pre_classifier", "relu"),)),
    **families("Electra", _electra, (("classifier.dense", "gelu"),), "classifier.out_proj"),
    **families("MPNet", _mpnet, _DENSE, "classifier.out_proj"),
    **families("Albert", _albert, (("albert.pooler", "tanh"),)),
}
