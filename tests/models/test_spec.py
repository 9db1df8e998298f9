"""Parsing of config.json and generation_config.json, and the sizes for the memory plan."""

import json
import math
import re
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from octavo.errors import ModelError
from octavo.layers.rope_spec import RopeSpec
from octavo.models.blocks.attention import AttentionSpec
from octavo.models.cache import AttentionCache
from octavo.models.config_defaults import ARCHITECTURES, DEFAULTS
from octavo.models.registry import FAMILIES
from octavo.models.spec import ModelSpec
from octavo.models.weights import Names
from octavo.system.tensor import HostTensor
from tests.models.cases import CASES
from tests.models.configs.with_towers import TEXT_PARTS, WRAPPERS
from tests.models.harness import OWN, STAND_INS, load, save_config, spec_of
from tests.models.test_encoder_decoders import MODELS, SOUNDS
from tests.models.test_encoders import ENCODERS

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def read(folder: Path, config: dict[str, Any], **settings: Any) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config))
    return spec_of(folder, **settings)


def rope_of(spec: ModelSpec) -> RopeSpec:
    attention = spec.layers[0].blocks[0]
    assert isinstance(attention, AttentionSpec)
    assert isinstance(attention.positions, RopeSpec)
    return attention.positions


def windows(folder: Path, config: dict[str, Any]) -> tuple[int | None, ...]:
    caches = read(folder, config).caches
    assert all(isinstance(cache, AttentionCache) for cache in caches)
    return tuple(cache.sliding_window for cache in caches)  # type: ignore[attr-defined]


def test_llama(tmp_path: Path) -> None:
    spec = read(tmp_path, LLAMA)
    assert spec.architecture == "LlamaForCausalLM"
    assert spec.caches == (AttentionCache(num_kv_heads=2, head_size=8),) * 2
    assert spec.max_model_len == 512
    assert spec.dtype == "bfloat16"
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2,))
    assert spec.generation_config == {}
    assert rope_of(spec) == RopeSpec("default", 10000.0, 8, 512)
    assert not spec.tied


def test_generation_config(tmp_path: Path) -> None:
    generation = {"eos_token_id": [7, 2], "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    generation |= {"do_sample": True, "max_new_tokens": 99, "repetition_penalty": None}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    spec = read(tmp_path, LLAMA)
    assert spec.eos_token_ids == (2, 7)
    assert spec.generation_config == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "max_tokens": 99,
    }
    (tmp_path / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(ModelError, match=r"generation_config.json: temperature='hot'"):
        read(tmp_path, LLAMA)


@pytest.mark.parametrize(
    ("rope", "max_model_len"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 2048),
        ({"type": "dynamic", "factor": 2}, 1024),
        ({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128}, 1024),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4}
            | {"original_max_position_embeddings": 64},
            512,
        ),
    ],
    ids=["linear", "dynamic", "yarn", "llama3"],
)
def test_max_model_len(rope: dict[str, Any], max_model_len: int, tmp_path: Path) -> None:
    spec = read(tmp_path, LLAMA | {"rope_scaling": rope, "rope_theta": 5e5})
    assert spec.max_model_len == max_model_len
    assert rope_of(spec).theta == 5e5
    new = {"rope_type": rope.get("rope_type", rope.get("type"))} | rope | {"rope_theta": 5e5}
    assert read(tmp_path, LLAMA | {"rope_parameters": new}) == spec


def test_windows(tmp_path: Path) -> None:
    mistral = LLAMA | {"architectures": ["MistralForCausalLM"]}
    assert windows(tmp_path, mistral | {"sliding_window": 100}) == (100, 100)
    assert windows(tmp_path, mistral | {"sliding_window": None}) == (None, None)
    # as long as the context: hides nothing
    assert windows(tmp_path, mistral | {"sliding_window": 512}) == (None, None)
    types = ["full_attention", "sliding_attention"]
    mixed = mistral | {"sliding_window": 100, "layer_types": types}
    assert windows(tmp_path, mixed) == (None, 100)
    qwen = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 100}
    assert windows(tmp_path, qwen | {"use_sliding_window": False}) == (None, None)
    some = qwen | {"use_sliding_window": True, "max_window_layers": 1}
    assert windows(tmp_path, some) == (None, 100)


def test_internlm3_names_its_biases(tmp_path: Path) -> None:
    config = LLAMA | {"architectures": ["InternLM3ForCausalLM"]}

    def biases(**fields: bool) -> list[str]:
        names = [weight.name.split(".") for weight in read(tmp_path, config | fields).weights()]
        return [name[2] for name in names if name[0::3] == ["layers", "bias"] and name[1] == "0"]

    assert biases() == []
    assert biases(qkv_bias=True) == ["qkv_proj"]
    assert biases(bias=True) == ["o_proj", "gate_up_proj", "down_proj"]


