from benchmarks.kv_waste import measure


def test_less_than_four_percent_of_the_kv_memory_is_wasted():
    waste = measure(block_size=16, num_steps=200)
    assert 0.88 < waste.occupancy < 0.94
    assert 0.005 < waste.wasted < 0.04
