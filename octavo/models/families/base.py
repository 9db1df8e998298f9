"""Readers that several families share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from octavo.checkpoints.config_json import MOST_LAYERS, ConfigJson
from octavo.errors import ModelError
from octavo.models.blocks.embedding import EmbedSpec
from octavo.models.blocks.head import HeadSpec
from octavo.models.blocks.layer import LayerSpec
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.mlp import Activation, MLPSpec
from octavo.models.spec import ModelSpec

Family = Callable[[ConfigJson], ModelSpec]
"""Reader of a model's config.json; raises `ModelError` for unsupported values."""

# vLLM's assumption if a config names no context length.
DEFAULT_MAX_MODEL_LEN = 2048
ROTARY_TABLES = (r"(.*\.)?rotary_emb\.inv_freq",)
"""Patterns of the names of tables that some checkpoints store next to their weights."""
GATED: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu2": "relu2",
}
OUTER_FIELDS: tuple[str, ...] = ("architectures", "dtype", "torch_dtype", "tie_word_embeddings")
OUTER_FIELDS += ("quantization_config", "compression_config", "eos_token_id", "bos_token_id")
"""Fields of a model with towers that its text_config does not replace."""
_TOWERS = (
    r"(model\.)?(vision|visual|video|audio|image|multi_modal|connector|embed_vision|embed_audio|"
    r"encoder|projector|mm_projector|aligner|mlp1|mlp_AR)[^.]*(\..*)?"
)
"""Names of weights that process pictures or sound."""
PLAIN: dict[str, Activation] = {
    "relu": "relu",
    "relu2": "relu2",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

_DTYPES = {name: name for name in ("float32", "float16", "bfloat16", "float64")}
_DTYPES |= {f"torch.{name}": name for name in _DTYPES}
MOST_HEADS = 65536
"""Limit of heads, like `MOST_LAYERS`."""


def read_num_layers(config: ConfigJson, *names: str) -> int:
    """Return the number of layers: the first field of `names`, or num_hidden_layers."""
    return config.integer(*names, "num_hidden_layers", most=MOST_LAYERS)


def read_num_heads(config: ConfigJson, *names: str) -> int:
    """Return the number of query heads: the first field of `names`, or num_attention_heads."""
    return config.integer(*names, "num_attention_heads", most=MOST_HEADS)


@dataclass(frozen=True)
class Heads:
    """Heads of attention, and the size of their input."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    value_size: int | None = None
    """Number of elements of a head of values; None: `head_size`."""

    @classmethod
    def read(cls, config: ConfigJson) -> Heads:
        """Read the fields that most families have; raise as `of` does.

        Without head_dim, the size of a head is the hidden size divided by the heads, rounded down,
        as in transformers.
        """
        hidden_size, num_heads = config.integer("hidden_size"), read_num_heads(config)
        return cls.of(
            config,
            hidden_size,
            num_heads,
            config.optional_integer("num_key_value_heads", least=1),
            config.integer("head_dim", default=max(1, hidden_size // num_heads)),
        )

    @classmethod
    def of(
        cls,
        config: ConfigJson,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_size: int | None = None,
    ) -> Heads:
        """Return heads with defaults: `num_heads` heads of keys and values, equal head sizes.

        Raises:
            ModelError: the numbers do not divide each other.
        """
        num_kv_heads = num_kv_heads or num_heads
        if head_size is None:
            head_size = hidden_size // num_heads
            if hidden_size % num_heads:
                raise ModelError(
                    f"{config.where}: {num_heads} heads do not divide hidden size {hidden_size}; "
                    "download the file again."
                )
        if num_heads % num_kv_heads:
            raise config.error("num_key_value_heads", f"it must divide {num_heads} attention heads")
        return cls(hidden_size, num_heads, num_kv_heads, head_size)

    @property
    def size_of_values(self) -> int:
        """Number of elements of a head of values, and of a head's result."""
        return self.head_size if self.value_size is None else self.value_size

    @property
    def scale(self) -> float:
        """Usual factor on attention scores."""
        return 1 / math.sqrt(self.head_size)

    def qkv_proj(
        self,
        *modules: str,
        bias: bool,
        layout: Literal["rows", "conv1d", "by_group", "by_shard"] = "rows",
        shards: int = 1,
    ) -> LinearSpec:
        """Return the projection to queries, keys and values: three modules, or one fused module.

        `shards` is the number of parts of the heads, for the layout by_shard.
        """
        query, key = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        rows = (query, key, self.num_kv_heads * self.size_of_values)
        return LinearSpec(
            tuple(zip(modules, rows, strict=True))
            if len(modules) > 1
            else ((modules[0], sum(rows)),),
            self.hidden_size,
            bias,
            layout,
            groups=self.num_kv_heads if layout == "by_group" else shards,
            group_queries=self.num_heads // self.num_kv_heads if layout == "by_group" else 1,
        )

    def o_proj(
        self, module: str, *, bias: bool, layout: Literal["rows", "conv1d"] = "rows"
    ) -> LinearSpec:
        """Return the projection from the heads' results to the hidden size."""
        inputs = self.num_heads * self.size_of_values
        return LinearSpec(((module, self.hidden_size),), inputs, bias, layout)


def plain_mlp(
    up: str,
    down: str,
    hidden_size: int,
    inner_size: int,
    activation: Activation,
    *,
    bias: bool,
    layout: Literal["rows", "conv1d"] = "rows",
) -> MLPSpec:
    """Return an MLP of two modules with an activation between them."""
    return MLPSpec(
        LinearSpec(((up, inner_size),), hidden_size, bias, layout),
        LinearSpec(((down, hidden_size),), inner_size, bias, layout),
        activation,
        gated=False,
    )


def read_activation(
    config: ConfigJson, name: str, known: dict[str, Activation], default: str | None = None
) -> Activation:
    """Return an activation by its name in transformers."""
    return config.choice(name, known, default)


def read_windows(
    config: ConfigJson, layer_types: list[str], window: int | None
) -> tuple[int | None, ...]:
    """Return the window of each layer by its type in the config, or else in `layer_types`.

    Args:
        config: config.json.
        layer_types: type of each layer, for a config without the field layer_types.
        window: number of positions that a layer with sliding attention sees.

    Raises:
        ModelError: a type is unknown, or a layer has sliding attention and `window` is None.
    """
    if config.has("layer_types"):
        layer_types = config.get("layer_types")
        if not isinstance(layer_types, list) or len(layer_types) != read_num_layers(config):
            raise config.error("layer_types", "it must name one type for each layer")
    result: list[int | None] = []
    for kind in layer_types:
        if kind not in ("full_attention", "sliding_attention"):
            raise config.error("layer_types", "supported: full_attention, sliding_attention")
        if kind == "sliding_attention" and window is None:
            raise config.error("sliding_window", "layers with sliding attention need a length")
        result.append(window if kind == "sliding_attention" else None)
    return tuple(result)


def read_layer_types(
    config: ConfigJson, name: str, known: tuple[str, ...], default: list[str]
) -> list[str]:
    """Return the type of each layer from the field `name`, or else from `default`.

    Args:
        config: config.json.
        name: field with the list of types.
        known: types that the family supports.
        default: type of each layer, for a config without the field.

    Raises:
        ModelError: the field has another number of types, or an unknown type.
    """
    types = config.get(name)
    if types is None:
        types = default
    if not isinstance(types, list) or len(types) != len(default):
        raise config.error(name, f"it must name one type for each of {len(default)} layers")
    if any(kind not in known for kind in types):
        raise config.error(name, f"supported: {', '.join(known)}")
    return types


def visible(window: int | None, max_model_len: int) -> int | None:
    """Return `window`; None if it is as long as the context, since it then hides no token."""
    return window if window is not None and window < max_model_len else None


def read_lm_head(
    config: ConfigJson,
    embed: EmbedSpec,
    *,
    tied: bool,
    bias: bool = False,
    module: str = "lm_head",
) -> LinearSpec:
    """Return the LM head; `tied` is the default of the config's tie_word_embeddings."""
    if config.flag("tie_word_embeddings", tied):
        module = embed.module
    return LinearSpec(((module, embed.vocab_size),), embed.size, bias)


def model_spec(
    config: ConfigJson,
    *,
    embed: EmbedSpec,
    layers: Sequence[LayerSpec],
    head: HeadSpec,
    head_module: str = "lm_head",
    max_model_len: int,
    layer_names: str,
    bare_prefix: str,
    ignored: tuple[str, ...] = (),
) -> ModelSpec:
    """Make a spec from a family's parts and the fields that all families share.

    `head_module` is the checkpoint's module of a separate LM head. A tied model ignores its weight.
    """
    bos_token_ids = config.token_ids("bos_token_id")
    spec = ModelSpec(
        architecture=config.get("architectures")[0],
        vocab_size=embed.vocab_size,
        hidden_size=embed.hidden_size,
        max_model_len=max_model_len,
        eos_token_ids=tuple(dict.fromkeys(config.token_ids("eos_token_id"))),
        bos_token_id=bos_token_ids[0] if bos_token_ids else None,
        dtype=_dtype(config),
        generation_config={},
        embed=embed,
        layers=tuple(layers),
        head=head,
        layer_names=layer_names,
        bare_prefix=bare_prefix,
        ignored=ignored,
    )
    if spec.tied:
        return replace(spec, ignored=(*ignored, rf"{re.escape(head_module)}\.weight"))
    return spec


def text_part(read: Family) -> Family:
    """Return a reader of models with towers for pictures or sound, from one of text models.

    The models that it returns leave the towers out. `read_spec` has moved the fields of text_config
    to config.json itself.
    """

    def read_text_part(config: ConfigJson) -> ModelSpec:
        spec = read(config)
        tied = (r"language_model\.lm_head\.weight",) if spec.tied else ()
        return replace(
            spec,
            ignored=(*spec.ignored, _TOWERS, *tied),
            prefixes=(
                ("model.", "model.language_model."),
                ("model.", "model.text_model."),
                ("", "language_model."),
            ),
            left_out="pictures and sound",
        )

    return read_text_part


def _dtype(config: ConfigJson) -> str:
    for name in ("dtype", "torch_dtype"):
        if config.has(name):
            return config.choice(name, _DTYPES)
    return ""  # `read_spec` looks at the weights
