"""Laws that any OpenAI-compatible server can be tried against."""
