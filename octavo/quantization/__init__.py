"""Forms of linear weights with fewer bits, and how ordinary checkpoints are brought into them."""
