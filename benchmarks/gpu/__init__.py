"""Parts of gpu_check.py: checks and measurements on a GPU."""
