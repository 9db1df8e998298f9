"""Tools for model files: `octavo inspect`, `octavo plan`, `octavo quality` and `octavo convert`."""
