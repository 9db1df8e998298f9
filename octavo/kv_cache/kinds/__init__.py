"""Kinds of caches: the blocks that a request needs of each, and the shareable ones among them."""
