"""Models of vectors in GGUF, equal to those of transformers."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.errors import ModelError
from tests.gguf_files import TYPES, VOCABULARY, quantize, write_gguf
from tests.models.configs.sizes import WIDE_HEADS
from tests.models.harness import make_hf, spec_of
from tests.pooling import PROMPTS, assert_near, open_llm, pool, results, states, unit

SIZES = {"vocab_size": 203, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 128}
NAMES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.LayerNorm": "token_embd_norm",
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write(
    model: Any, kind: str, path: Path, form: str = "f32", dense: Any = (), **fields: Any
) -> None:
    """Write a bare model of transformers as llama.cpp's converter does; `form` is of matrices."""
    config = model.config
    metadata: dict[str, Any] = {"general.architecture": kind} | VOCABULARY
    known = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
    }
    metadata |= {f"{kind}.{key}": value for key, value in (known | fields).items()}
    tensors = {}
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    state |= {
        f"dense_{i}.weight": layer.weight.detach().numpy() for i, layer in enumerate(dense, 2)
    }
    for name, x in state.items():
        module, _, end = name.rpartition(".")
        layer = re.match(r"(?:encoder\.layer|layers)\.(\d+)\.(.*)", module)
        names = NAMES | (GEMMA if kind == "gemma-embedding" else {})
        if module.startswith("pooler") or end == "position_ids":
            continue
        stored = names.get(layer[2] if layer else module, module)
        if layer:
            stored = f"blk.{layer[1]}.{stored}"
        if kind == "gemma-embedding" and module.endswith("norm"):
            x = x + 1
        own = form if x.ndim == 2 and not stored.startswith(("token_types", "position")) else "f32"
        tensors[f"{stored}.{end}"] = (TYPES[own], x.shape, quantize(x, own))
    write_gguf(path, metadata, tensors)


def make_bert() -> Any:
    return make_hf("BertModel", **SIZES, type_vocab_size=2)


BERT = {"attention.causal": False, "attention.layer_norm_epsilon": 1e-12}


@pytest.mark.parametrize(("kind", "name"), [(1, "mean"), (2, "cls"), (3, "last"), (None, "cls")])
def test_bert(kind: int | None, name: str, tmp_path: Path) -> None:
    model = make_bert()
    fields = BERT if kind is None else BERT | {"pooling_type": kind}
    write(model, "bert", tmp_path / "bert.gguf", **fields)
    hidden = states(model)
    pooled = {"mean": lambda x: x.mean(0), "cls": lambda x: x[0], "last": lambda x: x[-1]}[name]
    with open_llm(tmp_path / "bert.gguf", weight_cache=str(tmp_path / "cache")) as llm:
        assert_near(results(llm, None), [unit(pooled(x)) for x in hidden])
        assert_near(results(llm, "token_embed"), [unit(x) for x in hidden])


@pytest.mark.parametrize("form", ["q8_0", "q4_0", "f16"])
def test_bert_of_blocks(form: str, tmp_path: Path) -> None:
    """The numbers are those of the file: as if its blocks were the weights of transformers."""
    model = make_bert()
    write(model, "bert", tmp_path / "bert.gguf", form, pooling_type=1, **BERT)
    hidden, least = states(model), {"q8_0": 0.999, "q4_0": 0.9, "f16": 0.99999}[form]
    found = pool(tmp_path / "bert.gguf", None)
    for ours, theirs in zip(found, hidden, strict=True):
        cosine = float(torch.tensor(ours) @ unit(theirs.mean(0)))
        assert least < cosine < 1.0001
    spec = spec_of(tmp_path / "bert.gguf")
    forms = {w.form.name for w in spec.weights() if w.kind == "linear"}
    assert forms == {"plain"} if form == "f16" else all(form in name for name in forms)


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_quantized_encoder(quantization: str, tmp_path: Path) -> None:
    """The same for a folder with --quantization."""
    model = make_bert()
    model.save_pretrained(tmp_path)
    plain, found = pool(tmp_path, None), pool(tmp_path, None, quantization=quantization)
    assert all(0.99 < float(a @ b) < 0.9999999 for a, b in zip(plain, found, strict=True))


def test_embedding_gemma(tmp_path: Path) -> None:
    fields = WIDE_HEADS | {"use_bidirectional_attention": True, "sliding_window": 12}
    fields |= {
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }
    model = make_hf("Gemma3TextModel", **fields)
    torch.manual_seed(3)
    dense = torch.nn.Linear(48, 64, bias=False), torch.nn.Linear(64, 32, bias=False)
    extra: dict[str, Any] = {
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": 12,
        "attention.sliding_window_pattern": [True, False, True],
        "attention.causal": False,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
        "pooling_type": 1,
        "dense_2_feat_in": 48,
        "dense_2_feat_out": 64,
        "dense_3_feat_in": 64,
        "dense_3_feat_out": 32,
    }
    file = tmp_path / "gemma.gguf"
    write(model, "gemma-embedding", file, dense=dense, **extra)
    with torch.no_grad():
        expected = [unit(dense[1](dense[0](x.mean(0)))) for x in states(model)]
    assert_near(pool(file, None, weight_cache=str(tmp_path / "cache")), expected)


def test_qwen3_embedding(tmp_path: Path) -> None:
    """A decoder with a way of pooling is a model of vectors, unless the settings say otherwise."""
    model = make_hf("Qwen3Model", **WIDE_HEADS)
    extra = {"attention.head_count_kv": 2, "attention.key_length": 16}
    extra |= {"attention.layer_norm_rms_epsilon": 1e-6, "attention.value_length": 16}
    file = tmp_path / "qwen3.gguf"
    write(model, "qwen3", file, pooling_type=3, **extra)
    assert_near(pool(file, None), [unit(x[-1]) for x in states(model)])
    assert not spec_of(file).generates
    assert spec_of(file, runner="generate").generates
    write(model, "qwen3", file, pooling_type=0, **extra)
    assert spec_of(file).generates
    write(model, "qwen3", file, pooling_type=3, **extra | {"attention.causal": False})
    assert spec_of(file).sees_all
    assert len(pool(file, None)) == len(PROMPTS)
    write(model, "qwen3", file, pooling_type=5, **extra)
    with pytest.raises(ModelError, match=r"qwen3\.pooling_type=5 is not supported"):
        spec_of(file)
