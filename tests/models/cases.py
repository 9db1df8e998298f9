"""Small configurations by case, each with the class of transformers that computes it."""

from typing import Any

from tests.models.configs import dense, experts, latent, recurrent

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **dense.CASES,
    **latent.CASES,
    **recurrent.CASES,
    **experts.CASES,
}
MIXTURES = ("mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss", "gemma4-moe", "nemotron-h-latent")
MIXTURES += ("laguna-elements",)
ENLARGING = ("qwen3.5", "qwen3.5-moe", "qwen3-next", "qwen3-next-moe", "kimi-linear")
ENLARGING += ("nemotron", "nemotron-bias", "gemma4", "rwkv7-odd")
ENLARGING += ("olmo-hybrid-rope", "Qwen3_5Moe")
"""Cases that enlarge the errors of float32, see `make_hf`."""
