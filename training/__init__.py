"""Tool that makes Octavo's built-in models: data, tokenizer, training, heads, adapters."""
