"""Specification of a mixture of experts: a router, and blocks of which a token uses few.

Shazeer et al., "Outrageously large neural networks", 2017; Fedus et al., "Switch transformers",
2021.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from octavo.checkpoints.base import Source
from octavo.errors import ConfigError, ModelError
from octavo.kernels.routing import ExpertActivation, Routing
from octavo.models.blocks.base import BlockSpec, LargestStep
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.mlp import MLPSpec
from octavo.models.blocks.norm import RMSNormSpec
from octavo.models.weights import ExpertOf, Names, Weight
from octavo.quantization.base import WeightForm
from octavo.quantization.plain import PLAIN
from octavo.system.distributed import Rank
from octavo.system.tensor import from_numpy

if TYPE_CHECKING:
    from octavo.attention.base import AttentionBackend
    from octavo.kernels.weights import StackedWeight
    from octavo.layers.experts import Experts
    from octavo.models.blocks.base import Parts

_MOST_ROWS = 384
"""kMostRows in csrc/experts.cpp."""


@dataclass(frozen=True)
class RouterSpec:
    """Choice of a token's experts."""

    proj: LinearSpec
    """Projection to the logits of all experts."""
    routing: Routing
    choice_bias: str | None = None
    """Tensor of the checkpoint that is added to the scores for the choice: [experts]."""
    choice_bias_is_row: bool = False
    """True if that tensor is a matrix with one row: [1, experts]."""
    factors: str | None = None
    """Tensor of the checkpoint with a factor of each expert's weight: [experts]."""
    norm: RMSNormSpec | None = None
    """Norm of the router's input."""
    scale: float = 1.0
    """Factor of the logits."""
    on_input: bool = False
    """True if weights are factors of the experts' inputs, not of their results (Llama 4)."""

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the weights of the norm and the projection, and the numbers of each expert."""
        if self.norm is not None:
            yield from self.norm.weights(names.of("norm"))
        yield from self.proj.weights(names.of("proj"))
        for own, name in (("choice_bias", self.choice_bias), ("factors", self.factors)):
            if name is not None:
                source = Source(f"{names.checkpoint}{name}", (self.num_experts,))
                if own == "choice_bias" and self.choice_bias_is_row:
                    source = replace(source, shape=(1, self.num_experts), index=0)
                shape = (self.num_experts,)
                yield Weight(f"{names.own}{own}", "vector", shape, (source,), dtype="float32")

    @property
    def num_experts(self) -> int:
        """Number of experts."""
        return self.proj.outputs


@dataclass(frozen=True)
class ExpertsSpec(BlockSpec):
    """Mixture of experts: the sum of the chosen experts' results, times their weights.

    An expert is down(act(up(x))), or down(act(gate(x)) * up(x)).
    """

    router: RouterSpec
    up: tuple[LinearSpec, ...]
    """Projection up of each expert; if gated: gate and up, stacked. All have one shape."""
    down: tuple[LinearSpec, ...]
    activation: ExpertActivation
    shared: MLPSpec | None = None
    """Block that all tokens use in addition."""
    norm: RMSNormSpec | None = None
    """Norm of the experts' input; the router reads the input before this norm (Gemma 4)."""
    shared_gate: LinearSpec | None = None
    """Projection to one number, whose sigmoid is a factor of the shared block's result."""
    latent: tuple[LinearSpec, LinearSpec] | None = None
    """Projections to the experts' input and from the sum of their results (Nemotron-H); the router
    and the shared block read the hidden state. Each rank computes both projections as a whole."""
    bias: str | None = None
    """Tensor of the checkpoint that is added to the sum of the results: [hidden size] (Nomic)."""
    own: tuple[int, ...] | None = None
    """Experts that a rank has, in ascending order, if ranks divide the experts; None: all."""
    changed: tuple[int, ...] | None = None
    """Experts whose changes by adapters the rank computes, if ranks divide the experts; they never
    move. None: all."""
    exchanged: bool = False
    """True if the other experts are those of other engines; see `ExpertExchange`."""

    def __post_init__(self) -> None:
        """Check that one form describes all experts of a product.

        Raises:
            ModelError: the experts' weights have several forms.
        """
        for stack in (self.up, self.down):
            found: dict[WeightForm, str] = {}
            for linear in stack:
                forms = linear.forms or (PLAIN,) * len(linear.modules)
                for form, (module, _) in zip(forms, linear.modules, strict=True):
                    found.setdefault(form, module)
            if len(found) > 1:
                each = ", ".join(f"{form.name} in {module}" for form, module in found.items())
                raise ModelError(
                    f"the experts of a layer have weights of several forms ({each}), which Octavo "
                    "does not support; correct the fields that name modules, or use a checkpoint "
                    "with one form."
                )

    @property
    def inner(self) -> int:
        """Inner size of an expert."""
        return self.down[0].inputs

    @property
    def hidden(self) -> int:
        """Size of an expert's result."""
        return self.down[0].whole_outputs

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the weights of the router, then those of the experts, then the shared ones."""
        yield from self.router.weights(names.of("router"))
        if self.norm is not None:
            yield from self.norm.weights(names.of("norm"))
        for name, projection in zip(("to_latent", "from_latent"), self.latent or (), strict=False):
            yield from projection.weights(names.of(name))
        count, active = len(self.up), self.router.routing.top_k
        for index in range(count) if self.own is None else self.own:
            expert = ExpertOf(names.own, index, count, active)
            for name, stack in (("up", self.up), ("down", self.down)):
                linear = self._without_bias(stack[index])
                for weight in linear.weights(names.of(f"experts.{index}.{name}")):
                    yield replace(weight, expert=expert)
        for name, stack in (("up_bias", self.up), ("down_bias", self.down)):
            if stack[0].bias:
                biases = [
                    w for linear in stack for w in linear.weights(names) if w.kind == "vector"
                ]
                sources = tuple(source for bias in biases for source in bias.sources)
                shape = (len(stack) * biases[0].shape[0],)
                whole = biases[0].whole_rows  # rows of one source, which is one expert's bias
                yield Weight(f"{names.own}{name}", "vector", shape, sources, whole)
        if self.bias is not None:
            source = Source(f"{names.checkpoint}{self.bias}", (self.hidden,))
            yield Weight(f"{names.own}bias", "vector", (self.hidden,), (source,))
        if self.shared is not None:
            yield from self.shared.weights(names.of("shared"))
        if self.shared_gate is not None:
            yield from self.shared_gate.weights(names.of("shared_gate"))

    @staticmethod
    def _without_bias(linear: LinearSpec) -> LinearSpec:
        """Return the projection without its bias: the biases of all experts are one tensor."""
        return replace(linear, bias=False) if linear.bias else linear

    def scratch_nbytes(self, backend: AttentionBackend, largest: LargestStep) -> int:
        """Return the bytes of the rows of one expert that each thread multiplies.

        These are rows of x, results of gate and up in float32, and the product's own memory; see
        csrc/experts.cpp.
        """
        from octavo import _native

        tokens = _MOST_ROWS if self.exchanged else largest.num_tokens  # with other engines' tokens
        rows, widest = min(tokens, _MOST_ROWS), max(self.hidden, self.inner)
        numbers = rows * (self.hidden + self.up[0].outputs)
        return largest.num_threads * (4 * numbers + _native.linear_scratch(rows, widest, 1))

    def split(self, rank: Rank) -> ExpertsSpec:
        """Return the block that computes a rank's part.

        The rank computes its inner columns of all experts and, from the inner columns of all ranks,
        some columns of the result. With `Rank.splits_experts`, it computes some experts as a whole
        instead. Each rank computes the whole router.
        """
        shared = None if self.shared is None else self.shared.split(replace(rank, reduces=False))
        if rank.splits_experts:
            changed = replace(rank, redundant_experts=0).experts(len(self.up))
            return replace(self, own=rank.experts(len(self.up)), changed=changed, shared=shared)
        part = begin, end = rank.share(self.inner)
        both = (part, (self.inner + begin, self.inner + end)) if self.activation.gated else (part,)
        outputs = rank.share(self.hidden)
        return replace(
            self,
            up=tuple(linear.split(*both) for linear in self.up),
            down=tuple(linear.split(outputs) for linear in self.down),
            shared=shared,
        )

    def split_experts(self, rank: Rank) -> ExpertsSpec:
        """Return the block with the share of the experts of a rank of several engines.

        Raises:
            ConfigError: there are fewer experts than ranks.
        """
        if rank.size > len(self.up):
            raise ConfigError(
                f"enable_expert_parallel divides the {len(self.up)} experts of a layer among all "
                f"processes of the data_parallel_size engines, and these are {rank.size}; lower "
                "data_parallel_size or tensor_parallel_size, or leave out enable_expert_parallel."
            )
        return replace(self, own=rank.experts(len(self.up)), exchanged=True)

    def for_adapters(self) -> ExpertsSpec:
        """Implement `BlockSpec`."""
        return replace(self, own=self.changed)

    def build(self, parts: Parts, caches: tuple[int, ...]) -> Experts:
        """Implement `BlockSpec`."""
        from octavo.layers.expert_adapter import ApartRows
        from octavo.layers.experts import Divided, Experts, Router

        ops, router, own = parts.ops, self.router, parts.of("router")
        have = range(len(self.up)) if self.own is None else frozenset(self.own)

        def stack(name: str) -> StackedWeight:
            weights = [
                parts.of(f"experts.{i}.{name}").linear("weight") if i in have else None
                for i in range(len(self.up))
            ]
            bias = parts.tensor(f"{name}_bias") if parts.has(f"{name}_bias") else None
            bias = None if bias is None else bias.view((len(self.up), -1))
            return ops.stack(weights, bias, parts.cached_experts)

        latent = None
        if self.latent is not None:
            to_latent, from_latent = self.latent
            latent = (
                to_latent.build(parts.of("to_latent")),
                from_latent.build(parts.of("from_latent")),
            )
        top_k, divided = router.routing.top_k, None
        if self.own is not None and not self.exchanged:
            rows = parts.columns("expert_rows", top_k * self.hidden, (0, top_k * self.hidden))
            divided = Divided(rows=rows)
        elif self.up[0].parts is not None:
            assert self.down[0].parts is not None
            inner = parts.columns("expert_inner", top_k * self.inner, (0, top_k * self.inner))
            divided = Divided(
                inner=(inner, self.up[0].parts[0]),
                result=parts.columns("expert_result", self.hidden, self.down[0].parts[0]),
            )
        up, down = self.up[0], self.down[0]
        changed = range(len(self.up)) if self.changed is None else self.changed
        adapted = parts.adapted_experts(
            changed, len(self.up), (up.each_outputs, up.inputs), (down.each_outputs, down.inputs)
        )
        exchange = parts.exchange if self.exchanged else None
        if exchange is not None:
            more = () if adapted is None else (up.outputs, self.inner)
            exchange.reserve(self.hidden, top_k, len(self.up), *more)
        # A draft model's experts, which ranks do not divide, never move.
        moves = adapted is not None and adapted.adapters.moves_experts and self.changed is not None
        if adapted is not None and (exchange is not None or moves):
            if self.changed is not None:
                share = np.zeros(len(self.up), np.int32)
                share[list(self.changed)] = 1
                adapted.share = from_numpy(share)
            if exchange is None:
                adapted.apart = ApartRows(
                    *(
                        parts.columns(name, top_k * size, (0, top_k * size))
                        for name, size in (("expert_up", up.outputs), ("expert_in", self.inner))
                    )
                )
        live = Experts(
            ops,
            Router(
                router.proj.build(own.of("proj")),
                router.routing,
                own.tensor("choice_bias") if router.choice_bias is not None else None,
                own.tensor("factors") if router.factors is not None else None,
                None if router.norm is None else router.norm.build(own.of("norm")),
                router.on_input,
                router.scale,
            ),
            stack("up"),
            stack("down"),
            self.activation,
            None if self.shared is None else self.shared.build(parts.of("shared"), ()),
            None if self.shared_gate is None else self.shared_gate.build(parts.of("shared_gate")),
            divided,
            None if self.norm is None else self.norm.build(parts.of("norm")),
            latent,
            exchange,
            bias=None if self.bias is None else parts.tensor("bias"),
            adapted=adapted,
        )
        parts.mixtures.append(live)
        return live