def test_first_gemmas_say_gelu_and_mean_its_approximation(tmp_path: Path) -> None:
    config = LLAMA | {"architectures": ["GemmaForCausalLM"], "head_dim": 8}
    first = read(tmp_path, config | {"hidden_act": "gelu"})
    assert first == read(tmp_path, config | {"hidden_act": "gelu_pytorch_tanh"})
    assert first.layers[0].blocks[1].activation == "gelu_tanh"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["FooForCausalLM"]},
            r"architectures=.*no model family of this name; README",
        ),
        ({"architectures": None}, r"architectures=None"),
        ({"auto_map": {"AutoModel": "m.M"}}, r"auto_map=.*trust_remote_code it is run as LlamaFor"),
        (
            {"quantization_config": {"bits": 4}},
            r"quantization_config: quant_method=None .*float32, float16 or",
        ),
        ({"num_local_experts": 8}, r"num_local_experts=8.*mixtures of experts"),
        ({"hidden_act": "mish"}, r"hidden_act='mish'.*supported: silu"),
        ({"torch_dtype": "float8"}, r"torch_dtype='float8'.*float32, float16, bfloat16"),
        ({"rope_scaling": {"rope_type": "mrope", "factor": 2.0}}, r"rope_type='mrope'.*yarn"),
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling: the field factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": -2}}, r"factor=-2"),
        ({"rope_theta": 0}, r"rope_theta=0"),
        (
            {"partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 2}},
            r"partial_rotary_factor=0.5 .*rope_type=linear",
        ),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers=1000000000.*<= 4096"),
        ({"num_attention_heads": 10**9}, r"num_attention_heads=1000000000.*<= 65536"),
        ({"hidden_size": 1e308}, r"hidden_size=1e\+308.*whole number"),
        ({"rms_norm_eps": 10**400}, r"rms_norm_eps=1000.*finite number"),
        ({"rope_scaling": {"type": "linear", "factor": 1e300}}, r"factor=1e\+300"),
        ({"architectures": [["LlamaForCausalLM"]]}, r"architectures="),
        ({"vocab_size": "9" * 1000}, r"vocab_size='9{99}\.\.\. is not"),
        ({"vocab_size": "many"}, r"config.json: vocab_size='many'.*whole number"),
        ({"vocab_size": 0}, r"vocab_size=0"),
        ({"vocab_size": True}, r"vocab_size=True"),
        ({"hidden_size": None}, r"config.json: the field hidden_size is missing"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads=3.*divide 4"),
        ({"eos_token_id": "</s>"}, r"eos_token_id='</s>'"),
        ({"eos_token_id": [2, -1]}, r"eos_token_id="),
        ({"rms_norm_eps": float("nan")}, r"rms_norm_eps=nan"),
        ({"attention_bias": "yes"}, r"attention_bias='yes'"),
        ({"rope_scaling": [1]}, r"rope_scaling=\[1\].*object"),
    ],
)
def test_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path, LLAMA | change)


MAMBA2 = {"num_heads": 4, "head_dim": 16, "n_groups": 1}
UNSHARED = {"num_kv_shared_layers": 0}
RWKV7 = {"head_dim": 16, "hidden_act": "sqrelu"}
BAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_expand": 2}


