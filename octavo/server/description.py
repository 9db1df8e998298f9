"""Description of a model in Ollama's form: its family, its size and its shape."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo.models.blocks.attention import AttentionSpec
from octavo.plan.memory_plan import resolve_dtype
from octavo.platforms.cpu import CPUPlatform
from octavo.platforms.registry import get_platform
from octavo.quantization.plain import PLAIN
from octavo.server.ollama_answers import OllamaDetails

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.models.spec import ModelSpec


class ModelDescription(NamedTuple):
    """Description of a model that does not depend on its name."""

    details: OllamaDetails
    info: dict[str, Any]
    nbytes: int
    """Size of the weights in memory."""
    gpu_nbytes: int
    """Size of those in the memory of a GPU."""


def describe_model(config: EngineConfig, spec: ModelSpec) -> ModelDescription:
    """Return the description of a model with the given settings."""
    dtype = resolve_dtype(config, spec)
    sizes: dict[tuple[object, ...], int] = {}
    forms: Counter[str] = Counter()
    for weight in spec.weights():
        key = tuple((source.name, source.parts) for source in weight.sources)
        size = sizes[key] = math.prod(weight.shape)
        forms[dtype if weight.form == PLAIN else weight.form.name] += size
    family = spec.architecture.removesuffix("ForCausalLM").lower()
    count = sum(sizes.values())
    info = {
        "general.architecture": family,
        "general.parameter_count": count,
        f"{family}.block_count": len(spec.layers),
        f"{family}.embedding_length": spec.hidden_size,
        f"{family}.vocab_size": spec.vocab_size,
    }
    blocks = [block for layer in spec.layers for block in layer.blocks]
    attention = next((block for block in blocks if isinstance(block, AttentionSpec)), None)
    if attention is not None:
        info |= {
            f"{family}.attention.head_count": attention.num_heads,
            f"{family}.attention.head_count_kv": attention.num_kv_heads,
            f"{family}.attention.key_length": attention.head_size,
        }
    ((most, _),) = forms.most_common(1)
    details = OllamaDetails(
        parent_model="",
        format="gguf" if config.model.model.lower().endswith(".gguf") else "safetensors",
        family=family,
        families=[family],
        parameter_size=_short(count),
        quantization_level=_LEVELS.get(most, most.upper()),
    )
    nbytes = spec.weight_nbytes(dtype)
    on_cpu = isinstance(get_platform(config.device.device), CPUPlatform)
    return ModelDescription(details, info, nbytes, 0 if on_cpu else nbytes)


_LEVELS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def _short(count: int) -> str:
    """Return a number such as 7.6B."""
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= unit:
            return f"{count / unit:.1f}{letter}"
    return str(count)
