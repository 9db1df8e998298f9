"""Platforms: kinds of device, and what an engine on one of them is made of."""
