"""Layouts of the KV cache on the ranks of an engine."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.checkpoints.registry import open_checkpoint
from octavo.config import BUILTIN_MODEL, EngineConfig
from octavo.kv_connector.offload import OffloadingSettings
from octavo.models.hub import resolve_model
from octavo.models.registry import read_spec
from octavo.plan.setup import WorkerSetup
from octavo.system.distributed import Rank

SETTINGS = OffloadingSettings(cpu_bytes_to_use=2**20)
NEMOTRON = {
    "architectures": ["NemotronHForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 64,
    "torch_dtype": "float32",
    "layers_block_type": ["mlp", "linear_attention", "mlp", "full_attention", "linear_attention"],
}


def setup_of(spec, **device):
    return WorkerSetup(
        config=EngineConfig.from_kwargs(**device),
        spec=spec,
        model_path=Path("nowhere"),
        dtype="bfloat16",
        max_model_len=128,
        max_num_batched_tokens=64,
    )


def layouts_of(spec, **device):
    setup = setup_of(spec, **device)
    config = setup.config
    size = config.device.tensor_parallel_size * config.device.pipeline_parallel_size
    ranks = [Rank.of(number, config.device) for number in range(size)]
    return [replace(setup, rank=rank).kv_layout for rank in ranks]


def test_stages_of_different_sizes_have_the_same_slots():
    spec = read_spec(open_checkpoint(resolve_model(BUILTIN_MODEL)))
    layouts = layouts_of(spec, pipeline_parallel_size=2, pipeline_layers="1,5")
    small, large = (layout.copy_nbytes for layout in layouts)
    assert small < large
    assert {SETTINGS.num_slots(layout) for layout in layouts} == {(2**20 // (2 * large), 0)}


@pytest.mark.parametrize(
    ("ranks", "layers"),
    [
        ({"pipeline_parallel_size": 2, "pipeline_layers": "3,2"}, [[0], [1, 2]]),
        ({"pipeline_parallel_size": 2, "pipeline_layers": "4,1"}, [[0, 1], [2]]),
        ({"tensor_parallel_size": 2}, [[0, 1, 2]] * 2),
    ],
    ids=str,
)
def test_layers_with_states_attention_or_neither(ranks, layers, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(NEMOTRON))
    spec = read_spec(open_checkpoint(tmp_path, "dummy"))
    found = layouts_of(spec, **ranks)
    for layout, expected in zip(found, layers, strict=True):
        groups = [*layout.groups, *layout.states]
        own = [i + layout.first_layer for group in groups for i in group.layer_indices]
        assert sorted(own) == expected
        slices = [part for piece in layout.pieces for part in piece]
        size = sum(len(g.layer_indices) * g.cache.nbytes for g in layout.states)
        assert sum(part.nbytes for part in slices) == size > 0
    assert len({layout.num_kinds for layout in found}) == 1
    assert len({SETTINGS.num_slots(layout) for layout in found}) == 1
    assert len({layout.state_division for layout in found}) == len({str(it) for it in layers})


def test_ranks_of_all_engines_divide_the_experts():
    """Each of two engines has two stages of three processes."""
    spec = read_spec(open_checkpoint(resolve_model(BUILTIN_MODEL)))
    setup = setup_of(spec, tensor_parallel_size=3, pipeline_parallel_size=2)
    ranks = [Rank.of(number, setup.config.device) for number in range(6)]
    assert [replace(setup, rank=rank).expert_rank for rank in ranks] == [Rank()] * 6
    found = [
        replace(setup, engine=Rank(engine, 2), rank=rank).expert_rank
        for engine in range(2)
        for rank in ranks
    ]
    assert [rank.index for rank in found] == [0, 1, 2] * 2 + [3, 4, 5] * 2
    assert {rank.size for rank in found} == {6}
