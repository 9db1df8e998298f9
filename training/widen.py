"""``python -m training.widen``: a small Llama in the shape of a large one, with the same answers.

What a model says matters to a benchmark of speculative decoding, and so does what a step costs.
This tool joins the two: the weights of a small Llama stand in matrices of a large one's size, and
the rest is zero. The zeros are read and multiplied like any weight.

- The hidden state's further elements are zero. A norm takes its mean over more elements, so its
  weights and its epsilon are made smaller; in bfloat16 the smaller weights are rounded, and an
  answer may part from the small model's where two tokens are nearly as likely.
- Further heads and rows of the MLP have weights of zero. A small model's group of query heads
  stands in a group of its own; the size of a head stays, as do rotary frequencies and context.
- Further layers compute what a real layer does, but their output projections are zero.
- Further tokens are never chosen: one element of the hidden state is the same for every token,
  and their rows of the LM head turn it into a logit far below all others. The LM head is
  therefore not tied, whatever the large model's is: the folder is larger, a step costs the same.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from training.checkpoint import copy_tokenizer, load_model, read_config, write_json, write_tensors
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
# A further token's logit is this over the root mean square of the last hidden state.
_NEVER = -(2.0**15)


def wide_config(small: ModelConfig, shape: ModelConfig) -> ModelConfig:
    """The configuration of ``small`` in ``shape``.

    Raises:
        ValueError: if it does not fit.
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
    """For each large key-value head in use: the small one, and its small query heads."""
    group = small.num_attention_heads // small.num_key_value_heads
    room = shape.num_attention_heads // shape.num_key_value_heads
    return [
        (kv, list(range(first, min(first + room, (kv + 1) * group))))
        for kv in range(small.num_key_value_heads)
        for first in range(kv * group, (kv + 1) * group, room)
    ]


def widen(small: Llama, shape: ModelConfig) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The configuration and the weights, float32, of ``small`` in ``shape``."""
    old, new = small.config, wide_config(small.config, shape)
    weights = {name: tensor.detach() for name, tensor in small.state_dict().items()}
    places, dim = _places(old, new), old.head_dim
    room = new.num_attention_heads // new.num_key_value_heads

    def pad(matrix: Tensor, rows: int, columns: int) -> Tensor:
        wide = torch.zeros(rows, columns)
        wide[: matrix.shape[0], : matrix.shape[1]] = matrix
        return wide

    def norm(weight: Tensor) -> Tensor:
        wide = torch.zeros(new.hidden_size)
        wide[: old.hidden_size] = weight * math.sqrt(old.hidden_size / new.hidden_size)
        return wide

    def queries(matrix: Tensor) -> Tensor:
        """Rows of query heads to where their key-value head's group stands."""
        heads = torch.zeros(new.num_attention_heads, dim, matrix.shape[1])
        for large, (_, chosen) in enumerate(places):
            for i, head in enumerate(chosen):
                heads[large * room + i] = matrix.view(-1, dim, matrix.shape[1])[head]
        return heads.flatten(0, 1)

    def keys(matrix: Tensor) -> Tensor:
        heads = torch.zeros(new.num_key_value_heads, dim, matrix.shape[1])
        for large, (kv, _) in enumerate(places):
            heads[large] = matrix.view(-1, dim, matrix.shape[1])[kv]
        return heads.flatten(0, 1)

    hidden, inner = new.hidden_size, new.intermediate_size
    result = {}
    for i in range(new.num_hidden_layers):
        real = i < old.num_hidden_layers
        source = f"model.layers.{i % old.num_hidden_layers}."
        q, k, v, o = (weights[f"{source}self_attn.{n}_proj.weight"] for n in "qkvo")
        gate, up, down = (weights[f"{source}mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        spread = queries(o.T).T
        layer = {
            "input_layernorm": norm(weights[f"{source}input_layernorm.weight"]),
            "self_attn.q_proj": pad(queries(q), new.num_attention_heads * dim, hidden),
            "self_attn.k_proj": pad(keys(k), new.num_key_value_heads * dim, hidden),
            "self_attn.v_proj": pad(keys(v), new.num_key_value_heads * dim, hidden),
            "self_attn.o_proj": pad(spread * real, hidden, spread.shape[1]),
            "post_attention_layernorm": norm(weights[f"{source}post_attention_layernorm.weight"]),
            "mlp.gate_proj": pad(gate, inner, hidden),
            "mlp.up_proj": pad(up, inner, hidden),
            "mlp.down_proj": pad(down * real, hidden, inner),
        }
        result.update({f"model.layers.{i}.{n}.weight": w for n, w in layer.items()})

    # The element that is the same for every token: so small that no norm notices (its square is
    # under float32's precision), a power of two, so that it is exact in any dtype; the last norm
    # makes 1 of it, over the root mean square.
    last = hidden - 1
    embedding = weights["model.embed_tokens.weight"]
    smallest = embedding.norm(dim=1)
    mark = 2.0 ** (math.floor(math.log2(smallest[smallest > 0].min().item())) - 11)
    tokens = pad(embedding, new.vocab_size, hidden)
    tokens[:, last] = mark
    final = norm(weights["model.norm.weight"])
    final[last] = 1 / mark
    head = pad(small.head_weight.detach(), new.vocab_size, hidden)
    head[old.vocab_size :, last] = _NEVER
    result["model.embed_tokens.weight"] = tokens
    result["model.norm.weight"] = final
    result["lm_head.weight"] = head
    return new, result


def write_wide(model: Path, shape: ModelConfig, out: Path, dtype: torch.dtype) -> None:
    """Write the Llama of folder ``model`` in ``shape`` to ``out``, with its tokenizer."""
    config, weights = widen(load_model(model), shape)
    out.mkdir(parents=True, exist_ok=True)
    fields = json.loads((model / "config.json").read_text())
    special = {k: v for k, v in fields.items() if k.endswith("_token_id") and v is not None}
    named = {**config.to_json(**special), "torch_dtype": str(dtype).removeprefix("torch.")}
    write_json(out / "config.json", named)
    copy_tokenizer(model, out)
    write_tensors(out / "model.safetensors", weights, dtype)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m training.widen", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--model", default="octavo/stories", help="octavo/stories or a folder")
    parser.add_argument(
        "--shape",
        required=True,
        help=f"{', '.join(SHAPES)}, or a folder with a Llama's config.json",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    args = parser.parse_args(argv)
    model = BUILTIN / "stories" if args.model == "octavo/stories" else Path(args.model)
    shape = SHAPES.get(args.shape) or read_config(Path(args.shape))
    write_wide(model, shape, args.out, getattr(torch, args.dtype))


if __name__ == "__main__":
    main()
