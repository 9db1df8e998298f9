"""Parts of Gemma 3n and 4: layers of several sizes, shared caches, per-layer embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.kernels.routing import ExpertActivation, Routing
from octavo.models.blocks.altup import AltUpLayerSpec, StreamsSpec
from octavo.models.blocks.attention import AttentionSpec
from octavo.models.blocks.base import BlockSpec
from octavo.models.blocks.embedding import LayerInputsSpec
from octavo.models.blocks.layer import LayerSpec, Sublayer
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.mlp import MLPSpec, SparseMLPSpec
from octavo.models.blocks.norm import RMSNormSpec
from octavo.models.blocks.sum import SumSpec, Term
from octavo.models.families.experts import (
    ExpertNames,
    experts,
    read_gate,
    read_num_experts,
    read_top_k,
)
from octavo.models.families.llama import LlamaLike
from octavo.models.spec import ModelSpec


def read_sources(config: ConfigJson, windows: Sequence[int | None]) -> tuple[int | None, ...]:
    """Return for each layer the index of the layer whose keys and values it reads; None: its own.

    Each of the last num_kv_shared_layers layers reads those of one layer: the last one before all
    of them that has the same window.

    Raises:
        ModelError: no layer before them has the window.
    """
    first = len(windows) - config.integer("num_kv_shared_layers", default=0, least=0)
    last = {window: i for i, window in enumerate(windows[: max(0, first)])}
    if not set(windows) <= set(last):
        raise config.error(
            "num_kv_shared_layers", "of each type of layer, one before the last ones must remain"
        )
    return tuple(None if i < first else last[window] for i, window in enumerate(windows))


def read_own_fields(config: ConfigJson, count: int) -> list[ConfigJson]:
    """Return the fields of each layer in per_layer_config, by numbers such as "5" or "05"."""
    section, values = config.section("per_layer_config"), config.get("per_layer_config") or {}
    names = {int(name): name for name in values if name.isdecimal() and len(name) < 8}
    if len(names) < len(values) or max(names, default=0) >= count:
        raise config.error("per_layer_config", f"it must name layers, from 0 to {count - 1}")
    return [section.section(names.get(i, "")) for i in range(count)]


def read_layers(
    variant: LlamaLike, config: ConfigJson, sizes: Sequence[Mapping[str, int]]
) -> ModelSpec:
    """Read a model whose layers differ in size: `sizes` has the config's fields for each layer."""
    models: dict[tuple[tuple[str, int], ...], ModelSpec] = {}
    for fields in sizes:
        own = config
        for name, value in fields.items():
            own = own.replaced(name, value)
        key = tuple(fields.items())
        models[key] = models[key] if key in models else variant.read(own)
    of_layers = [models[tuple(fields.items())] for fields in sizes]
    layers = tuple(model.layers[i] for i, model in enumerate(of_layers))
    return replace(of_layers[0], layers=layers)


def with_sources(
    spec: ModelSpec,
    config: ConfigJson,
    sources: Sequence[int | None],
    *,
    values_are_keys: Sequence[bool],
) -> ModelSpec:
    """Return the model with normed values, and with layers that read the keys and values of others.

    Args:
        spec: the model.
        config: its config.
        sources: see `read_sources`. The checkpoint's keys and values of a layer with a source are
            ignored.
        values_are_keys: for each layer, True if its own values are its keys.
    """
    made: dict[tuple[int, int | None, bool], LayerSpec] = {}
    layers, eps = [], config.number("rms_norm_eps")
    for layer, source, same in zip(spec.layers, sources, values_are_keys, strict=True):
        key = id(layer), source, same
        if key not in made:
            attention, mlp = layer.blocks
            assert isinstance(attention, AttentionSpec)
            if source is not None and not _same_heads(attention, spec.layers[source].blocks[0]):
                raise config.error(
                    "num_kv_shared_layers",
                    f"the heads of layer {source}, which others read, differ",
                )
            changed = _read_source(attention, source, eps, same)
            made[key] = layer.with_blocks([changed, mlp])
        layers.append(made[key])
    numbers = "|".join(str(i) for i, source in enumerate(sources) if source is not None)
    unused = rf".*layers\.({numbers})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*"
    ignored = (*spec.ignored, unused) if numbers else spec.ignored
    return replace(spec, layers=tuple(layers), ignored=ignored)