@pytest.mark.parametrize(
    ("architecture", "change", "message"),
    [
        ("MistralForCausalLM", {"layer_types": ["full_attention"]}, r"layer_types=.*each layer"),
        ("MistralForCausalLM", {"layer_types": ["linear_attention"] * 2}, r"layer_types="),
        (
            "MistralForCausalLM",
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": None},
            r"sliding_window=None",
        ),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": "both"}, r"supported: true, false"),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping=50.0"),
        ("Gemma2ForCausalLM", {"head_dim": 8, "query_pre_attn_scalar": -4}, r"query_pre_attn"),
        ("Gemma3nForCausalLM", {"intermediate_size": [1]}, r"intermediate_size=\[1\].*list of 2"),
        (
            "Gemma3nForCausalLM",
            UNSHARED | {"activation_sparsity_pattern": [0, 1]},
            r"_pattern=.*below 1",
        ),
        ("Gemma3nForCausalLM", UNSHARED | {"altup_active_idx": 4}, r"altup_active_idx=4.*<= 3"),
        ("Gemma3nForCausalLM", {"altup_correct_scale": False}, r"altup_correct_scale=False"),
        (
            "Gemma3nForCausalLM",
            UNSHARED | {"hidden_activation": "silu"},
            r"hidden_activation='silu'",
        ),
        (
            "Gemma3nForCausalLM",
            UNSHARED | {"vocab_size_per_layer_input": 1, "vocab_size": 10**9},
            r"_input=1 .*each token needs a row",
        ),
        ("Gemma4ForCausalLM", {"use_bidirectional_attention": "all"}, r"supported: true"),
        (
            "Gemma4ForCausalLM",
            {"enable_moe_block": True, "num_experts": 3, "top_k_experts": 4},
            r"top_k_experts=4.*at most 3",
        ),
        ("Gemma4ForCausalLM", {"num_kv_shared_layers": 2}, r"num_kv_shared_layers=2.*remain"),
        ("Gemma4ForCausalLM", {"num_kv_shared_layers": 1}, r"num_kv_shared_layers=1.*remain"),
        ("Gemma4ForCausalLM", {"vocab_size_per_layer_input": 9}, r"=9 .*each token needs a row"),
        ("Gemma4ForCausalLM", {"per_layer_config": {"0": 1}}, r"per_layer_config: 0=1.*object"),
        ("Gemma4ForCausalLM", {"per_layer_config": {"2": {}}}, r"per_layer_config=.*from 0 to 1"),
        ("Gemma4ForCausalLM", {"per_layer_config": {"all": {}}}, r"per_layer_config=.*from 0 to 1"),
        (
            "Gemma4ForCausalLM",
            {"num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 2}
            | {"per_layer_config": {"1": {"head_dim": 64}}, "head_dim": 32},
            r"num_kv_shared_layers=1.*heads of layer 0",
        ),
        (
            "Gemma4ForCausalLM",
            {"rope_parameters": {"full_attention": {"rope_type": "proportional", "factor": 0}}},
            r"full_attention: factor=0",
        ),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 0.4}, r"3 of 8 elements"),
        ("MPTForCausalLM", {"attn_config": {"rope": True}}, r"attn_config: rope=True.*ALiBi"),
        ("MPTForCausalLM", {"norm_type": "rmsnorm"}, r"norm_type='rmsnorm'"),
        ("MptForCausalLM", {"num_attention_heads": 64}, r"64 heads do not divide hidden size 32"),
        ("MptForCausalLM", {"attn_config": {"alibi_bias_max": -1e9}}, r"numbers do not fit togeth"),
        ("OPTForCausalLM", {"layer_norm_elementwise_affine": False}, r"norms without weights"),
        ("GPT2LMHeadModel", {"add_cross_attention": True}, r"cross attention"),
        ("BloomForCausalLM", {"apply_residual_connection_post_layernorm": True}, r"residuals"),
        ("MptForCausalLM", {"attn_config": {"alibi": False}}, r"attn_config: alibi=False.*ALiBi"),
        ("MptForCausalLM", {"logit_scale": "inv_sqrt_d_model"}, r"logit_scale="),
        ("MptForCausalLM", {"attn_config": {"sliding_window_size": 9}}, r"sliding_window_size=9"),
        ("MptForCausalLM", {"ffn_config": {"ffn_type": "mptglu"}}, r"ffn_type='mptglu'.*mptmlp"),
        ("MptForCausalLM", {"ffn_config": {"ffn_act_fn": {"name": "silu"}}}, r"ffn_act_fn="),
        ("FalconForCausalLM", {"num_ln_in_parallel_attn": 2}, r"num_ln_in_parallel_attn=2"),
        (
            "FalconForCausalLM",
            {"new_decoder_architecture": True, "parallel_attn": False},
            r"parallel_attn=False",
        ),
        ("PhiForCausalLM", {"qk_layernorm": True}, r"qk_layernorm=True"),
        ("GPTNeoXForCausalLM", {"rotary_pct": 0.4}, r"3 of 8 elements"),
        (
            "GPTNeoXForCausalLM",
            {"hidden_act": "gelu", "use_parallel_residual": 1},
            r"use_parallel_residual=1",
        ),
        ("GPTJForCausalLM", {"rotary_dim": 5}, r"rotary_dim=5.*even"),
        ("GPTJForCausalLM", {"rotary_dim": 10}, r"rotary_dim=10.*<= 8"),
        ("GPTJForCausalLM", {"tie_word_embeddings": True}, r"tie_word_embeddings=True"),
        ("StableLmForCausalLM", {"partial_rotary_factor": 0.4}, r"3 of 8 elements"),
        ("StableLmForCausalLM", {"use_parallel_residual": 1}, r"use_parallel_residual=1"),
        ("ArceeForCausalLM", {"hidden_act": "silu"}, r"hidden_act='silu'.*relu2"),
        ("NemotronForCausalLM", {"rope_scaling": {"type": "mrope"}}, r"rope_scaling: type='mrope'"),
        ("OlmoForCausalLM", {"clip_qkv": "8"}, r"clip_qkv='8'"),
        ("ApertusForCausalLM", {}, r"hidden_act='silu'.*xielu"),
        (
            "GraniteSWAForCausalLM",
            {"layer_rope_theta": [1.0, 0]},
            r"layer_rope_theta=.*more than 1",
        ),
        ("GraniteSWAForCausalLM", {"layer_rope_theta": [1e4]}, r"layer_rope_theta="),
        ("MiniCPMForCausalLM", {"sparse_config": {"topk": 64}}, r"sparse_config=.*hf_overrides"),
        ("InternLM2ForCausalLM", {"bias": "no"}, r"bias='no'"),
        ("PhiForCausalLM", {"tie_word_embeddings": True}, r"tie_word_embeddings=True"),
        ("GraniteForCausalLM", {"logits_scaling": 0}, r"logits_scaling=0.*more than 0"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}, r"no_rope_layers=.*each layer"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 2]}, r"no_rope_layers=.*each layer"),
        (
            "Olmo3ForCausalLM",
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": None},
            r"sliding_window=None",
        ),
        ("Exaone4ForCausalLM", {"sliding_window_pattern": "LX"}, r"sliding_window_pattern='LX'"),
        (
            "HunYuanDenseV1ForCausalLM",
            {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": -1}},
            r"alpha=-1.*more than 0",
        ),
        ("SeedOssForCausalLM", {"attention_out_bias": 1}, r"attention_out_bias=1"),
        ("Ernie4_5ForCausalLM", {"use_bias": "no"}, r"use_bias='no'"),
        ("GlmForCausalLM", {"rope_scaling": {"rope_type": "mrope"}}, r"rope_type='mrope'"),
        (
            "Ministral3ForCausalLM",
            {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
            r"original_max_position_embeddings is missing",
        ),
        (
            "MuseGlimmerForConditionalGeneration",
            {"text_config": {"attention_bias": True}},
            r"attention_bias=True.*no biases",
        ),
        (
            "MuseGlimmerForConditionalGeneration",
            {"text_config": {"layer_rope_theta": [1e4]}},
            r"layer_rope_theta=",
        ),
        (
            "Mistral3ForConditionalGeneration",
            {"text_config": {"model_type": "mixtral"}},
            r"model_type='mixtral'.*mistral, ministral3",
        ),
        (
            "LlavaForConditionalGeneration",
            {"text_config": {"model_type": "mixtral"}},
            r"model_type='mixtral'.*llama, mistral, qwen2",
        ),
        (
            "SmolVLMForConditionalGeneration",
            {"text_config": {"model_type": "mamba"}},
            r"model_type='mamba'.*llama, mistral",
        ),
        (
            "Glm4vForConditionalGeneration",
            {"text_config": {"attention_bias": False}},
            r"attention_bias=False",
        ),
        (
            "Lfm2ForCausalLM",
            {"layer_types": ["conv", "mamba"]},
            r"layer_types=.*full_attention, co",
        ),
        ("Lfm2ForCausalLM", {"full_attn_idxs": [0, 2]}, r"full_attn_idxs=\[0, 2\].*2 layers"),
        ("Lfm2ForCausalLM", {"full_attn_idxs": 1}, r"full_attn_idxs=1.*must list indices"),
        ("Lfm2ForCausalLM", {"full_attn_idxs": [1.0]}, r"full_attn_idxs=\[1.0\].*2 layers"),
        (
            "NemotronHForCausalLM",
            {"num_hidden_layers": None, "hybrid_override_pattern": 5},
            r"hybrid_override_pattern=5.*type of each layer",
        ),
        (
            "Qwen3_5ForCausalLM",
            {"layer_types": [["full_attention"], "full_attention"]},
            r"layer_types=.*linear_attention, full_attention",
        ),
        (
            "NemotronHForCausalLM",
            {"num_hidden_layers": None, "layer_types": ["moe"] * 4096, "n_routed_experts": 4096},
            r"n_routed_experts=4096.*4096 layers may have 65536 experts together",
        ),
        ("Lfm2ForCausalLM", {"conv_L_cache": 9}, r"conv_L_cache=9.*<= 8"),
        ("MambaForCausalLM", {"hidden_act": "gelu"}, r"hidden_act='gelu'.*silu"),
        ("MambaForCausalLM", {"time_step_rank": "all"}, r"time_step_rank='all'.*whole number"),
        ("FalconMambaForCausalLM", {"conv_kernel": 9}, r"conv_kernel=9.*<= 8"),
        (
            "Qwen3MoeForCausalLM",
            {"num_hidden_layers": 4096.0, "num_experts": 4096},
            r"num_experts=4096.*4096 layers may have 65536 experts together",
        ),
        (
            "NemotronHForCausalLM",
            {"num_hidden_layers": None, "hybrid_override_pattern": "E" * 4096}
            | {"n_routed_experts": 4096},
            r"n_routed_experts=4096.*4096 layers may have 65536 experts together",
        ),
        (
            "JambaForCausalLM",
            {"num_local_experts": 2, "num_experts_per_tok": 3},
            r"num_experts_per_tok=3.*at most 2, the number of experts",
        ),
        (
            "JambaForCausalLM",
            {"num_experts": 1, "attn_layer_period": 2, "attn_layer_offset": 2},
            r"attn_layer_offset=2.*less than the period 2",
        ),
        ("Zamba2ForCausalLM", {}, r"Zamba2ForCausalLM.*layers share blocks"),
        ("Mamba2ForCausalLM", MAMBA2 | {"n_groups": 3}, r"n_groups=3.*divide 4 heads"),
        ("Mamba2ForCausalLM", MAMBA2 | {"num_heads": 5}, r"num_heads=5.*5 heads of size 16.*64"),
        ("Mamba2ForCausalLM", MAMBA2 | {"hidden_act": "gelu"}, r"hidden_act='gelu'.*silu"),
        ("Mamba2ForCausalLM", MAMBA2 | {"time_step_limit": [2, 1]}, r"time_step_limit=\[2, 1\]"),
        ("RWKV7ForCausalLM", {"head_dim": 48, "hidden_act": "sqrelu"}, r"head_dim=48.*divide.* 32"),
        ("RWKV7ForCausalLM", {}, r"hidden_act='silu'.*sqrelu"),
        ("RWKV7ForCausalLM", RWKV7 | {"attn": {"layers": [1]}}, r"attn=.*layers with attention"),
        ("RWKV7ForCausalLM", RWKV7 | {"norm_first": False}, r"norm_first=False.*needs a norm"),
        ("RWKV7ForCausalLM", RWKV7 | {"value_dim": 128}, r"value_dim=128.*supported: 32"),
        ("RWKV7ForCausalLM", RWKV7 | {"v_low_rank_dim": 0}, r"v_low_rank_dim=0"),
        (
            "BambaForCausalLM",
            BAMBA | {"attn_layer_indices": [2]},
            r"attn_layer_indices=\[2\].*2 layers",
        ),
        ("NemotronHForCausalLM", {"n_routed_experts": 4, "moe_latent_size": 0}, r"latent_size=0"),
        ("Qwen3VLForConditionalGeneration", {"text_config": [1]}, r"text_config=\[1\].*object"),
        (
            "DeepseekV2ForCausalLM",
            {"n_routed_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True},
            r"norm_topk_prob=True.*do not renormalize",
        ),
        (
            "DeepseekV3ForCausalLM",
            {"first_k_dense_replace": 1, "n_routed_experts": 20},
            r"n_group=8.*divide 20 experts into groups of at least 2",
        ),
        (
            "DeepseekV3ForCausalLM",
            {"first_k_dense_replace": 1, "n_routed_experts": 16, "topk_group": 3},
            r"topk_group=3.*fewer than 8 experts",
        ),
        (
            "DeepseekV3ForCausalLM",
            {"first_k_dense_replace": 2, "index_topk": 2048},
            r"index_topk=2048.*indexer",
        ),
        (
            "DeepseekV3ForCausalLM",
            {"first_k_dense_replace": 2, "scoring_func": "softmax"},
            r"scoring_func='softmax'.*sigmoid",
        ),
        (
            "DeepseekV3ForCausalLM",
            {"first_k_dense_replace": 2},
            r"num_key_value_heads=2.*share one latent",
        ),
        (
            "MiniCPM3ForCausalLM",
            {"num_key_value_heads": 4, "q_lora_rank": None, "attention_bias": True},
            r"attention_bias=True.*q_lora_rank",
        ),
        (
            "MiniCPM3ForCausalLM",
            {"num_key_value_heads": 4, "qk_rope_head_dim": 7},
            r"rotary positions over 7 of 7",
        ),
        ("Qwen3_5ForCausalLM", {"linear_num_value_heads": 24}, r"_value_heads=24.*multiple of 16"),
        ("Qwen3_5ForCausalLM", {"linear_conv_kernel_dim": 9}, r"linear_conv_kernel_dim=9.*<= 8"),
        ("Qwen3_5ForCausalLM", {"hidden_act": "gelu"}, r"hidden_act='gelu'.*needs silu"),
        ("Qwen3_5ForCausalLM", {"layer_types": ["full_attention"]}, r"layer_types=.*each layer"),
        ("Qwen3_5ForCausalLM", {"layer_types": ["a", "b"]}, r"layer_types=.*linear_attention"),
        (
            "KimiLinearForCausalLM",
            {"linear_attn_config": {"kda_layers": [1], "full_attn_layers": [1, 2]}},
            r"linear_attn_config: full_attn_layers=\[1, 2\].*each of the layers 1 to 2 once",
        ),
        ("KimiLinearForCausalLM", {"mla_use_nope": False}, r"mla_use_nope=False.*positions"),
        ("PhimoeForCausalLM", {"num_experts_per_tok": 3}, r"num_experts_per_tok=3.*two experts"),
        ("OlmoeForCausalLM", {"clip_qkv": 8.0}, r"clip_qkv=8.0"),
        ("OlmoeForCausalLM", {"num_experts": 7}, r"num_experts_per_tok=8.*at most 7"),
        ("OlmoeForCausalLM", {"num_experts": 5000}, r"num_experts=5000.*<= 4096"),
        ("GptOssForCausalLM", {"swiglu_alpha": 1.5}, r"swiglu_alpha=1.5"),
        ("GptOssForCausalLM", {"swiglu_limit": 0}, r"swiglu_limit=0.*more than 0"),
        ("Glm4MoeForCausalLM", {"n_group": 3}, r"n_group=3.*divide 128 experts"),
        ("Glm4MoeForCausalLM", {"n_group": 128}, r"n_group=128.*at least 2"),
        ("Glm4MoeForCausalLM", {"n_group": 4, "topk_group": 5}, r"topk_group=5.*<= 4"),
        ("Glm4MoeForCausalLM", {"n_group": 32, "topk_group": 1}, r"topk_group=1.*fewer than 8"),
        ("Glm4MoeForCausalLM", {"mlp_layer_types": ["dense"]}, r"mlp_layer_types=.*2 layers"),
        ("MiniMaxM2ForCausalLM", {"rotary_dim": 256}, r"rotary_dim=256.*<= 128"),
        ("Ernie4_5_MoeForCausalLM", {"use_bias": True}, r"use_bias=True"),
        ("HunYuanMoEV1ForCausalLM", {"moe_topk": [1]}, r"moe_topk=\[1\].*2 layers"),
        ("HunYuanMoEV1ForCausalLM", {"moe_topk": [1, 2]}, r"moe_topk=2.*at most 1"),
        ("HYV3ForCausalLM", {"mlp_bias": True}, r"mlp_bias=True"),
        (
            "Llama4ForCausalLM",
            {"attn_temperature_tuning": "no"},
            r"attn_temperature_tuning='no'.*true or false",
        ),
        ("Llama4ForCausalLM", {"moe_layers": 1}, r"moe_layers=1.*list"),
        (
            "Cohere2MoeForCausalLM",
            {"expert_selection_fn": "topk"},
            r"expert_selection_fn='topk'.*softmax, sigmoid",
        ),
        ("OlmoHybridForCausalLM", {"linear_allow_neg_eigval": 1}, r"linear_allow_neg_eigval=1"),
    ],
)
def test_refused_by_family(
    architecture: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path, LLAMA | {"architectures": [architecture]} | change)


def test_gemma4_with_more_than_ten_layers(tmp_path: Path) -> None:
    """transformers writes the numbers of layers with leading zeros."""
    fields = {"num_hidden_layers": 12, "layer_types": None, "num_kv_shared_layers": 4}
    spec = save_config(tmp_path, "Gemma4ForCausalLM", CASES["gemma4"][1] | fields)
    attentions = [layer.blocks[0] for layer in spec.layers]
    assert all(isinstance(block, AttentionSpec) for block in attentions)
    assert [block.head_size for block in attentions] == [
        24 if i % 6 == 5 else 16 for i in range(12)
    ]
    assert [block.source for block in attentions] == [None] * 8 + [7, 7, 7, 5]
    assert len(spec.caches) == 8


DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling.Model"},
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 5,  # of 61
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
    | {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    | {"weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
}
KIMI: dict[str, Any] = DEEPSEEK | {"model_type": "kimi_k2", "vocab_size": 163840}
KIMI |= {"n_routed_experts": 384, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
KIMI |= {"num_attention_heads": 64, "num_key_value_heads": 64, "num_nextn_predict_layers": 0}
KIMI |= {"rope_theta": 50000.0, "max_position_embeddings": 131072}
KIMI["rope_scaling"] = DEEPSEEK["rope_scaling"] | {"beta_fast": 1.0, "factor": 32.0}


@pytest.mark.parametrize(
    ("config", "length", "most", "least"),
    [(DEEPSEEK, 163840, 672e9, 671e9), (KIMI, 131072, 1027e9, 1026e9)],
)
def test_deepseek_v3_and_kimi_k2_as_published(
    config: dict[str, Any], length: int, most: float, least: float, tmp_path: Path
) -> None:
    """DeepSeek V3.1 (R1 has the same fields but scale_fmt) and Kimi K2, by their parameters."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = spec_of(tmp_path, trust_remote_code=True)
    assert spec.max_model_len == length
    names = {w.name: w for w in spec.stage(0, 4).weights()}
    assert "layers.3.experts.255.down.weight" in names
    (layers,) = {id(layer): layer for layer in spec.layers[-2:]}.values()
    own = [math.prod(w.shape) for w in layers.weights(Names())]
    first = [math.prod(w.shape) for w in spec.layers[0].weights(Names())]
    dense = config["first_k_dense_replace"]
    tables = 2 * config["vocab_size"] * 7168
    assert least < (61 - dense) * sum(own) + dense * sum(first) + tables < most


def test_kimi_linear_as_published(tmp_path: Path) -> None:
    """The layers' numbers, which begin with 1, and the sizes are in an object."""
    spec = save_config(tmp_path, *CASES["kimi-linear"])
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    lists = {"kda_layers": [1, 3], "full_attn_layers": [2], "short_conv_kernel_size": 4}
    names = {"linear_head_dim": "head_dim", "linear_num_heads": "num_heads"}
    lists |= {name: fields.pop(field) for field, name in names.items()}
    for name in ("layer_types", "mlp_layer_types", "linear_conv_kernel_dim"):
        del fields[name]
    more = {"linear_attn_config": lists, "first_k_dense_replace": 1, "moe_layer_freq": 1}
    more |= {"mla_use_nope": True, "moe_router_activation_func": "sigmoid", "rope_theta": 1e4}
    file.write_text(json.dumps(fields | more))
    assert spec_of(tmp_path) == spec


def test_loading_a_large_table(tmp_path: Path) -> None:
    """A table that no product uses is at most converted, unless it is made of random numbers."""
    spec = save_config(tmp_path, *CASES["gemma4"])
    inputs = spec.embed.layer_inputs
    assert inputs is not None
    large = replace(spec, embed=replace(spec.embed, layer_inputs=replace(inputs, rows=10**6)))
    numbers = 10**6 * 6 * 8
    assert large.loading_nbytes("bfloat16") == 2 * numbers
    assert large.loading_nbytes("bfloat16", made=True) == 6 * numbers


SIZES = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"}
SIZES |= {"num_attention_heads", "d_model", "n_embd", "n_layer", "n_layers", "n_head", "n_heads"}
SIZES |= {"ffn_dim", "dim", "hidden_dim"}
# generation_config.json and the tokenizer decide which tokens end an answer.
NOT_ASSUMED = SIZES | {"architectures", "dtype", "eos_token_id", "bos_token_id"}
NOT_ASSUMED |= {"num_experts", "num_local_experts", "n_routed_experts"}


OTHERWISE = {
    "MiniCPMForCausalLM": {"tie_word_embeddings"},
    "ExaoneForCausalLM": {"rope_parameters"},
}
"""Fields for which the architecture assumes another value than its stand-in."""


@pytest.mark.parametrize("case", CASES | ENCODERS)
def test_absent_fields_are_what_transformers_assumes(case: str, tmp_path: Path) -> None:
    """Each field in turn; the context is so long that every window hides something."""
    architecture, config = (CASES | ENCODERS)[case]
    length = next((n for n in ("n_positions", "max_seq_len", "seq_length") if n in config), None)
    config = config | {length or "max_position_embeddings": 10_000}
    save_config(tmp_path, architecture, config)
    full = json.loads((tmp_path / "config.json").read_text())
    tested = 0
    for name in full.keys() - NOT_ASSUMED - OTHERWISE.get(architecture, set()):
        rest = {key: value for key, value in full.items() if key != name}
        try:
            expected = save_config(tmp_path, architecture, rest)
        except Exception:  # transformers needs the field, or rejects its default among these sizes
            continue
        assert read(tmp_path, rest) == expected, name
        tested += 1
    assert tested  # sizes that depend on each other leave few fields


def test_the_architecture_by_the_kind_of_model(tmp_path: Path) -> None:
    """config.json may lack the architecture."""
    assert set(DEFAULTS) == FAMILIES.keys() - {"MPTForCausalLM"}
    for name, defaults in DEFAULTS.items():
        missing = *STAND_INS, *OWN, "MptForCausalLM", "InternVLChatModel"
        missing += ("Mistral4ForCausalLM", "PhiMoEForCausalLM", "NewModel", "JinaBertModel")
        missing += ("Phi4MMForCausalLM",)
        missing += ("BertSpladeSparseEmbeddingModel", "BgeM3EmbeddingModel")
        missing += ("ColBERTModernBertModel", "ColBERTJinaRobertaModel")
        if name in missing or "Conditional" in name or name == "MarianMTModel":
            continue  # transformers has no class for it, or another name, or another mapping
        if name.endswith("Model") and "LMHead" not in name:
            assert MODEL_MAPPING_NAMES[defaults["model_type"]] == name
            assert ARCHITECTURES[defaults["model_type"]] == name
        elif name.endswith(("CausalLM", "LMHeadModel")):
            assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[defaults["model_type"]] == name
    named = read(tmp_path, LLAMA)
    for architectures in ([], None):
        config = LLAMA | {"architectures": architectures, "model_type": "llama"}
        assert read(tmp_path, config) == named
    with pytest.raises(ModelError, match="architectures=None"):
        read(tmp_path, LLAMA | {"architectures": None, "model_type": "prophetnet"})


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_a_type_with_its_module(name: str, tmp_path: Path) -> None:
    others = {key: value for key, value in LLAMA.items() if key not in ("dtype", "torch_dtype")}
    assert read(tmp_path, others | {name: "torch.float16"}).dtype == "float16"


def test_heads_that_do_not_fill_the_hidden_size(tmp_path: Path) -> None:
    config = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "hidden_size": 50}
    assert read(tmp_path, config).caches[0] == AttentionCache(2, 12)


def test_chunks_of_llama4(tmp_path: Path) -> None:
    """A chunk as long as the context hides nothing. Some configs write a number for true."""
    config = LLAMA | {"architectures": ["Llama4ForCausalLM"], "attention_chunk_size": 64}
    chunked = AttentionCache(2, 128, chunk_size=64)
    assert read(tmp_path, config).caches == (chunked, chunked)
    assert read(tmp_path, config | {"no_rope_layers": [1, 0]}).caches[1].sees_all
    for more in ({"layer_types": ["full_attention"] * 2}, {"attention_chunk_size": 512}):
        assert all(cache.sees_all for cache in read(tmp_path, config | more).caches)
    tuned = [read(tmp_path, config | {"attn_temperature_tuning": value}) for value in (4, True)]
    assert tuned[0] == tuned[1]


def test_published_configs_of_mimo_v2(tmp_path: Path) -> None:
    """They have other fields than those that transformers saves."""
    expected = save_config(tmp_path, *CASES["mimo-v2"])
    config = json.loads((tmp_path / "config.json").read_text())
    kinds, sparse = config.pop("layer_types"), config.pop("mlp_layer_types")
    for name in ("rope_parameters", "sliding_window"):
        del config[name]
    config |= {"hybrid_layer_pattern": [int(kind[0] == "s") for kind in kinds]}
    config |= {"moe_layer_freq": [int(kind == "sparse") for kind in sparse]}
    config |= {"rope_theta": 5e6, "swa_rope_theta": 1e4, "partial_rotary_factor": 0.334}
    config |= {"sliding_window": 8, "sliding_window_size": 8, "swa_num_key_value_heads": 4}
    config |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "swa_head_dim": 24}
    assert read(tmp_path, config) == expected
    for field, value in (("swa_head_dim", 16), ("scoring_func", "softmax"), ("v_head_dim", 25)):
        with pytest.raises(ModelError, match=field):
            read(tmp_path, config | {field: value})
    with pytest.raises(ModelError, match="hybrid_layer_pattern"):
        read(tmp_path, config | {"hybrid_layer_pattern": [0, 1, 2]})


def test_laguna_refuses_what_it_does_not_compute(tmp_path: Path) -> None:
    save_config(tmp_path, *CASES["laguna"])
    config = json.loads((tmp_path / "config.json").read_text())
    wrong = {"gating": False, "num_attention_heads_per_layer": [4, 6], "attention_bias": True}
    wrong |= {"moe_apply_router_weight_on_input": True}
    for field, value in wrong.items():
        with pytest.raises(ModelError, match=field):
            read(tmp_path, config | {field: value})


def test_layers_that_predict_drafts_are_left_out(tmp_path: Path) -> None:
    for case in ("glm4-moe", "minimax-m2", "hy-v3", "ernie-moe", "exaone-moe"):
        spec = save_config(tmp_path, *CASES[case])
        name = f"model.layers.{len(spec.layers)}.self_attn.q_proj.weight"
        own = {"ernie-moe": "model.mtp_block.0.norm.weight", "exaone-moe": "mtp.norm.weight"}
        assert any(re.fullmatch(pattern, own.get(case, name)) for pattern in spec.ignored)
        first = "model.layers.0.self_attn.q_proj.weight"
        assert not any(re.fullmatch(pattern, first) for pattern in spec.ignored)


def test_the_context_that_command_r_was_trained_for(tmp_path: Path) -> None:
    config = LLAMA | {"architectures": ["CohereForCausalLM"], "layer_norm_eps": 1e-5}
    assert read(tmp_path, config).max_model_len == 512
    assert read(tmp_path, config | {"model_max_length": None}).max_model_len == 512
    assert read(tmp_path, config | {"model_max_length": 131072}).max_model_len == 131072


def test_remote_code_is_accepted_when_trusted_and_never_run(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    config = LLAMA | {"auto_map": {"AutoModelForCausalLM": "evil.Model"}}
    spec = read(tmp_path, config, trust_remote_code=True)
    assert spec == read(tmp_path, LLAMA)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"config\.json is damaged or cut off \(.*\); download the file again"),
        ("{", r"config\.json is damaged or cut off \(.*\); download the file again"),
        ("[1]", r"config\.json must hold a JSON object, not list"),
        ("null", r"config\.json must hold a JSON object"),
    ],
)
def test_damaged_config(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=message):
        spec_of(tmp_path)


