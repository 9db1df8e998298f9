"""The parts of gpu_check.py: what is checked and measured on a GPU."""
