"""Rotary tables against transformers' frequencies."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from octavo.checkpoints.config_json import ConfigJson
from octavo.kernels.torch_tensors import as_torch
from octavo.layers import rotary
from octavo.layers.rope_spec import RopeSpec
from octavo.models.positions import read_rope
from tests.layers import torch_rotary

MAX_POSITION = 64
HEAD = 32

ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 3.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 48,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "yarn-options": {
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 8,
        "beta_slow": 2,
        "attention_factor": 0.7,
        "truncate": False,
    },
    # The ramp has no length if both bounds are rounded to dimension 0.
    "yarn-equal-bounds": {"factor": 4.0, "original_max_position_embeddings": 6},
    "longrope": {
        "short_factor": [1.0 + 0.1 * i for i in range(HEAD // 2)],
        "long_factor": [2.0 + 0.5 * i for i in range(HEAD // 2)],
        "original_max_position_embeddings": 16,
    },
    "dynamic": {"factor": 4.0},
}


def config_of(name: str, **more: Any) -> LlamaConfig:
    rope = {"rope_type": name.split("-")[0], "rope_theta": 5e4} | ROPES[name] | more
    return LlamaConfig(
        hidden_size=2 * HEAD,
        num_attention_heads=2,
        max_position_embeddings=MAX_POSITION,
        rope_parameters=rope,
    )


def spec_of(config: LlamaConfig) -> Any:
    data = ConfigJson(config.to_dict(), "config.json")
    return read_rope(data, head_size=HEAD, max_position=MAX_POSITION)


def build_cos_sin_cache(rope: RopeSpec, max_position: int) -> torch.Tensor:
    return as_torch(rotary.build_cos_sin_cache(rope, max_position))


def expected_rows(config: LlamaConfig, positions: torch.Tensor, seq_len: int | None) -> Any:
    inverse, scale = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](
        config, None, seq_len=seq_len
    )
    angles = positions.float()[:, None] * inverse
    return torch.cat([angles.cos(), angles.sin()], -1) * scale


@pytest.mark.parametrize("name", [n for n in ROPES if n != "dynamic"])
def test_equals_transformers(name: str) -> None:
    config = config_of(name)
    cache = build_cos_sin_cache(spec_of(config), 30000)
    assert cache.shape == (30000, HEAD)
    assert cache.dtype == torch.float32
    assert cache.isfinite().all()
    # longrope: a table longer than the original context has the long factors throughout
    expected = expected_rows(config, torch.arange(30000), 30000)
    torch.testing.assert_close(cache, expected, atol=3e-7, rtol=0)


def test_short_longrope_table() -> None:
    config = config_of("longrope")
    cache = build_cos_sin_cache(spec_of(config), 16)
    expected = expected_rows(config, torch.arange(16), 16)
    torch.testing.assert_close(cache, expected, atol=3e-7, rtol=0)


def test_longrope_tables_up_to_the_original_length_are_short() -> None:
    """The length next to the parameters has precedence; a table of exactly that length is short."""
    data = config_of("longrope").to_dict() | {"original_max_position_embeddings": 20}
    spec = read_rope(ConfigJson(data, "config.json"), head_size=HEAD, max_position=MAX_POSITION)
    assert spec.original_max_position == 20
    assert spec.factor == MAX_POSITION / 20
    factors = torch.tensor([spec.short_factor, spec.long_factor])
    angles = 1.0 / (factors * spec.theta ** (torch.arange(0, HEAD, 2) / HEAD))
    for length, row in ((20, angles[0]), (21, angles[1])):
        table = build_cos_sin_cache(spec, length)
        torch.testing.assert_close(table[1, : HEAD // 2], row.cos() * spec.attention_factor)


def test_longrope_of_no_more_than_the_original_length_is_not_scaled() -> None:
    config = config_of("longrope", original_max_position_embeddings=MAX_POSITION)
    spec = spec_of(config)
    assert (spec.factor, spec.attention_factor) == (1.0, 1.0)
    expected = expected_rows(config, torch.arange(MAX_POSITION), MAX_POSITION)
    cache = build_cos_sin_cache(spec, MAX_POSITION)
    torch.testing.assert_close(cache, expected, atol=3e-7, rtol=0)


def test_yarn_with_equal_bounds() -> None:
    """Both at dimension 0: transformers widens the ramp by 0.001 rather than divide 0 by 0."""
    bounds = {"beta_fast": 14.28, "beta_slow": 14.28}
    config = config_of("yarn", original_max_position_embeddings=64, **bounds)
    cache = build_cos_sin_cache(spec_of(config), 50)
    assert cache.isfinite().all()
    expected = expected_rows(config, torch.arange(50), 50)
    torch.testing.assert_close(cache, expected, atol=3e-7, rtol=0)


def test_dynamic_takes_each_row_from_its_own_length() -> None:
    config = config_of("dynamic")
    cache = build_cos_sin_cache(spec_of(config), 4 * MAX_POSITION)
    for position in (0, 5, MAX_POSITION - 1, MAX_POSITION, 100, 255):
        row = expected_rows(config, torch.tensor([position]), position + 1)[0]
        torch.testing.assert_close(cache[position], row, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ["linear", "dynamic", "yarn"])
def test_rows_do_not_depend_on_the_size_of_the_table(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(config_of(name))
    whole = build_cos_sin_cache(spec, 256)
    assert torch.equal(build_cos_sin_cache(spec, 77), whole[:77])
    monkeypatch.setattr(rotary, "_ROWS_AT_ONCE", 50)
    assert torch.equal(build_cos_sin_cache(spec, 256), whole)


def test_partial() -> None:
    data = {"rope_theta": 1e4, "partial_rotary_factor": 0.25}
    config_json = ConfigJson(data, "config.json")
    whole = read_rope(config_json, head_size=HEAD, max_position=MAX_POSITION)
    assert whole.rotary_dim == HEAD, "only some architectures know of it"
    spec = read_rope(config_json, head_size=HEAD, max_position=MAX_POSITION, partial=True)
    assert build_cos_sin_cache(spec, 10).shape == (10, HEAD // 4)
    config = SimpleNamespace(theta=1e4, dim=8)
    angles = torch.arange(10)[:, None] / config.theta ** (torch.arange(0, 8, 2) / config.dim)
    torch.testing.assert_close(
        build_cos_sin_cache(spec, 10)[:, :4], angles.cos(), atol=1e-6, rtol=0
    )


def real_rope(name: str, head: int) -> RopeSpec:
    """Return the parameters of a published model; `head` replaces its size of a head."""
    kind, _, theta = name.partition(" ")
    more: dict[str, Any] = {
        "linear": {"original_max_position": 4096, "factor": 4.0},
        "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "yarn": {"original_max_position": 32768, "factor": 4.0, "attention_factor": 1.1386},
        "longrope": {
            "original_max_position": 4096,
            "attention_factor": 1.19,
            "short_factor": tuple(1 + 0.04 * i for i in range(head // 2)),
            "long_factor": tuple(1.08 + 1.3 * i for i in range(head // 2)),
        },
        "dynamic": {"original_max_position": 2048, "factor": 4.0},
    }.get(kind, {})
    return RopeSpec(kind, float(theta), head, **{"original_max_position": 8192} | more)


@pytest.mark.parametrize("head", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(
    "name",
    [
        *(f"default {theta}" for theta in ("1e4", "5e5", "1e6", "5e6", "1e7")),
        *("linear 1e4", "linear 1e6", "llama3 5e5", "yarn 1e6", "yarn 1e4", "longrope 1e4"),
        *("dynamic 1e4", "dynamic 1e6"),
    ],
)
def test_equals_the_formulas_in_torch(name: str, head: int) -> None:
    """Torch's powers may be wrong in the last bit; where they are right, no bit differs."""
    rope = real_rope(name, head)
    length = 4 * rope.original_max_position
    inverse = torch_rotary.inverse_frequencies(rope, length)
    if rope.rope_type == "dynamic":
        found = torch.from_numpy(rotary._dynamic(rope, np.arange(length)))
    else:
        found = torch.from_numpy(rotary.inverse_frequencies(rope, length))
    ulps = (found.view(torch.int32) - inverse.view(torch.int32)).abs()
    # A reciprocal may double the distance of powers in ulps.
    assert ulps.max() <= (2 if rope.rope_type == "dynamic" else 1)
    assert (ulps > 0).float().mean() < 0.04
    positions = torch.arange(0, length, 97)
    if rope.rope_type == "dynamic":
        inverse, ulps = inverse[positions], ulps[positions]
    expected = torch_rotary.build_cos_sin_cache(rope, inverse, positions)
    same = (ulps == 0).expand(len(positions), -1).repeat(1, 2)
    table = build_cos_sin_cache(rope, length)[positions]
    assert torch.equal(table[same], expected[same])
