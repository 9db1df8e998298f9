"""Toy architecture: a Llama in which every other layer has a state instead of attention.

A state is the running mean of a projection of the tokens. Python code computes it, token
by token, so its bits depend on nothing else.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from octavo.checkpoints.config_json import ConfigJson
from octavo.layers.state_table import STATE_ARRAYS
from octavo.layers.step_table import StepArray
from octavo.models.blocks.base import BlockSpec, Parts
from octavo.models.blocks.linear import LinearSpec
from octavo.models.cache import CacheSpec
from octavo.models.families import llama
from octavo.models.spec import ModelSpec
from octavo.models.state_cache import StateCache
from octavo.models.weights import Names, Weight

ARCHITECTURE = "ToyStateForCausalLM"
DECAY = 0.75


@dataclass(frozen=True)
class StateSpec(BlockSpec):
    in_proj: LinearSpec
    out_proj: LinearSpec

    def weights(self, names: Names) -> Iterator[Weight]:
        yield from self.in_proj.weights(names.of("in_proj"))
        yield from self.out_proj.weights(names.of("out_proj"))

    def caches(self) -> tuple[CacheSpec, ...]:
        return (StateCache(((self.in_proj.outputs,),)),)

    def arrays(self) -> tuple[StepArray, ...]:
        return STATE_ARRAYS

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
        (states,) = step.caches[self.cache]
        out = self.ops.empty(*values.shape, like=values)

        def run(tokens, requests):
            numbers, answers, kept = values.numpy(), out.numpy(), states.numpy()
            bounds = metadata.query_start_loc.numpy()[: requests + 1].tolist()
            targets = metadata.slots.numpy(), metadata.snapshots.numpy()
            for i, source in enumerate(metadata.sources.numpy()[:requests].tolist()):
                state = kept[source].copy() if source >= 0 else np.zeros_like(kept[0])
                for token in range(bounds[i], bounds[i + 1]):
                    new = numbers[token].astype(np.float32)
                    state = np.float32(DECAY) * state + np.float32(1 - DECAY) * new
                    answers[token] = state
                    for slots in targets:
                        if slots[token] >= 0:
                            kept[slots[token]] = state

        self.ops.call(run, x.shape[0], len(metadata.sources))
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
