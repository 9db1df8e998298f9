"""Engines that `benchmarks/compare.py` compares: their installation and drivers."""
