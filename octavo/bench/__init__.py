"""`octavo bench`: the benchmarks, with vLLM's flags and metric names."""
