"""Platforms: kinds of device, and the parts of an engine on each."""
