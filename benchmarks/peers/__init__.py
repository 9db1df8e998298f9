"""The engines that `benchmarks/compare.py` compares: how each is installed and driven."""
