"""Mixtures of experts in the layouts of published quantized checkpoints."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.errors import ConfigError, ModelError
from octavo.system.distributed import Rank
from tests.models.harness import load
from tests.quantization import test_awq, test_compressed_tensors, test_fp4, test_fp8, test_gptq
from tests.quantization.formats import _fp8
from tests.quantization.harness import Folders, Quantize
from tests.quantization.test_compressed_tensors import TOKENS

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN3 = SIZES | {"num_experts": 5, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
MIXTRAL = SIZES | {"num_local_experts": 5, "num_experts_per_tok": 4, "sliding_window": None}
DEEPSEEK = SIZES | {
    "num_key_value_heads": 4, "n_routed_experts": 6, "num_experts_per_tok": 4, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 96, "n_shared_experts": 1, "q_lora_rank": 96,
    "kv_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 24,
    "first_k_dense_replace": 1,
}  # fmt: skip
DEEPSEEK.pop("head_dim")
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
BLOCKS = FP8 | {"weight_block_size": [48, 64]}
ROUTER = "re:.*(mlp|block_sparse_moe)\\.gate$"


def but(make: Any, *plain: str, **options: Any) -> Quantize:
    """Quantize all modules but the LM head, routers, and those whose names match a pattern."""

    def quantize(rng: np.random.Generator, name: str, rows: int, inputs: int) -> Any:
        if any(re.search(text, name) for text in (r"lm_head", r"\.gate$", *plain)):
            return None
        return make(rng, rows, inputs, **options)

    return quantize


def ints(format: str = "pack-quantized", **fields: Any) -> dict[str, Any]:
    return test_compressed_tensors.description(format, **fields) | {"ignore": ["lm_head", ROUTER]}


CASES: dict[str, tuple[str, dict[str, Any], Quantize, dict[str, Any]]] = {
    "deepseek fp8 blocks": ("DeepseekV3ForCausalLM", DEEPSEEK, but(test_fp8.module, kind="block"), BLOCKS),
    "qwen3 fp8 blocks": (
        "Qwen3MoeForCausalLM", QWEN3, but(test_fp8.module, kind="block"),
        BLOCKS | {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]},
    ),
    "qwen3 fp8 tensor": ("Qwen3MoeForCausalLM", QWEN3, but(test_fp8.module, kind="tensor"), FP8),
    "mixtral fp8 channel": (
        "MixtralForCausalLM", MIXTRAL, but(_fp8("output")),
        ints("float-quantized", type="float", num_bits=8, strategy="channel"),
    ),
    "qwen3 W4A16": ("Qwen3MoeForCausalLM", QWEN3, but(test_compressed_tensors.module, group=32), ints(group_size=32)),
    "qwen3 W4A16 asym": (
        "Qwen3MoeForCausalLM", QWEN3, but(test_compressed_tensors.module, group=64, symmetric=False), ints(group_size=64, symmetric=False)),
    "mixtral W8A8": (
        "MixtralForCausalLM", MIXTRAL, but(test_compressed_tensors.module, bits=8, packed=False),
        ints("int-quantized", num_bits=8, activations=TOKENS),
    ),
    "qwen3 awq": ("Qwen3MoeForCausalLM", QWEN3, but(test_awq.module),
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm", "modules_to_not_convert": ["gate"]}),
    "mixtral awq": ("MixtralForCausalLM", MIXTRAL, but(test_awq.module),
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm", "modules_to_not_convert": ["gate"]}),
    "qwen3 gptq": ("Qwen3MoeForCausalLM", QWEN3, but(test_gptq.module, group=32, symmetric=True),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}),
    "qwen3 gptq dynamic": ("Qwen3MoeForCausalLM", QWEN3, but(test_gptq.module, group=32),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False, "dynamic": {"-:.*mlp\\.gate$": {}}}),
    "mixtral gptq act-order": ("MixtralForCausalLM", MIXTRAL, but(test_gptq.module, group=32, ordered=True),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True}),
    "qwen3 auto-round": ("Qwen3MoeForCausalLM", QWEN3, but(test_gptq.module, group=32, minus_one=False),
        {"quant_method": "auto-round", "packing_format": "auto_round:gptqmodel", "bits": 4, "group_size": 32, "sym": False, "data_type": "int",
         "extra_config": {"model.layers.0.mlp.gate": {"bits": 16}, ".*1.mlp.gate$": {"bits": 16}, "lm_head": {"bits": 16}}}),
    "qwen3 nvfp4": ("Qwen3MoeForCausalLM", QWEN3, but(test_fp4.module, kind="nvfp4"), test_fp4.describe("nvfp4") | {"ignore": ["lm_head", ROUTER]}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_have_the_weights(name: str, tmp_path: Path) -> None:
    """Of all experts, of a rank's columns of them, and of a rank's experts."""
    architecture, sizes, quantize, description = CASES[name]
    folders = Folders(tmp_path, quantize, sizes, architecture, **description)
    folders.assert_same_weights()
    folders.assert_same_weights(Rank(1, 2))
    folders.assert_same_weights(Rank(1, 2, splits_experts=True))
    folders.assert_same_logits()
