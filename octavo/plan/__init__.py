"""Agreements of control plane and data plane before a model is loaded. Without torch."""
