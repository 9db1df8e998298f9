"""Run an engine's schedule without its model, or a recording again."""
