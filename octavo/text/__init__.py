"""Text and tokens: tokenizer, detokenizer, chat templates."""
