"""Parsers of answers: reasoning and tool calls."""