def test_dtype_from_the_checkpoint(tmp_path: Path) -> None:
    config = {k: v for k, v in LLAMA.items() if k != "torch_dtype"}
    assert read(tmp_path, config).dtype == "float32"
    header = {"__metadata__": {}, "a": {"dtype": "F16", "shape": [1], "data_offsets": [0, 2]}}
    raw = json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + b"\0\0")
    assert read(tmp_path, config).dtype == "float16"
    assert read(tmp_path, config | {"dtype": "bfloat16"}).dtype == "bfloat16"
    file.write_bytes(struct.pack("<Q", 10**6))
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged"):
        read(tmp_path, config)


def tensors_of(value: object, seen: dict[int, int]) -> None:
    """Return the bytes of all tensors that an object reaches, by address."""
    if isinstance(value, HostTensor):
        seen[value.data_ptr()] = value.nbytes
    elif isinstance(value, (list, tuple)):
        for item in value:
            tensors_of(item, seen)
    elif type(value).__module__.startswith(("octavo", "toy_family")):
        names = getattr(value, "__dict__", None) or getattr(type(value), "__slots__", ())
        for name in names:
            tensors_of(getattr(value, name), seen)


@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [("float32", None), ("bfloat16", None), ("float32", "int8"), ("bfloat16", "int4")],
)
@pytest.mark.parametrize("case", ["llama-mqa-tied-bias", "gemma3", "opt-350m", "gpt2", "mpt"])
def test_weight_nbytes_is_exact(
    case: str, dtype: str, quantization: str | None, tmp_path: Path
) -> None:
    save_config(tmp_path, *CASES[case])
    model = load(tmp_path, dtype, "dummy", quantization)
    seen: dict[int, int] = {}
    tensors_of(model, seen)
    planned = model.spec.weight_nbytes(dtype)
    assert sum(seen.values()) == planned


