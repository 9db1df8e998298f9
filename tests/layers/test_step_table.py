import subprocess
import sys

import numpy as np
import pytest

from octavo.layers.step_table import STEP_ARRAYS, StepLayout, StepSize


@pytest.mark.parametrize("size", [StepSize(7, 3, 5), StepSize(0, 0, 0), StepSize(1, 1, 1)])
def test_arrays_lie_apart_in_one_piece_of_memory(size):
    layout = StepLayout(size, blocks=4, num_groups=2)
    memory = np.zeros(layout.nbytes, np.uint8)
    table = layout.table(lambda begin, end, dtype, _: memory[begin:end].view(dtype))
    for i, array in enumerate(table, 1):
        assert not array.any(), "it has nothing in common with those before it"
        array[:] = i
    assert [array.dtype.name for array in table].count("int32") == 3
    assert len(list(table)) == len(STEP_ARRAYS)


def test_the_first_part_is_what_a_step_of_that_size_has():
    table = StepLayout(StepSize(7, 3, 5), 4, 2).table(
        lambda begin, end, dtype, shape: np.full(shape, begin, dtype)
    )
    part = table.first(StepSize(2, 1, 0))
    shapes = dict(zip(STEP_ARRAYS, (array.shape for array in part), strict=True))
    assert shapes == {
        "query_start_loc": (2,),
        "seq_lens": (1,),
        "logits_indices": (0,),
        "sampling_rows": (0,),
        "sampling_params": (0, 5),
        "input_ids": (2,),
        "positions": (2,),
        "slot_mappings": (2, 2),
        "block_tables": (2, 1, 4),
    }
    for array, whole in zip(part, table, strict=True):
        assert array.base is whole
    assert list(table.map(lambda array: array.ndim)) == [1, 1, 1, 1, 2, 1, 1, 2, 3]


def test_memory_is_planned_without_the_compiled_extension():
    code = "import sys; sys.modules['octavo._native'] = None; import octavo.plan.memory_plan"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
