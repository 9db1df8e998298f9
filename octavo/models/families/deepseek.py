"""DeepSeek V2 and V3 whose layers are all dense: multi-head latent attention."""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.families.base import read_num_layers
from octavo.models.families.latent_parts import read_latent_attention, read_latent_rope
from octavo.models.families.llama import LlamaLike
from octavo.models.spec import ModelSpec


def _dense(config: ConfigJson, *, is_neox: bool, mlp_bias: bool) -> ModelSpec:
    layers = read_num_layers(config)
    if config.integer("first_k_dense_replace", least=0) < layers:
        raise config.error(
            "first_k_dense_replace",
            f"layers with experts are not supported yet, so it must be at least {layers}, the "
            "number of layers",
        )
    rope = read_latent_rope(config, is_neox=is_neox)
    # Layers after the last one predict several tokens at once.
    more = config.integer("num_nextn_predict_layers", "num_mtp_layers", default=0, least=0)
    ignored = tuple(rf"model\.layers\.{layers + i}\..*" for i in range(more))
    variant = LlamaLike(ropes=(rope,) * layers, mlp_bias=mlp_bias, ignored=ignored)
    return variant.read(config, read_latent_attention(config, rope))


def read_v2(config: ConfigJson) -> ModelSpec:
    """Read DeepSeek V2."""
    return _dense(config, is_neox=False, mlp_bias=config.flag("mlp_bias", False))


def read_v3(config: ConfigJson) -> ModelSpec:
    """Read DeepSeek V3."""
    is_neox = not config.flag("rope_interleave", True)
    return _dense(config, is_neox=is_neox, mlp_bias=False)


ARCHITECTURES = {
    "DeepseekV2ForCausalLM": read_v2,
    "DeepseekV3ForCausalLM": read_v3,
}