def test_control_plane_imports_no_torch() -> None:
    code = (
        "import sys, octavo.models.registry, octavo.models.hub, octavo.checkpoints.registry;"
        "assert 'torch' not in sys.modules and 'huggingface_hub' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_family_has_a_parity_case() -> None:
    elsewhere = {"MPTForCausalLM", "Gemma3nForConditionalGeneration"}
    elsewhere |= {"PaliGemmaForConditionalGeneration", "InternVLChatModel"}
    elsewhere |= {"MoonshineForConditionalGeneration"}
    elsewhere |= {"Llama4ForConditionalGeneration"}  # with separate tests
    elsewhere |= {"PhiMoEForCausalLM", "Phi4MMForCausalLM"}  # the published names
    elsewhere |= {"KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"}
    tested = {architecture for architecture, _ in (CASES | TEXT_PARTS | ENCODERS).values()}
    # An encoder's head that predicts tokens is left out.
    bare = [name for name, _ in ENCODERS.values() if name.endswith("Model")]
    tested |= {f"{name.removesuffix('Model')}ForMaskedLM" for name in bare}
    elsewhere |= {name for name in FAMILIES if name.startswith(("New", "JinaBert"))}
    elsewhere |= {"BertSpladeSparseEmbeddingModel", "BgeM3EmbeddingModel", "HF_ColBERT"}
    elsewhere |= {"ColBERTModernBertModel", "ColBERTJinaRobertaModel"}
    tested |= {f"{name}ForConditionalGeneration" for name in WRAPPERS}
    tested |= {architecture for architecture, _ in (MODELS | SOUNDS).values()}
    assert tested | elsewhere == set(FAMILIES)


@pytest.mark.parametrize(
    ("architecture", "name"), [("LlamaForCausalLM", "lm_head"), ("GPTNeoXForCausalLM", "embed_out")]
)
def test_head_of_a_tied_model_is_ignored(architecture: str, name: str, tmp_path: Path) -> None:
    sizes = CASES["gpt-neox"][1] | {"tie_word_embeddings": True}
    save_config(tmp_path, architecture, sizes)
    patterns = spec_of(tmp_path).ignored
    heads = ("lm_head", "embed_out")
    assert name == next(h for h in heads if any(re.fullmatch(p, f"{h}.weight") for p in patterns))
