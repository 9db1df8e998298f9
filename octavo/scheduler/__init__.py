"""What runs in each step, and what becomes of its results."""
