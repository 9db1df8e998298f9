"""Small Llama in the shape of a large one, with the same answers: ``python -m training.widen``.

A benchmark of speculative decoding depends on the model's answers and on the cost of a step. This
tool combines the two: the weights of a small Llama are in matrices of a large one's size, and the
rest is zero. The zeros are read and multiplied like any weight.

- The hidden state's further elements are zero. A norm takes its mean over more elements, so its
  weights and its epsilon are made smaller. In bfloat16 the smaller weights are rounded, and an
  answer may differ from the small model's where two tokens are nearly as likely.
- Further heads and rows of the MLP have weights of zero. Each group of query heads of the small
  model is in a separate group; the size of a head, rotary frequencies and context stay.
- Further layers compute what a real layer does, but their output projections are zero.
- Further tokens are never chosen: one element of the hidden state is the same for every token,
  and their rows of the LM head turn it into a logit far below all others. Therefore the LM head
  is not tied, even if the large model's is: the folder is larger, but a step costs the same.

The tool also widens an EAGLE head or Medusa heads of the small model. A drafter must have the
vocabulary of its model: ``--keep-vocabulary`` adds no further tokens.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from training.checkpoint import (
    config_of,
    copy_tokenizer,
    load_model,
    read_config,
    write_json,
    write_tensors,
)
from training.model import Llama, ModelConfig
from training.train import BUILTIN

SHAPES = {
    "smollm2-135m": ModelConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
    ),
    "tinyllama-1.1b": ModelConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
    ),
}
# Logit of a further token, times the root mean square of the last hidden state.
_NEVER = -(2.0**15)


def wide_config(small: ModelConfig, shape: ModelConfig) -> ModelConfig:
    """Return the configuration of ``small`` in ``shape``.

    Raises:
        ValueError: the small model does not fit.
    """
    sizes = ("vocab_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    for name in sizes:
        if getattr(shape, name) < getattr(small, name):
            raise ValueError(f"{name}={getattr(shape, name)} is less than the small model's.")
    if shape.hidden_size <= small.hidden_size:
        raise ValueError(f"hidden_size={shape.hidden_size} is not more than the small model's.")
    if len(_places(small, shape)) > shape.num_key_value_heads:
        raise ValueError("There are too few key-value heads for the small model's groups of heads.")
    return replace(
        shape,
        head_dim=small.head_dim,
        max_position_embeddings=small.max_position_embeddings,
        rope_theta=small.rope_theta,
        rms_norm_eps=small.rms_norm_eps * small.hidden_size / shape.hidden_size,
        tie_word_embeddings=False,
    )


def _places(small: ModelConfig, shape: ModelConfig) -> list[tuple[int, list[int]]]:
    """Return for each used large key-value head the small one, and its small query heads."""
    group = small.num_attention_heads // small.num_key_value_heads
    room = shape.num_attention_heads // shape.num_key_value_heads
    return [
        (kv, list(range(first, min(first + room, (kv + 1) * group))))
        for kv in range(small.num_key_value_heads)
        for first in range(kv * group, (kv + 1) * group, room)
    ]


class _Frame:
    """Placement of a small Llama's weights in those of a large one."""

    def __init__(self, old: ModelConfig, new: ModelConfig):
        self.old, self.new = old, new
        self.places = _places(old, new)

    def pad(self, matrix: Tensor, rows: int, columns: int) -> Tensor:
        """Return the matrix with zeros below and to the right."""
        wide = torch.zeros(rows, columns)
        wide[: matrix.shape[0], : matrix.shape[1]] = matrix
        return wide

    def norm(self, weight: Tensor) -> Tensor:
        """Return the weights of a norm."""
        wide = torch.zeros(self.new.hidden_size)
        wide[: self.old.hidden_size] = weight * math.sqrt(
            self.old.hidden_size / self.new.hidden_size
        )
        return wide

    def _queries(self, matrix: Tensor) -> Tensor:
        """Move rows of query heads to the group of their key-value head."""
        old, new = self.old, self.new
        room = new.num_attention_heads // new.num_key_value_heads
        heads = torch.zeros(new.num_attention_heads, old.head_dim, matrix.shape[1])
        for large, (_, chosen) in enumerate(self.places):
            for i, head in enumerate(chosen):
                heads[large * room + i] = matrix.view(-1, old.head_dim, matrix.shape[1])[head]
        return heads.flatten(0, 1)

    def _keys(self, matrix: Tensor) -> Tensor:
        dim = self.old.head_dim
        heads = torch.zeros(self.new.num_key_value_heads, dim, matrix.shape[1])
        for large, (kv, _) in enumerate(self.places):
            heads[large] = matrix.view(-1, dim, matrix.shape[1])[kv]
        return heads.flatten(0, 1)

    def layer(self, weights: dict[str, Tensor], source: str, *, real: bool) -> dict[str, Tensor]:
        """Return the layer whose names begin with ``source``; without effect if it is not real."""
        q, k, v, o = (weights[f"{source}self_attn.{n}_proj.weight"] for n in "qkvo")
        gate, up, down = (weights[f"{source}mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        hidden, inner, spread = self.new.hidden_size, self.new.intermediate_size, self._queries(o.T)
        queries, keys, values = self._queries(q), self._keys(k), self._keys(v)
        result = {
            "self_attn.q_proj": self.pad(queries, len(queries), hidden),
            "self_attn.k_proj": self.pad(keys, len(keys), hidden),
            "self_attn.v_proj": self.pad(values, len(values), hidden),
            "self_attn.o_proj": self.pad(spread.T * real, hidden, len(spread)),
            "mlp.gate_proj": self.pad(gate, inner, hidden),
            "mlp.up_proj": self.pad(up, inner, hidden),
            "mlp.down_proj": self.pad(down * real, hidden, inner),
        }
        for name in ("input_layernorm", "post_attention_layernorm"):
            if f"{source}{name}.weight" in weights:  # an EAGLE head has the second one only
                result[name] = self.norm(weights[f"{source}{name}.weight"])
        return result


def widen(small: Llama, shape: ModelConfig) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Return the configuration and the weights, float32, of ``small`` in ``shape``."""
    old, new = small.config, wide_config(small.config, shape)
    weights = {name: tensor.detach() for name, tensor in small.state_dict().items()}
    frame, hidden = _Frame(old, new), new.hidden_size
    result = {}
    for i in range(new.num_hidden_layers):
        source = f"model.layers.{i % old.num_hidden_layers}."
        layer = frame.layer(weights, source, real=i < old.num_hidden_layers)
        result.update({f"model.layers.{i}.{n}.weight": w for n, w in layer.items()})

    # The element that is the same for every token. It is so small that no norm is affected (its
    # square is below float32's precision), and a power of two, so it is exact in any dtype. The
    # last norm turns it into 1, over the root mean square.
    last = hidden - 1
    embedding = weights["model.embed_tokens.weight"]
    smallest = embedding.norm(dim=1)
    mark = 2.0 ** (math.floor(math.log2(smallest[smallest > 0].min().item())) - 11)
    tokens = frame.pad(embedding, new.vocab_size, hidden)
    tokens[:, last] = mark
    final = frame.norm(weights["model.norm.weight"])
    final[last] = 1 / mark
    head = frame.pad(small.head_weight.detach(), new.vocab_size, hidden)
    head[old.vocab_size :, last] = _NEVER
    result["model.embed_tokens.weight"] = tokens
    result["model.norm.weight"] = final
    result["lm_head.weight"] = head
    return new, result


def widen_eagle(
    fields: dict[str, Any], weights: dict[str, Tensor], shape: ModelConfig
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config.json and the weights, float32, of a small EAGLE head, for ``shape``."""
    old = config_of(fields)
    new = wide_config(old, replace(shape, num_hidden_layers=1))
    frame, size, hidden = _Frame(old, new), old.hidden_size, new.hidden_size
    layer = frame.layer(weights, "layers.0.", real=True)
    fc = weights["fc.weight"]
    halves = [frame.pad(half, hidden, hidden) for half in fc.split(size, dim=1)]
    result = {f"layers.0.{n}.weight": w for n, w in layer.items()}
    return {**fields, **asdict(new)}, {**result, "fc.weight": torch.cat(halves, dim=1)}


def widen_medusa(
    fields: dict[str, Any], weights: dict[str, Tensor], shape: ModelConfig
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config.json and the weights, float32, of small Medusa heads, for ``shape``."""
    size = shape.hidden_size
    result = {}
    for name, weight in weights.items():
        wide = torch.zeros(weight.shape[0] if name.startswith("lm_heads.") else size, size)
        wide[: weight.shape[0], : weight.shape[1]] = weight
        result[name] = wide
    return {**fields, "hidden_size": size}, result


_HEADS = {"EagleLlamaForCausalLM": widen_eagle, "MedusaModel": widen_medusa}


def write_wide(model: Path, shape: ModelConfig, out: Path, dtype: torch.dtype) -> None:
    """Write the Llama, or the heads, of folder ``model`` in ``shape`` to ``out``.

    Raises:
        ValueError: the model does not fit, or the heads have another vocabulary.
    """
    fields = json.loads((model / "config.json").read_text())
    out.mkdir(parents=True, exist_ok=True)
    if widen_head := _HEADS.get(fields["architectures"][0]):
        if fields["vocab_size"] != shape.vocab_size:
            raise ValueError("Heads must have the model's vocabulary; give --keep-vocabulary.")
        small = {n: w.float() for n, w in load_file(model / "model.safetensors").items()}
        fields, weights = widen_head(fields, small, shape)
    else:
        config, weights = widen(load_model(model), shape)
        special = {k: v for k, v in fields.items() if k.endswith("_token_id") and v is not None}
        fields = config.to_json(**special)
        copy_tokenizer(model, out)
    named = {**fields, "torch_dtype": str(dtype).removeprefix("torch.")}
    write_json(out / "config.json", named)
    write_tensors(out / "model.safetensors", weights, dtype)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m training.widen", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument(
        "--model",
        default="octavo/stories",
        help="name of a built-in model or of its heads, or a folder",
    )
    parser.add_argument(
        "--shape",
        required=True,
        help=f"{', '.join(SHAPES)}, or a folder with a Llama's config.json",
    )
    parser.add_argument(
        "--keep-vocabulary",
        action="store_true",
        help="keep the size of the small model's vocabulary, instead of the shape's",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the result")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    args = parser.parse_args(argv)
    name = args.model.removeprefix("octavo/")
    model = BUILTIN / name if name != args.model else Path(args.model)
    shape = SHAPES.get(args.shape) or read_config(Path(args.shape))
    if args.keep_vocabulary:
        vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
        shape = replace(shape, vocab_size=vocab_size)
    write_wide(model, shape, args.out, getattr(torch, args.dtype))


if __name__ == "__main__":
    main()
