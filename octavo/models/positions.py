"""Positions in a config.json: rotary parameters, ALiBi slopes, context length."""

from __future__ import annotations

import math
from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.errors import ModelError
from octavo.layers.rope_spec import RopeSpec

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
_NEEDS_ORIGINAL = ("llama3", "yarn", "longrope")


def read_rope(
    config: ConfigJson,
    *,
    head_size: int,
    max_position: int,
    layer_type: str | None = None,
    theta_field: str = "rope_theta",
    theta: float = 10000.0,
    aliases: dict[str, str] | None = None,
    default_original: int | None = None,
    partial: float | None = None,
    is_neox: bool = True,
) -> RopeSpec:
    """Read rotary parameters in the newer (`rope_parameters`) or older form (`rope_scaling`).

    Args:
        config: the whole config.json.
        head_size: elements of a head.
        max_position: the config's max_position_embeddings.
        layer_type: "full_attention" or "sliding_attention" if the config may have separate
            parameters for each; a single set is then that of full attention.
        theta_field: field of the base next to the parameters, in the older form.
        theta: base if the config has none.
        aliases: old names of rope types.
        default_original: original context length if the config has none; None: `max_position`.
        partial: rotated part of a head if the config has no partial_rotary_factor. None: the
            family has no such field; transformers then rotates whole heads with default positions
            and fails with others.
        is_neox: as in `RopeSpec`.

    Raises:
        ModelError: the type is unknown, or parameters are missing or wrong.
    """
    params = config.section("rope_parameters")
    if not config.has("rope_parameters"):
        params = config.section("rope_scaling")
    nested = params.has("full_attention") or params.has("sliding_attention")
    if layer_type is not None and (nested or layer_type != "full_attention"):
        params = params.section(layer_type)
    elif nested:
        raise ModelError(
            f"{params.where}: parameters for each layer type are not supported for this "
            "architecture; use one set for all layers."
        )
    known = {name: name for name in ROPE_TYPES} | (aliases or {})
    name = "type" if params.has("type") and not params.has("rope_type") else "rope_type"
    rope_type = params.choice(name, known, default="default")
    theta = params.number("rope_theta", default=config.number(theta_field, default=theta))
    part = params.number(
        "partial_rotary_factor",
        default=config.number("partial_rotary_factor", default=partial or 1.0),
    )
    rotary_dim = head_size if rope_type == "proportional" else int(head_size * part)
    if partial is None and rotary_dim != head_size:
        if rope_type != "default":
            raise ModelError(
                f"{config.where}: partial_rotary_factor={part} is not supported with rope_type="
                f"{rope_type} for this architecture, nor is it in transformers; leave it out."
            )
        rotary_dim = head_size
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_size:
        raise ModelError(
            f"{config.where}: rotary positions over {rotary_dim} of {head_size} elements of a "
            "head are not supported; the number must be even and at least 2."
        )
    if theta <= 1.0:
        raise ModelError(f"{config.where}: rope_theta={theta} is not supported; it must be > 1.")
    original = max_position
    if rope_type in _NEEDS_ORIGINAL:
        key = "original_max_position_embeddings"
        original = params.integer(key, default=default_original or max_position)
        # As in transformers, a value next to the parameters has precedence over one among them.
        original = config.integer(key, default=original)
        if original == 1 and rope_type == "longrope":
            raise config.error(key, "longrope needs at least 2")
    spec = RopeSpec(rope_type, theta, rotary_dim, original, is_neox=is_neox)
    if rope_type == "default":
        return spec
    if rope_type == "proportional":
        if not 0 <= part <= 1:
            raise params.error("partial_rotary_factor", "it must be from 0 to 1")
        pairs = int(part * head_size // 2)
        return replace(spec, factor=params.positive("factor", 1.0), turning_pairs=pairs)
    if rope_type in ("yarn", "longrope") and not params.has("factor"):
        factor = max_position / original
    else:
        factor = params.number("factor")
    if rope_type == "dynamic" and params.has("alpha") and rotary_dim > 2:
        # NTK with a fixed alpha (HunYuan): the base does not depend on the length of a sequence.
        stretch: float = params.positive("alpha") ** (rotary_dim / (rotary_dim - 2))
        return replace(spec, rope_type="default", theta=theta * stretch)
    if factor <= 0 or (rope_type == "dynamic" and rotary_dim == 2):
        raise params.error("factor", "it must be more than 0, and dynamic needs rotary_dim > 2")
    return _complete(spec, params, factor)


def _complete(spec: RopeSpec, params: ConfigJson, factor: float) -> RopeSpec:
    spec = replace(spec, factor=factor)
    attention_factor = params.optional_number("attention_factor")
    match spec.rope_type:
        case "llama3":
            low, high = params.number("low_freq_factor"), params.number("high_freq_factor")
            if not 0 < low <= high:
                raise params.error("low_freq_factor", "it must be > 0 and <= high_freq_factor")
            return replace(spec, low_freq_factor=low, high_freq_factor=high)
        case "yarn":
            if attention_factor is None:
                mscale = params.optional_number("mscale")
                all_dim = params.optional_number("mscale_all_dim")
                attention_factor = (
                    _yarn_mscale(factor, mscale) / _yarn_mscale(factor, all_dim)
                    if mscale and all_dim
                    else _yarn_mscale(factor, 1.0)
                )
            fast = params.optional_number("beta_fast") or 32.0
            slow = params.optional_number("beta_slow") or 1.0
            if min(fast, slow) <= 0:
                raise params.error("beta_slow", "it and beta_fast must be more than 0")
            return replace(
                spec,
                attention_factor=attention_factor,
                beta_fast=fast,
                beta_slow=slow,
                truncate=params.flag("truncate", True),
            )
        case "longrope":
            if attention_factor is None:
                attention_factor = (
                    math.sqrt(1 + math.log(factor) / math.log(spec.original_max_position))
                    if factor > 1.0
                    else 1.0
                )
            return replace(
                spec,
                attention_factor=attention_factor,
                short_factor=params.numbers("short_factor", spec.rotary_dim // 2),
                long_factor=params.numbers("long_factor", spec.rotary_dim // 2),
            )
    return spec


def _yarn_mscale(factor: float, mscale: float) -> float:
    """Return the attention temperature of YaRN (arXiv 2309.00071, section 3.4)."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def scaled_max_model_len(rope: RopeSpec, max_position: int) -> int:
    """Return the context length of a model with scaled positions, by vLLM's rules.

    max_position_embeddings is the scaled length for llama3 and longrope models, and the original
    one for linear and dynamic ones. yarn models have a field for the original length.

    Raises:
        ModelError: the length is impossible.
    """
    match rope.rope_type:
        case "linear" | "dynamic":
            scaled = int(max_position * rope.factor)
        case "yarn":
            scaled = int(rope.original_max_position * rope.factor)
        case _:
            return max_position
    if not 0 < scaled < 2**31:
        raise ModelError(
            f"A context of {max_position} positions scaled by factor={rope.factor} is not "
            "supported; it must be at least 1 and below 2**31."
        )
    return scaled


def alibi_slopes_bloom(num_heads: int) -> tuple[float, ...]:
    """Return the slopes of ALiBi (arXiv 2108.12409), extended as BLOOM does to all head counts."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    slopes += [2.0 ** (-4.0 * i / power) for i in range(1, 2 * (num_heads - power) + 1, 2)]
    return tuple(slopes)


def alibi_slopes_mpt(num_heads: int, bias_max: float) -> tuple[float, ...]:
    """Return the slopes of ALiBi (arXiv 2108.12409), extended as MPT does to all head counts."""
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2.0 ** (-bias_max * i / power) for i in range(1, power + 1)]
    if power != num_heads:
        slopes = (slopes[1::2] + slopes[::2])[:num_heads]
    return tuple(slopes)