def _same_heads(one: AttentionSpec, other: BlockSpec) -> bool:
    assert isinstance(other, AttentionSpec)
    return (one.num_kv_heads, one.head_size) == (other.num_kv_heads, other.head_size)


def _read_source(
    attention: AttentionSpec, source: int | None, eps: float, same: bool
) -> AttentionSpec:
    number = 1 if source is not None else 2 if same else 3
    proj = replace(attention.qkv_proj, modules=attention.qkv_proj.modules[:number])
    if source is not None:
        return replace(attention, qkv_proj=proj, k_norm=None, source=source)
    v_norm = RMSNormSpec(None, attention.head_size, eps)
    return replace(attention, qkv_proj=proj, v_norm=v_norm, values_are_keys=same)


def read_of_layers(
    config: ConfigJson, name: str, count: int, default: list[float] | None = None
) -> Sequence[float]:
    """Return a number for each layer from a field with one number, or with a list of them."""
    if default is not None and not config.has(name):
        return default
    if isinstance(config.get(name), list):
        return config.numbers(name, count)
    return [config.number(name)] * count


def with_sparsity(spec: ModelSpec, config: ConfigJson, shares: Sequence[float]) -> ModelSpec:
    """Return the model with sparse gates in the layers with a share above 0."""
    made: dict[tuple[int, float], LayerSpec] = {}
    layers = []
    for layer, share in zip(spec.layers, shares, strict=True):
        if not 0 <= share < 1:
            raise config.error(
                "activation_sparsity_pattern", "each share must be 0 or more, below 1"
            )
        key = id(layer), share
        if share and key not in made:
            attention, mlp = layer.blocks
            assert isinstance(mlp, MLPSpec)
            gate, up = (replace(mlp.up, modules=(module,)) for module in mlp.up.modules)
            sparse = SparseMLPSpec(
                up, mlp.down, mlp.activation, gated=False, gate=gate, sparsity=share
            )
            made[key] = layer.with_blocks([attention, sparse])
        layers.append(made.get(key, layer))
    return replace(spec, layers=tuple(layers))


def with_streams(spec: ModelSpec, config: ConfigJson) -> ModelSpec:
    """Return the model with several residual streams, which each layer predicts and corrects."""
    count = config.integer("altup_num_inputs", least=2, most=64)
    active = config.integer("altup_active_idx", least=0, most=count - 1)
    hidden, rank = spec.hidden_size, config.integer("laurel_rank")
    eps = config.number("rms_norm_eps")
    whole = [
        tuple(LinearSpec(((f"model.{name}.{i}", hidden),), hidden) for i in range(count - 1))
        for name in ("altup_projections", "altup_unembed_projections")
    ]

    def layer(old: LayerSpec) -> AltUpLayerSpec:
        return AltUpLayerSpec(
            old.sublayers,
            num_streams=count,
            active=active,
            router_norm=RMSNormSpec("altup.router_norm", hidden, eps),
            router=LinearSpec((("altup.modality_router", count),), hidden),
            predict=LinearSpec((("altup.prediction_coefs", count * count),), count),
            correct=LinearSpec((("altup.correction_coefs", count),), count),
            correct_scale="altup.correct_output_scale",
            laurel=(
                LinearSpec((("laurel.linear_left", rank),), hidden),
                LinearSpec((("laurel.linear_right", hidden),), rank),
            ),
            laurel_norm=RMSNormSpec("laurel.post_laurel_norm", hidden, eps),
        )

    layers = tuple(layer(old) for old in spec.layers)
    return replace(spec, layers=layers, streams=StreamsSpec(*whole))


