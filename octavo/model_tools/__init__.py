"""Tools for model files: `octavo inspect`, `octavo quality` and `octavo convert`."""
