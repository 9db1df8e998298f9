"""Models: what a folder holds (spec, registry), how it is fetched and loaded, and the decoder."""
