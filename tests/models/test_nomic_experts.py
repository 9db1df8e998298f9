"""Nomic Embed v2: an encoder with mixtures of experts, equal to a reference in float32."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from octavo.errors import ModelError
from tests.models.harness import load, spec_of
from tests.models.test_encoder_heads import assert_alone_as_in_a_batch
from tests.models.test_encoders import VOCAB, compute, texts
from tests.pooling import NORMALIZE, open_llm, pooling, results, write_modules

CONFIG: dict[str, Any] = {
    "architectures": ["NomicBertModel"],
    "model_type": "nomic_bert",
    "activation_function": "gelu",
    "expert_choice_router": False,
    "ffn_div": 1,
    "layer_norm_epsilon": 1e-5,
    "max_trained_positions": 80,
    "mlp_fc1_bias": True,
    "mlp_fc2_bias": True,
    "moe_every_n_layers": 2,
    "moe_normalize_expert_weights": False,
    "moe_top_k": 2,
    "n_embd": 40,
    "n_head": 4,
    "n_inner": 56,
    "n_layer": 4,
    "n_positions": 2048,
    "num_experts": 4,
    "num_shared_experts": 0,
    "qkv_proj_bias": True,
    "rotary_emb_base": 10000,
    "rotary_emb_fraction": 1.0,
    "torch_dtype": "float32",
    "type_vocab_size": 1,
    "use_rms_norm": None,
    "vocab_size": VOCAB,
}
SHAPES: dict[str, dict[str, Any]] = {
    "even": {},
    "odd": {"n_embd": 42, "n_head": 3, "n_inner": 37, "num_experts": 7, "moe_top_k": 3},
    "wide": {"n_layer": 5, "moe_every_n_layers": 3, "num_experts": 8, "moe_top_k": 1},
    "normalized": {"moe_normalize_expert_weights": True, "mlp_fc1_bias": False}
    | {"mlp_fc2_bias": False, "qkv_proj_bias": False},
}


def write(folder: Path, **changes: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Write a random model; return its config and its tensors."""
    config = CONFIG | changes
    hidden, inner, experts = config["n_embd"], config["n_inner"], config["num_experts"]
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(shape, generator=generator)

    state: dict[str, Tensor] = {}

    def linear(name: str, outputs: int, inputs: int, *, bias: bool) -> None:
        state[f"{name}.weight"] = random(outputs, inputs, scale=inputs**-0.5)
        if bias:
            state[f"{name}.bias"] = random(outputs, scale=0.1)

    def norm(name: str) -> None:
        state[f"{name}.weight"] = 1 + random(hidden, scale=0.1)
        state[f"{name}.bias"] = random(hidden, scale=0.1)

    state["embeddings.word_embeddings.weight"] = random(VOCAB, hidden)
    state["embeddings.token_type_embeddings.weight"] = random(1, hidden)
    norm("emb_ln")
    for i in range(config["n_layer"]):
        layer = f"encoder.layers.{i}."
        linear(f"{layer}attn.Wqkv", 3 * hidden, hidden, bias=config["qkv_proj_bias"])
        linear(f"{layer}attn.out_proj", hidden, hidden, bias=config["qkv_proj_bias"])
        norm(f"{layer}norm1")
        norm(f"{layer}norm2")
        if i % config["moe_every_n_layers"] == 1:
            linear(f"{layer}mlp.router.layer", experts, hidden, bias=False)
            for name, inputs in (("w1", hidden), ("w2", inner)):
                tensor = random(experts * inner, hidden, scale=inputs**-0.5)
                state[f"{layer}mlp.experts.mlp.{name}"] = tensor
            state[f"{layer}mlp.experts.bias"] = random(hidden, scale=0.5)
        else:
            linear(f"{layer}mlp.fc1", inner, hidden, bias=config["mlp_fc1_bias"])
            linear(f"{layer}mlp.fc2", hidden, inner, bias=config["mlp_fc2_bias"])
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return config, state


