"""Parts that families with state spaces share."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.checkpoints.config_json import ConfigJson
from octavo.kernels.sizes import MAX_TAPS
from octavo.models.blocks.conv import ConvSpec
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.mamba import MambaSpec
from octavo.models.blocks.mamba2 import Mamba2Spec
from octavo.models.blocks.norm import GroupNormSpec, RMSNormSpec
from octavo.models.families.base import MOST_HEADS

MIXERS = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
}
"""Kinds of mixers by their names in configs; transformers renamed them."""


@dataclass(frozen=True, kw_only=True)
class Mamba2Fields:
    """Names of the fields of a mixer of Mamba-2 in a config."""

    num_heads: str = "mamba_n_heads"
    head_size: str = "mamba_d_head"
    num_groups: str = "mamba_n_groups"
    state_size: str = "mamba_d_state"
    taps: str = "mamba_d_conv"
    conv_bias: str = "mamba_conv_bias"
    bias: str = "mamba_proj_bias"
    out_bias: str = "mamba_proj_bias"
    activation: str = "hidden_act"

    def read(
        self,
        config: ConfigJson,
        module: str,
        *,
        inner_size: int | None,
        eps: float,
        dt_range: tuple[float, float],
        norm: bool = True,
    ) -> Mamba2Spec:
        """Return the mixer.

        Args:
            config: config.json.
            module: module of the mixer in the checkpoint.
            inner_size: size of all heads together; None: any.
            eps: term of the norm.
            dt_range: least and largest step size.
            norm: True if the results are normed.

        Raises:
            ModelError: the sizes do not fit, or the activation is not silu.
        """
        config.refuse(self.activation, "silu", "state spaces need silu")
        hidden, heads = (
            config.integer("hidden_size"),
            config.integer(self.num_heads, most=MOST_HEADS),
        )
        if config.get(self.head_size) == "auto":
            config = config.replaced(self.head_size, (inner_size or hidden) // heads)
        size = config.integer(self.head_size)
        inner = heads * size
        if inner_size not in (None, inner):
            raise config.error(
                self.num_heads, f"{heads} heads of size {size} do not make {inner_size}"
            )
        groups, rows = config.integer(self.num_groups), config.integer(self.state_size)
        if heads % groups:
            raise config.error(self.num_groups, f"it must divide {heads} heads")
        channels = inner + 2 * groups * rows
        return Mamba2Spec(
            in_proj=LinearSpec(
                ((f"{module}.in_proj", inner + channels + heads),),
                hidden,
                config.flag(self.bias, False),
            ),
            conv=ConvSpec(
                f"{module}.conv1d",
                channels,
                config.integer(self.taps, least=2, most=MAX_TAPS),
                config.flag(self.conv_bias, True),
                "silu",
            ),
            out_proj=LinearSpec(
                ((f"{module}.out_proj", hidden),), inner, config.flag(self.out_bias, False)
            ),
            module=module,
            num_heads=heads,
            head_size=size,
            num_groups=groups,
            state_size=rows,
            dt_range=dt_range,
            norm=GroupNormSpec(f"{module}.norm", inner, groups, eps) if norm else None,
        )


@dataclass(frozen=True, kw_only=True)
class MambaFields:
    """Names of the fields of a mixer of Mamba-1 in a config."""

    state_size: str
    taps: str
    rank: str
    conv_bias: str
    bias: str

    def read(
        self,
        config: ConfigJson,
        module: str,
        *,
        inner_size: int,
        norms: tuple[str | None, str | None, str | None] | None,
        eps: float,
    ) -> MambaSpec:
        """Return the mixer.

        Args:
            config: config.json.
            module: module of the mixer in the checkpoint.
            inner_size: number of channels.
            norms: modules of the norms of a token's step, B and C, within `module`; None: a norm
                without a weight, or no norms.
            eps: term of the norms.

        Raises:
            ModelError: a size is not a whole number, or the activation is not silu.
        """
        config.refuse("hidden_act", "silu", "state spaces need silu")
        hidden, rows = config.integer("hidden_size"), config.integer(self.state_size)
        if config.get(self.rank) == "auto":
            config = config.replaced(self.rank, -(-hidden // 16))
        rank, bias = config.integer(self.rank), config.flag(self.bias, False)
        own = None
        if norms is not None:
            dt, b, c = (name and f"{module}.{name}" for name in norms)
            own = RMSNormSpec(dt, rank, eps), RMSNormSpec(b, rows, eps), RMSNormSpec(c, rows, eps)
        return MambaSpec(
            in_proj=LinearSpec(((f"{module}.in_proj", 2 * inner_size),), hidden, bias),
            conv=ConvSpec(
                f"{module}.conv1d",
                inner_size,
                config.integer(self.taps, least=2, most=MAX_TAPS),
                config.flag(self.conv_bias, True),
                "silu",
            ),
            x_proj=LinearSpec(((f"{module}.x_proj", rank + 2 * rows),), inner_size),
            dt_proj=LinearSpec(((f"{module}.dt_proj", inner_size),), rank),
            out_proj=LinearSpec(((f"{module}.out_proj", hidden),), inner_size, bias),
            module=module,
            state_size=rows,
            norms=own,
        )


def read_dt_range(config: ConfigJson) -> tuple[float, float]:
    """Return the field time_step_limit: the least and the largest step size."""
    limits = config.get("time_step_limit")
    if limits is None:
        return 0.0, float("inf")
    if not isinstance(limits, list) or len(limits) != 2:
        raise config.error("time_step_limit", "it must be a list of two numbers")
    # transformers writes infinity as an object.
    least, most = (float("inf") if x == {"__float__": "Infinity"} else x for x in limits)
    if not all(isinstance(x, int | float) for x in (least, most)) or not 0 <= least <= most:
        raise config.error("time_step_limit", "it must be two numbers, 0 <= first <= second")
    return float(least), float(most)


def read_expanded(config: ConfigJson, name: str) -> int:
    """Return the hidden size times the field `name`, rounded down."""
    return max(1, int(config.positive(name, 2.0) * config.integer("hidden_size")))
