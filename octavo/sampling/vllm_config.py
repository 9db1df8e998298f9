"""Engine settings under vLLM's names, for code that was written for vLLM."""

from __future__ import annotations

from typing import Any

from octavo.config import EngineConfig

_SECTIONS = {
    "cache_config": "cache",
    "device_config": "device",
    "load_config": "load",
    "observability_config": "observability",
    "parallel_config": "parallel",
    "scheduler_config": "scheduler",
}


class VllmConfig:
    """vLLM's `VllmConfig`: Octavo's sections under vLLM's names.

    Args:
        config: the settings.
        vocab_size: the model's vocabulary size.
        max_model_len: the resolved maximum length.
    """

    def __init__(self, config: EngineConfig, vocab_size: int, max_model_len: int) -> None:
        self.model_config = VllmModelConfig(config, vocab_size, max_model_len)
        for name, section in _SECTIONS.items():
            setattr(self, name, getattr(config, section))
        self.kv_transfer_config = config.cache.kv_transfer_config
        self.speculative_config = config.speculation.speculative_config

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError for a section that Octavo does not have."""
        raise AttributeError(
            f"Octavo's settings have no {name}; of vLLM's there are kv_transfer_config, "
            f"model_config, speculative_config, {', '.join(_SECTIONS)}."
        )


class VllmModelConfig:
    """vLLM's `ModelConfig`: the model's settings, with known facts about the model."""

    def __init__(self, config: EngineConfig, vocab_size: int, max_model_len: int) -> None:
        self._settings, self._vocab_size = config.model, vocab_size
        self.max_model_len = max_model_len

    def get_vocab_size(self) -> int:
        """Return the width of the logits."""
        return self._vocab_size

    def __getattr__(self, name: str) -> Any:
        """Return a setting of the model."""
        return getattr(self._settings, name)
