"""Parts that families with mixtures of experts share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.checkpoints.config_json import ConfigJson
from octavo.kernels.routing import ExpertActivation, Gate, Routing, Score
from octavo.models.blocks.base import BlockSpec
from octavo.models.blocks.experts import ExpertsSpec, RouterSpec
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.mlp import MLPSpec
from octavo.models.families.base import (
    GATED,
    read_activation,
    read_layer_types,
    read_num_layers,
)
from octavo.models.forms import quant_method

MOST_EXPERTS = 4096
_MOST_IN_ALL = 2**16
"""Limit of the experts of all layers, since each is described before a weight is read."""
GATES: dict[str, Gate] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "relu2": "relu2",
}


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """Modules of a layer's experts in the checkpoint. The defaults are Qwen's."""

    router: str = "mlp.gate"
    experts: str = "mlp.experts.{}."
    """Prefix of expert {}."""
    up: tuple[str, ...] = ("gate_proj", "up_proj")
    """Projections up of an expert: gate and up, or one module."""
    down: str = "down_proj"
    shared: str = "mlp.shared_expert."
    """Prefix of the block that all tokens use."""
    shared_up: tuple[str, ...] = ("gate_proj", "up_proj")
    shared_down: str = "down_proj"
    shared_gate: str | None = None
    choice_bias: str | None = None
    """Tensor of the router's bias for the choice."""


def has_modules_of_experts(config: ConfigJson) -> bool:
    """Return True if each expert has modules of its own, in a family whose experts are stacked.

    Tools that quantize linear modules divide the stacks into modules. Only mxfp4 keeps the stacks.
    """
    return quant_method(config) not in (None, "mxfp4") or config.flag("split_experts", False)


def read_gate(config: ConfigJson, field: str, default: str | None = None) -> Gate:
    """Return the activation of experts with a gate, which `field` names."""
    return GATES[read_activation(config, field, GATED, default)]


def read_num_experts(config: ConfigJson, *names: str) -> int:
    """Return the number of routed experts: the first field of `names` that the config has.

    Raises:
        ModelError: all layers together would have too many experts.
    """
    count = config.integer(*names, most=MOST_EXPERTS)
    if config.has("num_hidden_layers"):
        layers = config.integer("num_hidden_layers")
    else:  # Nemotron-H
        kinds = config.get("layers_block_type", "layer_types", "hybrid_override_pattern")
        layers = len(kinds) if isinstance(kinds, (list, str)) else 0
    if layers * count > _MOST_IN_ALL:
        raise config.error(
            next(name for name in names if config.has(name)),
            f"{layers} layers may have {_MOST_IN_ALL} experts together",
        )
    return count


def read_top_k(config: ConfigJson, num_experts: int, *names: str) -> int:
    """Return the number of a token's experts: the first field of `names`.

    Raises:
        ModelError: a token would use more experts than there are.
    """
    top_k = config.integer(*names)
    if top_k > num_experts:
        raise config.error(names[0], f"it must be at most {num_experts}, the number of experts")
    return top_k


