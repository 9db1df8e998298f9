"""Metrics, traces and recordings."""
