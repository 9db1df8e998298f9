"""Sizes and parts of configurations that the cases of several files share."""

from typing import Any

VOCAB = 203
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WIDE_HEADS = SIZES | {"head_dim": 16}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
YARN["original_max_position_embeddings"] = 32
QUARTER = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4}
LONGROPE |= {"short_factor": [1.0 + 0.1 * i for i in range(6)]}
LONGROPE |= {"long_factor": [2.0 + 0.5 * i for i in range(6)]}
GRANITE4 = {"num_local_experts": 0, "shared_intermediate_size": 40, "logits_scaling": 2.5}
GRANITE4 |= {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2}
FEW = {"num_hidden_layers": 2, "num_experts": 5, "num_experts_per_tok": 2}
FEW |= {"moe_intermediate_size": 20}
MSCALE = YARN | {"mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 16.0}
