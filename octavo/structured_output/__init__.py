"""Structured output: grammars that answers must follow, compiled to bitmasks of tokens."""
