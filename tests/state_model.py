"""Toy architecture: a Llama in which every other layer has a state instead of attention.

A state is the running mean of a projection of the tokens. Python code computes it, token
by token, so its bits depend on nothing else.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.blocks.base import BlockSpec, Parts
from octavo.models.blocks.linear import LinearSpec
from octavo.models.cache import CacheSpec
from octavo.models.families import llama
from octavo.models.spec import ModelSpec
from octavo.models.weights import Names, Weight
from tests.state_cache import StateCache

ARCHITECTURE = "ToyStateForCausalLM"
DECAY = 0.75


@dataclass(frozen=True)
class StateStarts:
    """An array of a step: 1 for each request that begins with it."""

    name = "state_starts"
    dtype = "int32"
    dims = ("requests",)

    def make_filler(self, max_num_rows: int) -> "StateStarts":
        return self

    def add_row(self, row, data) -> None:
        pass

    def fill(self, out, rows, starts, counts) -> None:
        out[:] = starts == 0


@dataclass(frozen=True)
class StateSpec(BlockSpec):
    in_proj: LinearSpec
    out_proj: LinearSpec

    def weights(self, names: Names) -> Iterator[Weight]:
        yield from self.in_proj.weights(names.of("in_proj"))
        yield from self.out_proj.weights(names.of("out_proj"))

    def caches(self) -> tuple[CacheSpec, ...]:
        return (StateCache(1, 4 * self.in_proj.outputs),)

    def arrays(self) -> tuple[StateStarts, ...]:
        return (StateStarts(),)

    def build(self, parts: Parts, caches: tuple[int, ...]) -> "State":
        in_proj, out_proj = self.in_proj.build(parts.of("in_proj")), None
        out_proj = self.out_proj.build(parts.of("out_proj"))
        return State(parts.ops, in_proj, out_proj, caches[0])


@dataclass
class State:
    ops: object
    in_proj: object
    out_proj: object
    cache: int

    def __call__(self, x, step):
        values, metadata = self.in_proj(x), step.metadata[self.cache]
        states, out = step.caches[self.cache], self.ops.empty(*values.shape, like=values)

        starts = step.arrays["state_starts"]

        def run(tokens, requests):
            numbers, answers = values.numpy(), out.numpy()
            kept, begins = states.numpy(), starts.numpy()
            for i, (block, begin, end) in enumerate(metadata.rows(requests)):
                state = np.zeros_like(kept[block]) if begins[i] else kept[block]
                for token in range(begin, end):
                    new = numbers[token].astype(np.float32)
                    state = np.float32(DECAY) * state + np.float32(1 - DECAY) * new
                    answers[token] = state
                kept[block] = state

        self.ops.call(run, x.shape[0], len(starts))
        return self.out_proj(out)


def read(config: ConfigJson) -> ModelSpec:
    spec = llama.read(config)
    size = spec.hidden_size
    state = StateSpec(
        LinearSpec((("self_attn.in_proj", 3 * size),), size),
        LinearSpec((("self_attn.out_proj", size),), 3 * size),
    )
    layers = []
    for i, layer in enumerate(spec.layers):
        _, mlp = layer.blocks
        layers.append(layer.with_blocks([state, mlp]) if i % 2 else layer)
    return replace(spec, layers=tuple(layers))
