"""The engine: converts requests to steps and steps to outputs."""
