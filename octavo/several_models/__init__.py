"""Several models in one server: one front process, and one server process for each model."""
