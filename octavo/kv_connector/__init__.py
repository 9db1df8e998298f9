"""KV connectors: keys and values leave the engine that computed them, and come back."""
