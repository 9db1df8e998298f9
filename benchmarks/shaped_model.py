"""Make a model with random weights in the shape of a released one, to measure speed with.

    python benchmarks/shaped_model.py FOLDER --shape qwen3.5-0.8b

The largest mixtures have fewer layers than the released models, so that they fit in 24 GiB.
Tokenizer and chat template are those of the built-in model, which has 4,096 tokens; vocabularies
have the released sizes. Answers are noise: measure with prompts of ids, or replay recorded answers
(session_replay.py --answers recorded).
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

_BUILTIN = Path(__file__).resolve().parents[1] / "octavo" / "builtin" / "stories"
_FILE_NBYTES = 4 * 2**30

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.5-0.8b": {
        "model_type": "qwen3_5_text",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    },
    "lfm2-350m": {
        "model_type": "lfm2",
        "vocab_size": 65536,
        "hidden_size": 1024,
        "intermediate_size": 6656,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128000,
        "conv_L_cache": 3,
        "layer_types": [
            "full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)
        ],
        "tie_word_embeddings": True,
    },
    "granite-4.0-h-350m": {
        "model_type": "granitemoehybrid",
        "vocab_size": 100352,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "shared_intermediate_size": 2048,
        "num_hidden_layers": 32,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "mamba_n_heads": 48,
        "mamba_d_head": 32,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "position_embedding_type": "nope",
        "layer_types": ["attention" if i in (10, 13, 17, 27) else "mamba" for i in range(32)],
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "mamba2-130m": {
        "model_type": "mamba2",
        "vocab_size": 50288,
        "hidden_size": 768,
        "num_hidden_layers": 24,
        "state_size": 128,
        "head_dim": 64,
        "num_heads": 24,
        "n_groups": 1,
        "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b-8-layers": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    "glm-4.7-flash-6-layers": {
        "model_type": "glm4_moe_lite",
        "vocab_size": 154880,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 6,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "kv_lora_rank": 512,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.8,
        "mlp_layer_types": ["dense"] + ["sparse"] * 5,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 202752,
        "tie_word_embeddings": False,
    },
    "olmoe-1b-7b": {
        "model_type": "olmoe",
        "vocab_size": 50304,
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b-6-layers": {  # experts in MXFP4
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 6,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "tie_word_embeddings": False,
    },
}


def make(folder: Path, shape: str) -> None:
    """Write the model, in bfloat16 unless the shape says otherwise."""
    fields = dict(SHAPES[shape])
    config = AutoConfig.for_model(
        fields.pop("model_type"), bos_token_id=0, eos_token_id=2, pad_token_id=None, **fields
    )
    config.dtype = torch.bfloat16
    folder.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(model).__name__]
    if shape.startswith("gpt-oss"):
        config.quantization_config = {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        }
    config.save_pretrained(folder)
    if "layer_types" in fields:  # transformers saves other names than released configs have
        saved = json.loads((folder / "config.json").read_text())
        saved["layer_types"] = fields["layer_types"]
        (folder / "config.json").write_text(json.dumps(saved, indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(_BUILTIN / name, folder)
    _write(folder, _shapes(model, config))


def _shapes(model: Any, config: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a checkpoint's tensors."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    found: dict[str, tuple[int, ...]] = {}
    for name, size in shapes.items():
        stem, _, part = name.rpartition(".")
        if config.model_type == "gpt_oss" and part in ("gate_up_proj", "down_proj"):
            experts, inputs, outputs = size
            found[f"{name}_blocks"] = (experts, outputs, inputs // 32, 16)
            found[f"{name}_scales"] = (experts, outputs, inputs // 32)
        elif part == "gate_up_proj":  # released checkpoints have each expert's matrices
            for expert in range(size[0]):
                for which in ("gate_proj", "up_proj"):
                    found[f"{stem}.{expert}.{which}.weight"] = (size[1] // 2, size[2])
        elif part == "down_proj":
            for expert in range(size[0]):
                found[f"{stem}.{expert}.down_proj.weight"] = size[1:]
        else:
            found[name] = size
    return found


def _write(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Write files of random tensors, with an index."""
    generator = torch.Generator().manual_seed(0)
    index: dict[str, str] = {}
    tensors: dict[str, torch.Tensor] = {}

    def flush() -> None:
        file = f"model-{len(set(index.values())) + 1:05d}.safetensors"
        save_file(tensors, folder / file, {"format": "pt"})
        index.update(dict.fromkeys(tensors, file))
        tensors.clear()

    for name, size in shapes.items():
        tensors[name] = _random(name, size, generator)
        if sum(tensor.nbytes for tensor in tensors.values()) > _FILE_NBYTES:
            flush()
    flush()
    total = {"total_size": sum((folder / file).stat().st_size for file in set(index.values()))}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": total, "weight_map": index})
    )


def _random(name: str, size: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if name.endswith("_blocks"):
        return torch.randint(256, size, dtype=torch.uint8, generator=generator)
    if name.endswith("_scales"):
        return torch.randint(118, 122, size, dtype=torch.uint8, generator=generator)
    if name.endswith("A_log"):
        return torch.rand(size, generator=generator).to(torch.bfloat16)
    if name.endswith(("norm.weight", "layernorm.weight", ".D", "norm_f.weight")):
        return torch.ones(size, dtype=torch.bfloat16)
    if name.endswith("bias"):
        return torch.zeros(size, dtype=torch.bfloat16)
    numbers = torch.empty(size, dtype=torch.bfloat16)
    return numbers.normal_(0.0, 0.02, generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder to make")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3.5-0.8b")
    args = parser.parse_args()
    make(args.folder, args.shape)


if __name__ == "__main__":
    main()
