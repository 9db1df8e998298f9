"""Changes to logits before a token is chosen. Semantics and order are vLLM's."""
