"""Mixtures, latent attention and recurrent states: tokens of small random models, as on a CPU."""

from __future__ import annotations

import json
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from gpu.base import LLAMA, Bench
from gpu.correctness import numbers
from gpu.engines import engine, generate, random_ids
from octavo import LLM, SamplingParams
from octavo.checkpoints.registry import open_checkpoint
from octavo.models.registry import read_spec

EXPERTS = {"num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 96}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 128,
    "q_lora_rank": None,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 32,
    "v_head_dim": 48,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixture": ("Qwen3MoeForCausalLM", {"model_type": "qwen3_moe", "head_dim": 64} | EXPERTS),
    "latent attention and mixture": (
        "DeepseekV3ForCausalLM",
        {"model_type": "deepseek_v3", "n_routed_experts": 12, "n_shared_experts": 1}
        | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
        | {"first_k_dense_replace": 1, "rope_interleave": True}
        | EXPERTS
        | LATENT,
    ),
    "gated delta rule": (
        "Qwen3_5ForCausalLM",
        {"model_type": "qwen3_5_text", "head_dim": 64, "linear_num_key_heads": 2}
        | {"linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
        | {"linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "Mamba-2": (
        "Mamba2ForCausalLM",
        {"model_type": "mamba2", "num_heads": 8, "head_dim": 64, "n_groups": 1, "expand": 2}
        | {"state_size": 64, "conv_kernel": 4, "layer_norm_epsilon": 1e-5},
    ),
    "Mamba-1": (
        "MambaForCausalLM",
        {"model_type": "mamba", "state_size": 16, "expand": 2, "conv_kernel": 4}
        | {"layer_norm_epsilon": 1e-5, "time_step_rank": 16, "intermediate_size": 512},
    ),
    "short convolution": (
        "Lfm2ForCausalLM",
        {"model_type": "lfm2", "conv_L_cache": 3, "block_auto_adjust_ff_dim": False}
        | {"layer_types": ["conv", "full_attention"], "norm_eps": 1e-5},
    ),
    "RWKV 7": (
        "RWKV7ForCausalLM",
        {
            "model_type": "rwkv7",
            "hidden_act": "sqrelu",
            "head_dim": 64,
            "decay_low_rank_dim": 16,
            "norm_eps": 1e-5,
        }
        | {"gate_low_rank_dim": 32, "a_low_rank_dim": 16, "v_low_rank_dim": 16},
    ),
}
"""Architectures, and what their configs add to those of `Sizes.tiny`."""
BOUNDS = {"float32": 1e-3, "bfloat16": 0.5}
"""Largest difference of logprobs from the CPU's in float32; in bfloat16 only of gross errors."""


def write_family(folder: str, name: str, tiny: dict[str, Any]) -> str:
    """Write a family's model with two layers and random weights; return the folder."""
    architecture, changes = FAMILIES[name]
    shape = LLAMA | tiny | {"num_hidden_layers": 2, "architectures": [architecture]} | changes
    Path(folder, "config.json").write_text(json.dumps(shape))
    spec = read_spec(open_checkpoint(Path(folder), "dummy"))
    torch.manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for weight in spec.weights():
        for source in weight.sources:
            if source.dummy is not None:
                tensors[source.name] = torch.full(source.shape, source.dummy)
            elif not source.optional:  # larger numbers than the engine's own: every block counts
                tensors[source.name] = 0.1 * torch.randn(source.shape)
    save_file(tensors, Path(folder, "model.safetensors"))
    return folder


def check_families(bench: Bench) -> None:
    """Check each family; an error of one becomes a row, and the others are still checked."""
    for name in bench.sizes.families:
        try:
            check_family(bench, name)
        except Exception as error:
            traceback.print_exc()
            bench.add(name, f"{type(error).__name__}: {error}", "runs", False)


def check_family(bench: Bench, name: str) -> None:
    """Compare a family's tokens with those of the CPU, and a request alone with among others."""
    sizes = bench.sizes
    prompts = [random_ids(n, seed=n, vocab=sizes.tiny["vocab_size"]) for n in sizes.prompts]
    params = SamplingParams(temperature=0, max_tokens=sizes.answer, logprobs=1, ignore_eos=True)
    settings: dict[str, Any] = {
        "max_num_seqs": len(prompts),
        "max_num_batched_tokens": 256,
    }
    with tempfile.TemporaryDirectory() as folder:
        model = write_family(folder, name, sizes.tiny)
        on_cpu = LLM(
            model=model,
            skip_tokenizer_init=True,
            device="cpu",
            dtype="float32",
            **settings,
        )
        try:
            expected = generate(on_cpu, prompts, params)
        finally:
            on_cpu.shutdown()
        for dtype in ("float32", "bfloat16"):
            with engine(bench, model, dtype=dtype, batch_invariant=True, **settings) as llm:
                answers = generate(llm, prompts, params)
                alone = generate(llm, prompts[-1:], params)[0]
            same = list(alone.token_ids) == list(answers[-1].token_ids)
            bits = same and numbers(alone) == numbers(answers[-1])
            equal, worst = 0, 0.0
            for answer, truth in zip(answers, expected, strict=True):
                pairs = zip(answer.token_ids, truth.token_ids, strict=True)
                count = next((i for i, (a, b) in enumerate(pairs) if a != b), sizes.answer)
                equal += count
                near = zip(numbers(answer)[:count], numbers(truth)[:count], strict=True)
                for token, (a, b) in zip(answer.token_ids, near, strict=False):
                    worst = max(worst, abs(a[token] - b[token]))
            bound, total = BOUNDS[dtype], len(prompts) * sizes.answer
            fewest = total if dtype == "float32" else 0
            bench.add(
                f"{name}, {dtype}: tokens of the CPU in float32; alone and among others",
                f"the first {equal} of {total} equal, logprobs within {worst:.1e}; "
                f"{'the same' if bits else 'other'} bits",
                f"{fewest}, {bound:.0e}; the same bits",
                bits and equal >= fewest and worst <= bound,
            )