def with_experts(spec: ModelSpec, config: ConfigJson) -> ModelSpec:
    """Return the model with experts beside the MLP of each layer; each has norms of its own."""
    num_experts = read_num_experts(config, "num_experts")
    hidden, eps = spec.hidden_size, config.number("rms_norm_eps")
    block = experts(
        config,
        Routing(read_top_k(config, num_experts, "top_k_experts"), "softmax", renormalize=True),
        num_experts=num_experts,
        inner=config.integer("moe_intermediate_size"),
        names=ExpertNames(router="router.proj", experts="experts.", up=("gate_up_proj",)),
        activation=ExpertActivation(read_gate(config, "hidden_activation", "gelu_pytorch_tanh")),
        stacked="rows",
    )
    router = replace(
        block.router,
        norm=RMSNormSpec("router", hidden, eps, tensor="scale"),
        scale=hidden**-0.5,
        factors="router.per_expert_scale",
    )

    block = replace(
        block, router=router, norm=RMSNormSpec("pre_feedforward_layernorm_2", hidden, eps)
    )
    out_norms = [RMSNormSpec(f"post_feedforward_layernorm_{i}", hidden, eps) for i in (1, 2)]
    sparse = Term("sparse", block, out_norm=out_norms[1])
    made: dict[int, LayerSpec] = {}
    for layer in spec.layers:
        if id(layer) not in made:
            mixer, mlp, *others = layer.sublayers
            dense = Term("dense", mlp.block, norm=mlp.norm, out_norm=out_norms[0])
            both = replace(mlp, block=SumSpec((dense, sparse)), norm=None)
            made[id(layer)] = replace(layer, sublayers=(mixer, both, *others))
    return replace(spec, layers=tuple(made[id(layer)] for layer in spec.layers))


def with_layer_inputs(spec: ModelSpec, config: ConfigJson, *, most_without: int = 0) -> ModelSpec:
    """Return the model with per-layer embeddings, if the config has them.

    Args:
        spec: the model.
        config: its config.
        most_without: largest number of tokens that may have no row in the table.
    """
    size = config.integer("hidden_size_per_layer_input", default=0, least=0)
    if not size:
        return spec
    rows, eps = config.integer("vocab_size_per_layer_input"), config.number("rms_norm_eps")
    if rows < spec.vocab_size - most_without:
        raise config.error("vocab_size_per_layer_input", "each token needs a row")
    hidden, count = spec.hidden_size, len(spec.layers)
    inputs = LayerInputsSpec(
        "model.embed_tokens_per_layer",
        rows,
        spec.vocab_size,
        count,
        size,
        size**0.5,
        LinearSpec((("model.per_layer_model_projection", count * size),), hidden),
        # The model divides the projection by sqrt(hidden). The norm cancels this factor, except in
        # its eps: so eps is multiplied by the square.
        RMSNormSpec("model.per_layer_projection_norm", size, hidden * eps),
    )
    norm = RMSNormSpec("post_per_layer_input_norm", hidden, eps)
    up = LinearSpec((("per_layer_input_gate", size),), hidden)
    down = LinearSpec((("per_layer_projection", hidden),), size)
    layers = []
    for i, layer in enumerate(spec.layers):
        mlp = layer.blocks[1]
        assert isinstance(mlp, MLPSpec)
        if mlp.activation not in ("gelu", "gelu_tanh"):
            raise config.error("hidden_activation", "supported: gelu, gelu_pytorch_tanh")
        block = MLPSpec(up, down, mlp.activation, gated=False, layer_input=i)
        added = Sublayer("layer_input", block, out_norm=norm)
        layers.append(replace(layer, sublayers=(*layer.sublayers, added)))
    embed = replace(spec.embed, layer_inputs=inputs)
    return replace(spec, layers=tuple(layers), embed=embed)
