"""The front ends, offline (`LLMEngine`) and async (`AsyncLLM`): requests in, answers out."""