def forward(config: dict[str, Any], state: dict[str, Tensor], ids: list[int]) -> Tensor:
    """Compute the hidden states of a text as Nomic's code does."""
    heads, hidden = config["n_head"], config["n_embd"]
    size = hidden // heads

    def linear(name: str, x: Tensor) -> Tensor:
        return functional.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    def norm(name: str, x: Tensor) -> Tensor:
        weights = state[f"{name}.weight"], state[f"{name}.bias"]
        return functional.layer_norm(x, (hidden,), *weights, eps=config["layer_norm_epsilon"])

    angles = torch.outer(
        torch.arange(len(ids)), 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    )
    cos, sin = (torch.cat([f, f], -1) for f in (angles.cos(), angles.sin()))

    def rotate(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-b, a], -1) * sin

    def mixture(name: str, x: Tensor) -> Tensor:
        scores = linear(f"{name}.router.layer", x).softmax(-1)
        chosen, experts = scores.topk(config["moe_top_k"], dim=-1)
        if config["moe_normalize_expert_weights"]:
            chosen = chosen / chosen.sum(-1, keepdim=True)
        shape = config["num_experts"], config["n_inner"], hidden
        w1, w2 = (state[f"{name}.experts.mlp.{part}"].view(shape) for part in ("w1", "w2"))
        rows = [
            sum(
                weight * (functional.gelu(w1[expert] @ row) @ w2[expert])
                for weight, expert in zip(weights, ids, strict=True)
            )
            for row, weights, ids in zip(x, chosen, experts.tolist(), strict=True)
        ]
        return torch.stack(rows) + state[f"{name}.experts.bias"]

    x = state["embeddings.word_embeddings.weight"][ids]
    x = norm("emb_ln", x + state["embeddings.token_type_embeddings.weight"][0])
    for i in range(config["n_layer"]):
        layer = f"encoder.layers.{i}."
        parts = linear(f"{layer}attn.Wqkv", x).view(len(ids), 3, heads, size).unbind(1)
        query, key, value = (part.transpose(0, 1) for part in parts)
        out = functional.scaled_dot_product_attention(rotate(query), rotate(key), value)
        out = linear(f"{layer}attn.out_proj", out.transpose(0, 1).flatten(1))
        x = norm(f"{layer}norm1", out + x)
        if i % config["moe_every_n_layers"] == 1:
            out = mixture(f"{layer}mlp", x)
        else:
            out = linear(f"{layer}mlp.fc2", functional.gelu(linear(f"{layer}mlp.fc1", x)))
        x = norm(f"{layer}norm2", out + x)
    return x


@pytest.mark.parametrize("shape", SHAPES)
def test_same_as_the_reference(shape: str, tmp_path: Path) -> None:
    config, state = write(tmp_path, **SHAPES[shape])
    model = load(tmp_path)
    assert len(model.spec.distinct_layers) == 2
    ids, _ = texts(config)
    for text, found in zip(ids, compute(model, ids, [[0] * len(t) for t in ids]), strict=True):
        torch.testing.assert_close(found, forward(config, state, text), atol=3e-5, rtol=3e-5)


def test_in_a_batch(tmp_path: Path) -> None:
    write(tmp_path)
    write_modules(tmp_path, pooling("mean_tokens"), NORMALIZE)
    assert_alone_as_in_a_batch(tmp_path, "embed", texts()[0])


@pytest.mark.parametrize("ranks", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_the_same_bits_on_several_ranks(ranks: str, tmp_path: Path) -> None:
    write(tmp_path)
    write_modules(tmp_path, pooling("mean_tokens"), NORMALIZE)
    settings: dict[str, Any] = {"max_model_len": 78, "dtype": "bfloat16"}
    with open_llm(tmp_path, **settings) as llm:
        expected = results(llm, "embed", texts()[0])
    with open_llm(tmp_path, **settings, **{ranks: 2}, num_threads=1) as llm:
        found = results(llm, "embed", texts()[0])
    assert [x.tobytes() for x in found] == [x.tobytes() for x in expected]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"activation_function": "swiglu"}, "activation_function='swiglu'.*only experts with GELU"),
        ({"activation_function": "relu"}, "activation_function='relu'.*supported: swiglu, gelu"),
        ({"num_shared_experts": 1}, "num_shared_experts=1"),
        ({"expert_choice_router": True}, "expert_choice_router=True"),
        ({"ffn_div": 2}, "ffn_div=2"),
        ({"moe_top_k": 9}, "moe_top_k=9.*at most 4, the number of experts"),
        ({"moe_normalize_expert_weights": 2}, "moe_normalize_expert_weights=2"),
        ({"mlp_fc2_bias": False}, "mlp_fc2_bias=False.*both projections"),
    ],
)
def test_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | fields))
    with pytest.raises(ModelError, match=message):
        spec_of(tmp_path)
