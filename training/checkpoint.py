"""Atomic checkpoints of a training run, and export to a Hugging Face folder."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from training.model import Llama, ModelConfig
from training.tokenizer import EOS_TOKEN_IDS, PAD_TOKEN_ID, save_tokenizer


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write ``state`` to ``path`` atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def load_checkpoint(path: Path) -> dict[str, Any]:
    # This tool wrote the file: besides tensors it has the states of the random generators.
    state: dict[str, Any] = torch.load(path, weights_only=False)
    return state


def write_json(path: Path, value: object) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(partial, path)


def write_tensors(
    path: Path, tensors: dict[str, Tensor], dtype: torch.dtype = torch.bfloat16
) -> None:
    """Save copies in ``dtype`` as safetensors, atomically."""
    partial = path.with_name(path.name + ".partial")
    rounded = {k: v.detach().to(dtype).contiguous() for k, v in tensors.items()}
    save_file(rounded, partial, metadata={"format": "pt"})
    partial.chmod(0o644)  # safetensors writes a file that only its owner can read
    os.replace(partial, path)


def export_model(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a folder that transformers and Octavo load: config, weights, tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    special = {"bos_token_id": 0, "eos_token_id": EOS_TOKEN_IDS, "pad_token_id": PAD_TOKEN_ID}
    write_json(folder / "config.json", model.config.to_json(**special))
    write_json(
        folder / "generation_config.json",
        {**special, "do_sample": True, "temperature": 0.7, "top_p": 0.95},
    )
    save_tokenizer(tokenizer, folder, model.config.max_position_embeddings)
    write_tensors(folder / "model.safetensors", model.state_dict())


def read_config(folder: Path) -> ModelConfig:
    """Return the shape of the Llama in ``folder``.

    Raises:
        ValueError: the model is no plain Llama.
    """
    return config_of(json.loads((folder / "config.json").read_text()), str(folder))


def config_of(fields: dict[str, Any], name: str = "it") -> ModelConfig:
    """Return the shape of a Llama by its config.json; ``name`` is for error messages.

    Raises:
        ValueError: the model is no plain Llama.
    """
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if fields.get("model_type") != "llama":
        raise ValueError(f"{name} is a {fields.get('model_type')}; give a Llama.")
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ValueError(f"{name} scales its rotary embedding; give a Llama that does not.")
    if fields.get("attention_bias") or fields.get("mlp_bias"):
        raise ValueError(f"{name} has biases; give a Llama without.")
    heads = fields["num_attention_heads"]
    # These fields are also optional in Hugging Face's LlamaConfig.
    given = {
        "num_key_value_heads": heads,
        "head_dim": fields["hidden_size"] // heads,
        "max_position_embeddings": 2048,
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        **{k: v for k, v in fields.items() if v is not None},
    }
    return ModelConfig(**{k: given[k] for k in ModelConfig.__dataclass_fields__})


def load_model(folder: Path) -> Llama:
    """Return the Llama in ``folder`` as the trainer's model, float32; raise as `read_config`."""
    from safetensors.torch import load_file

    model = Llama(read_config(folder))
    weights: dict[str, Tensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        weights.update({k: v.float() for k, v in load_file(path).items()})
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    model.load_state_dict(weights)
    return model


def copy_tokenizer(source: Path, folder: Path) -> None:
    for path in (*source.glob("tokenizer*"), *source.glob("generation_config.json")):
        shutil.copyfile(path, folder / path.name)
