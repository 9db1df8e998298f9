"""Mamba and Falcon Mamba: every layer is a state space."""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.blocks.base import BlockSpec
from octavo.models.families.base import read_num_layers
from octavo.models.families.mamba2 import mixers_spec
from octavo.models.families.state_parts import MambaFields, read_expanded
from octavo.models.spec import ModelSpec

_FIELDS = MambaFields(
    state_size="state_size",
    taps="conv_kernel",
    rank="time_step_rank",
    conv_bias="use_conv_bias",
    bias="use_bias",
)


def read(config: ConfigJson) -> ModelSpec:
    """Read Mamba."""
    return _read(config, normed=False)


def read_falcon(config: ConfigJson) -> ModelSpec:
    """Read Falcon Mamba, which norms a token's step, B and C."""
    return _read(config, normed=True)


def _read(config: ConfigJson, *, normed: bool) -> ModelSpec:
    inner = config.optional_integer("intermediate_size", least=1)
    mixer = _FIELDS.read(
        config,
        "mixer",
        inner_size=inner or read_expanded(config, "expand"),
        norms=(None, None, None) if normed else None,
        eps=config.number("mixer_rms_eps", default=1e-6),
    )
    mixers: list[BlockSpec] = [mixer] * read_num_layers(config)
    eps = config.number("layer_norm_epsilon", default=1e-5)
    return mixers_spec(config, mixers, prefix="backbone.", eps=eps, tied=True)


ARCHITECTURES = {"MambaForCausalLM": read, "FalconMambaForCausalLM": read_falcon}