def experts(
    config: ConfigJson,
    routing: Routing,
    *,
    num_experts: int,
    inner: int,
    names: ExpertNames = ExpertNames(),
    shared_inner: int = 0,
    bias: bool = False,
    router_bias: bool = False,
    activation: ExpertActivation | None = None,
    stacked: Literal["none", "rows", "conv1d"] = "none",
    alternate: bool = False,
    on_input: bool = False,
) -> ExpertsSpec:
    """Return the mixture of experts of a layer.

    Args:
        config: the model's config.
        routing: rules of the router.
        num_experts: number of routed experts.
        inner: inner size of a routed expert.
        names: modules in the checkpoint.
        shared_inner: inner size of the block that all tokens use; 0: no such block.
        bias: True if the experts' projections have biases.
        router_bias: True if the router's projection has a bias.
        activation: activation of the experts; None: gated, by hidden_act.
        stacked: "rows" or "conv1d" if a tensor has the weights of all experts, see
            `LinearSpec.expert`.
        alternate: see `LinearSpec.alternate`.
        on_input: see `RouterSpec`.
    """
    hidden = config.integer("hidden_size")
    act = activation or ExpertActivation(read_gate(config, "hidden_act"))
    rows = (2 if act.gated else 1) * inner // len(names.up)

    def linear(
        index: int, modules: tuple[str, ...], rows: int, inputs: int, *, up: bool
    ) -> LinearSpec:
        prefix = names.experts.format(index)
        return LinearSpec(
            tuple((f"{prefix}{module}", rows) for module in modules),
            inputs,
            bias,
            "rows" if stacked == "none" else stacked,
            expert=None if stacked == "none" else (index, num_experts),
            alternate=alternate and up,
        )

    shared = None
    if shared_inner:
        assert act.gated
        shared = MLPSpec(
            LinearSpec(
                tuple(
                    (f"{names.shared}{module}", 2 * shared_inner // len(names.shared_up))
                    for module in names.shared_up
                ),
                hidden,
            ),
            LinearSpec(((f"{names.shared}{names.shared_down}", hidden),), shared_inner),
            read_activation(config, "hidden_act", GATED),
            gated=True,
        )
    return ExpertsSpec(
        RouterSpec(
            LinearSpec(((names.router, num_experts),), hidden, router_bias, exact=True),
            routing,
            names.choice_bias,
            on_input=on_input,
        ),
        tuple(linear(i, names.up, rows, hidden, up=True) for i in range(num_experts)),
        tuple(linear(i, (names.down,), hidden, inner, up=False) for i in range(num_experts)),
        act,
        shared=shared,
        shared_gate=None
        if names.shared_gate is None
        else LinearSpec(((names.shared_gate, 1),), hidden, exact=True),
    )


def read_groups(config: ConfigJson, num_experts: int, top_k: int, *, least: int) -> tuple[int, int]:
    """Return the number of groups of experts, and of groups that a token uses.

    Args:
        config: the model's config.
        num_experts: number of experts.
        top_k: number of a token's experts.
        least: least number of experts of a group, if there are several.

    Raises:
        ModelError: the groups do not fit the numbers of experts.
    """
    groups = config.integer("n_group", default=1)
    if num_experts % groups or (groups > 1 and num_experts < least * groups):
        raise config.error(
            "n_group", f"it must divide {num_experts} experts into groups of at least {least}"
        )
    top_groups = config.integer("topk_group", default=1, most=groups)
    if top_k > top_groups * (num_experts // groups):
        raise config.error("topk_group", f"its groups have fewer than {top_k} experts")
    return groups, top_groups


GROUPED = ExpertNames(shared="mlp.shared_experts.", choice_bias="mlp.gate.e_score_correction_bias")
"""Names of GLM's and dots' experts."""


def read_grouped_experts(
    config: ConfigJson,
    names: ExpertNames = GROUPED,
    activation: ExpertActivation | None = None,
    *,
    score: Score = "sigmoid",
) -> ExpertsSpec:
    """Return experts that are chosen by scores, with or without a bias, from the best groups.

    With `activation` the result has no shared block: the caller adds it.

    Source: DeepSeek-V3, arXiv 2412.19437, section 2.1.2.

    Raises:
        ModelError: the groups do not fit the numbers of experts.
    """
    num_experts = read_num_experts(config, "n_routed_experts", "num_experts")
    top_k = read_top_k(config, num_experts, "num_experts_per_tok")
    groups, top_groups = read_groups(config, num_experts, top_k, least=2)
    inner = config.integer("moe_intermediate_size")
    shared = config.integer("n_shared_experts", "num_shared_experts", default=0, least=0)
    return experts(
        config,
        Routing(
            top_k,
            score,
            groups=groups,
            top_groups=top_groups,
            group_best=min(2, num_experts // groups),
            renormalize=config.flag("norm_topk_prob", True),
            epsilon=1e-20,
            scale=config.number("routed_scaling_factor", default=1.0),
        ),
        num_experts=num_experts,
        inner=inner,
        names=names,
        shared_inner=shared * inner if activation is None else 0,
        activation=activation,
    )


def read_biased_experts(config: ConfigJson, names: ExpertNames, *, scale: float) -> ExpertsSpec:
    """Return experts that are chosen by sigmoid scores with a bias; `scale` as in `Routing`."""
    num_experts = read_num_experts(config, "num_experts", "num_local_experts")
    top_k = read_top_k(config, num_experts, "num_experts_per_tok")
    inner = config.integer("moe_intermediate_size")
    shared = config.integer("num_shared_experts", default=0, least=0)
    return experts(
        config,
        Routing(top_k, "sigmoid", renormalize=True, epsilon=1e-20, scale=scale),
        num_experts=num_experts,
        inner=inner,
        names=names,
        shared_inner=shared * inner,
    )


def read_sparse_layers(
    config: ConfigJson,
    block: BlockSpec,
    *,
    dense: int | None = None,
    default: list[str] | None = None,
) -> tuple[BlockSpec | None, ...]:
    """Return the experts of each layer by mlp_layer_types; None for layers with a dense block.

    Args:
        config: the model's config.
        block: the experts.
        dense: number of first layers with a dense block, for a config without mlp_layer_types;
            None: the field first_k_dense_replace.
        default: the types of the layers of such a config, "dense" or "sparse", in place of `dense`.
    """
    if default is None:
        if dense is None:
            dense = config.integer("first_k_dense_replace", default=0, least=0)
        default = ["dense" if i < dense else "sparse" for i in range(read_num_layers(config))]
    types = read_layer_types(config, "mlp_layer_types", ("dense", "sparse"), default)
    return tuple(block if kind == "sparse" else None for kind in types)


def read_draft_layers(config: ConfigJson, name: str = "num_nextn_predict_layers") -> str:
    """Return the pattern of the names of the layers after the last, which predict drafts.

    Args:
        config: the model's config.
        name: field with the number of these layers; at least one is assumed.
    """
    first, count = read_num_layers(config), config.integer(name, default=1, least=0, most=4096)
    numbers = "|".join(str(first + i) for i in range(max(count, 1)))
    return rf"model\.layers\.({numbers})\..*"


def read_indices(config: ConfigJson, name: str) -> tuple[int, ...]:
    """Return a field with a list of layers' indices; absent: none.

    Raises:
        ModelError: the field is no list of integers.
    """
    values = config.get(name) or []
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise config.error(name, "it must be a list of indices of layers")
    return tuple(values)
