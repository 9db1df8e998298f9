"""Models in Mistral's own form: params.json, consolidated*.safetensors and tekken.json."""
