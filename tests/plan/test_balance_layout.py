"""Memory of processes whose experts move, in the memory plan to the byte."""

import pytest

from octavo.config import EngineConfig
from octavo.engine.assemble import set_up_worker
from octavo.platforms.cpu import CPUPlatform
from tests.models.cases import CASES
from tests.models.harness import save_config

PARALLEL = [{"tensor_parallel_size": 2}, {"data_parallel_size": 2}]


@pytest.mark.parametrize("parallel", PARALLEL, ids=lambda parallel: next(iter(parallel)))
def test_redundant_experts_are_planned(parallel, tmp_path):
    """Each rank has a slot for its experts and copies; all share room for those that move."""
    spec = save_config(tmp_path, *CASES["mixtral"])

    def plan(**settings):
        config = EngineConfig.from_kwargs(
            model=str(tmp_path), enable_expert_parallel=True, **parallel, **settings
        )
        setup = set_up_worker(config, spec, tmp_path, CPUPlatform(), 64)
        return setup, CPUPlatform().estimate_memory(setup)

    _, before = plan()
    setup, budget = plan(
        enable_eplb=True,
        eplb_config={"num_redundant_experts": 3, "window_size": 10, "step_interval": 4},
    )
    layout, more = (
        setup.balance_layout,
        {
            item.name: item.nbytes - other.nbytes
            for item, other in zip(budget.items, before.items, strict=True)
        },
    )
    assert [(layer.experts, layer.slots) for layer in layout.layers] == [(5, 4)] * len(spec.layers)
    expert = layout.layers[0].expert_nbytes
    processes = parallel.get("tensor_parallel_size", 1)  # of an engine
    # Of 5 experts the first rank has 3 without copies.
    assert more["weights"] == processes * len(spec.layers) * expert
    assert 5 * expert < layout.nbytes < 5 * expert + 4096
    assert more["activations"] == layout.nbytes // (2 // processes)
    loads = 8 * len(spec.layers) * 5
    assert more["rows"] == processes * 7 * loads
    assert more["logits"] == more["loading"] == 0
