"""Plans that control plane and data plane share before a model is loaded."""
