"""Encoders and rerankers in GGUF, equal to the Hugging Face folders of the same weights."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.errors import ModelError
from tests.gguf_files import TYPES, VOCABULARY, quantize, write_gguf
from tests.models.harness import make_hf, spec_of
from tests.pooling import change_config, logits, open_llm, pool, results

SIZES: dict[str, Any] = {"vocab_size": 203, "hidden_size": 64, "intermediate_size": 96}
SIZES |= {"num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 128}
SIZES |= {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
MODERN = SIZES | {"local_attention": 14, "cls_token_id": 1, "sep_token_id": 1}
ROBERTA = SIZES | {"max_position_embeddings": 130}
CLASSES = "ForSequenceClassification"
BERT = {
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
    "classifier.dense": "cls",
    "classifier.out_proj": "cls.output",
}
LLAMA = {
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
POST_NORMS = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.token_type_embeddings": "token_types",
    "emb_ln": "token_embd_norm",
    "norm1": "attn_output_norm",
    "norm2": "layer_output_norm",
    "mlp.fc2": "ffn_down",
}
NAMES: dict[str, dict[str, str]] = {
    "bert": BERT,
    "jina-bert-v2": BERT
    | {
        "mlp.gated_layers": "ffn_up",
        "mlp.wo": "ffn_down",
        "mlp.layernorm": "layer_output_norm",
    },
    "jina-bert-v3": POST_NORMS
    | {"mixer.Wqkv": "attn_qkv", "mixer.out_proj": "attn_output", "mlp.fc1": "ffn_up"},
    "nomic-bert": POST_NORMS
    | {
        "attn.Wqkv": "attn_qkv",
        "attn.out_proj": "attn_output",
        "mlp.fc11": "ffn_up",
        "mlp.fc12": "ffn_gate",
    },
    "modern-bert": {
        "embeddings.tok_embeddings": "token_embd",
        "embeddings.norm": "token_embd_norm",
        "final_norm": "output_norm",
        "attn_norm": "attn_norm",
        "attn.Wqkv": "attn_qkv",
        "attn.Wo": "attn_output",
        "mlp_norm": "ffn_norm",
        "mlp.Wi": "ffn_up",
        "mlp.Wo": "ffn_down",
        "head.dense": "cls",
        "head.norm": "cls.norm",
        "classifier": "cls.output",
    },
    "eurobert": LLAMA,
    "qwen3": LLAMA | {"cls.output": "cls.output"},
}
"""Names of modules in folders without the prefix of the model, and in GGUF."""
LAYER = re.compile(r"(?:encoder\.)?layers?\.(\d+)\.(.*)")
Tensors = dict[str, tuple[int, Any, bytes]]
KEPT = ("token_types", "position_embd")
"""Tables that llama.cpp never quantizes."""


def convert(
    folder: Path,
    kind: str,
    path: Path,
    form: str = "f32",
    change: Callable[[Tensors], Tensors] = lambda tensors: tensors,
    **fields: Any,
) -> None:
    """Write the folder's model as llama.cpp's converter does.

    Args:
        folder: the folder.
        kind: architecture in GGUF.
        path: the file.
        form: type of the matrices.
        change: changes the tensors.
        fields: metadata besides the sizes, without the architecture's prefix.
    """
    metadata: dict[str, Any] = {"general.architecture": kind} | VOCABULARY
    known: dict[str, Any] = {
        "context_length": 128,
        "embedding_length": 64,
        "block_count": 4,
        "feed_forward_length": 96,
        "attention.head_count": 4,
    }
    metadata |= {f"{kind}.{key}": value for key, value in (known | fields).items()}
    tensors: Tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        module, _, end = re.sub(r"^(bert|roberta|nomic_bert|model)\.", "", name).rpartition(".")
        if "pooler" in module or module == "lm_head":
            continue
        layer = LAYER.fullmatch(module)
        stored = NAMES[kind][layer[2] if layer else module]
        stored = f"blk.{layer[1]}.{stored}" if layer else stored
        x = tensor.numpy()
        if stored == "position_embd" and "roberta" in name:
            x = x[2:]  # the converter cuts off the rows up to that of the padding token
        own = form if x.ndim == 2 and not stored.startswith(KEPT) else "f32"
        tensors[f"{stored}.{end}"] = (TYPES[own], x.shape, quantize(x, own))
    write_gguf(path, metadata, change(tensors))


def save(folder: Path, architecture: str, config: dict[str, Any]) -> Any:
    """Save a random model; return it."""
    model = make_hf(architecture, **config)
    model.save_pretrained(folder)
    return model


def save_jina(folder: Path) -> None:
    """Save a random jina-embeddings-v2."""
    save(folder, "BertModel", SIZES)
    state = load_file(folder / "model.safetensors")
    for name in list(state):
        if "position_embeddings" in name or name.endswith("intermediate.dense.bias"):
            del state[name]
        elif name.endswith("intermediate.dense.weight"):
            up = state.pop(name)
            torch.manual_seed(len(state))
            gated = torch.cat([up, 0.3 * torch.randn(up.shape)])
            state[name.replace("intermediate.dense", "mlp.gated_layers")] = gated
        elif (new := re.sub(r"(\d)\.output\.(dense|LayerNorm)", _of_jina, name)) != name:
            state[new] = state.pop(name)
    save_file(state, folder / "model.safetensors")
    change_config(
        folder,
        architectures=["JinaBertModel"],
        model_type=None,
        position_embedding_type="alibi",
        feed_forward_type="geglu",
    )


def _of_jina(match: re.Match[str]) -> str:
    return f"{match[1]}.mlp." + {"dense": "wo", "LayerNorm": "layernorm"}[match[2]]


ENCODER = {"attention.causal": False, "pooling_type": 1}
LAYER_NORMS = ENCODER | {"attention.layer_norm_epsilon": 1e-12}
WINDOWS = ENCODER | {"attention.layer_norm_epsilon": 1e-5, "rope.freq_base": 160000.0}
WINDOWS |= {
    "rope.freq_base_swa": 10000.0,
    "attention.sliding_window": 14,
    "rope.scaling.type": "none",
    "vocab_size": 203,
}
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "nomic": ("nomic-bert", "NomicBertModel", SIZES, LAYER_NORMS | {"rope.freq_base": 1000.0}),
    "jina-v3": (
        "jina-bert-v3",
        "JinaEmbeddingsV3Model",
        SIZES | {"type_vocab_size": 1, "layer_norm_eps": 1e-5},
        ENCODER | {"attention.layer_norm_epsilon": 1e-5, "rope.freq_base": 20000.0},
    ),
    "modern": (
        "modern-bert",
        "ModernBertModel",
        MODERN,
        WINDOWS | {"attention.sliding_window_pattern": 3, "hidden_activation": "gelu"},
    ),
    "modern-swiglu": (
        "modern-bert",
        "ModernBertModel",
        MODERN
        | {"global_attn_every_n_layers": 2, "hidden_activation": "silu"}
        | {
            "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 160000.0}}
            | {"sliding_attention": {"rope_type": "default", "rope_theta": 5000.0}}
        },
        WINDOWS
        | {"attention.sliding_window_pattern": [False, True] * 2, "rope.freq_base_swa": 5000.0}
        | {"hidden_activation": "silu"},
    ),
    "eurobert": (
        "eurobert",
        "EuroBertModel",
        SIZES | {"num_key_value_heads": 2, "mask_token_id": 3},
        ENCODER
        | {"attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5}
        | {"rope.freq_base": 10000.0, "rope.scaling.type": "none"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_vectors_are_those_of_the_folder(case: str, tmp_path: Path) -> None:
    kind, architecture, config, fields = CASES[case]
    save(tmp_path, architecture, config)
    expected = pool(tmp_path, "embed", pooler_config={"pooling_type": "MEAN"})
    for form, least in (("f32", 0.999999), ("q8_0", 0.95)):
        file = tmp_path / f"{form}.gguf"
        convert(tmp_path, kind, file, form, **fields)
        found = pool(file, "embed")
        for ours, theirs in zip(found, expected, strict=True):
            assert least < float(ours @ theirs) < 1.000001
        if form == "f32":
            for ours, theirs in zip(found, expected, strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
            assert abs(float(found[2] @ found[3])) < 0.999


def _split(tensors: Tensors) -> Tensors:
    """Divide gate and up, as old files have them."""
    found = dict(tensors)
    for name, (kind, shape, data) in tensors.items():
        if "ffn_up" in name:
            half, middle = (shape[0] // 2, shape[1]), len(data) // 2
            found[name.replace("ffn_up", "ffn_gate")] = (kind, half, data[:middle])
            found[name] = (kind, half, data[middle:])
    return found


@pytest.mark.parametrize("split", [False, True])
def test_jina_embeddings_v2(split: bool, tmp_path: Path) -> None:
    save_jina(tmp_path)
    expected = pool(tmp_path, "embed", pooler_config={"pooling_type": "MEAN"})
    file = tmp_path / "jina.gguf"
    change = {"change": _split} if split else {}
    convert(tmp_path, "jina-bert-v2", file, **change, **LAYER_NORMS)
    for ours, theirs in zip(pool(file, "embed"), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


RANK = {"attention.causal": False, "attention.layer_norm_epsilon": 1e-12, "pooling_type": 4}
LABELS = {"classifier.output_labels": ["bad", "fair", "good"]}
RERANKERS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "roberta": ("bert", f"XLMRoberta{CLASSES}", ROBERTA | {"num_labels": 1}, RANK),
    "classes": ("bert", f"Roberta{CLASSES}", ROBERTA | {"num_labels": 3}, RANK | LABELS),
    "modern": (
        "modern-bert",
        f"ModernBert{CLASSES}",
        MODERN | {"num_labels": 1, "classifier_pooling": "mean"},
        WINDOWS | {"pooling_type": 4, "attention.sliding_window_pattern": 3},
    ),
}


@pytest.mark.parametrize("case", RERANKERS)
def test_scores_are_those_of_the_folder(case: str, tmp_path: Path) -> None:
    kind, architecture, config, fields = RERANKERS[case]
    save(tmp_path, architecture, config)
    expected = pool(tmp_path, "classify")
    for form, bound in (("f32", 1e-5), ("q8_0", 0.1)):
        file = tmp_path / f"{form}.gguf"
        convert(tmp_path, kind, file, form, **fields)
        spec = spec_of(file)
        pooler = spec.pooler("classify")
        assert pooler is not None
        assert pooler.size == config["num_labels"]
        if case == "classes":
            assert pooler.labels == ("bad", "fair", "good")
        with open_llm(file) as llm:
            for ours, theirs in zip(results(llm, "classify"), expected, strict=True):
                np.testing.assert_allclose(ours, theirs, atol=bound)


def test_one_layer_of_a_head(tmp_path: Path) -> None:
    """A head may be its last layer alone, or its first one alone with its function."""
    save(tmp_path, "BertModel", SIZES)
    rows = np.random.default_rng(1).normal(size=(2, 64)).astype(np.float32)
    vectors = pool(tmp_path, "embed", pooler_config={"use_activation": False})
    for name in ("cls", "cls.output"):

        def add_head(tensors: Tensors, name: str = name) -> Tensors:
            return tensors | {f"{name}.weight": (TYPES["f32"], rows.shape, rows.tobytes())}

        file = tmp_path / f"{name}.gguf"
        convert(tmp_path, "bert", file, change=add_head, **RANK)
        for ours, vector in zip(pool(file, "classify"), vectors, strict=True):
            x = rows @ vector
            x = np.exp(np.tanh(x) if name == "cls" else x)
            np.testing.assert_allclose(ours, x / x.sum(), rtol=1e-3, atol=1e-6)


def test_qwen3_reranker(tmp_path: Path) -> None:
    """The score is the probability of yes against no, as in llama.cpp."""
    sizes = SIZES | {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False}
    model = save(tmp_path, "Qwen3ForCausalLM", sizes)
    yes, no = 17, 5

    def add_head(tensors: Tensors) -> Tensors:
        rows = model.lm_head.weight.detach().numpy()[[yes, no]]
        return tensors | {"cls.output.weight": (TYPES["f32"], rows.shape, rows.tobytes())}

    fields: dict[str, Any] = {"attention.head_count_kv": 2, "attention.key_length": 16}
    fields |= {"attention.layer_norm_rms_epsilon": 1e-6, "attention.value_length": 16}
    fields |= {"pooling_type": 4, "classifier.output_labels": ["yes", "no"]}
    file = tmp_path / "reranker.gguf"
    convert(tmp_path, "qwen3", file, change=add_head, **fields)
    for ours, theirs in zip(pool(file, "classify"), logits(model), strict=True):
        expected = torch.sigmoid(theirs[-1, yes] - theirs[-1, no])
        np.testing.assert_allclose(ours, [float(expected)], rtol=1e-4, atol=1e-6)
    # The head's rows may be blocks, too.
    rows = model.lm_head.weight.detach().numpy()[[yes, no]]
    head = (TYPES["q8_0"], rows.shape, quantize(rows, "q8_0"))
    blocks = tmp_path / "blocks.gguf"
    convert(tmp_path, "qwen3", blocks, change=lambda it: it | {"cls.output.weight": head}, **fields)
    for ours, theirs in zip(pool(blocks, "classify"), pool(file, "classify"), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=0.02)
    spec = spec_of(file)
    assert not spec.generates
    assert spec.poolers[0].labels == ("yes",)
    # Other labels are classes.
    convert(
        tmp_path,
        "qwen3",
        file,
        change=add_head,
        **fields | {"classifier.output_labels": ["a", "b"]},
    )
    for ours, theirs in zip(pool(file, "classify"), logits(model), strict=True):
        expected = torch.softmax(theirs[-1, [yes, no]], -1)
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-6)


def test_heads_that_do_not_fit_are_named(tmp_path: Path) -> None:
    save(tmp_path, f"Roberta{CLASSES}", ROBERTA | {"num_labels": 1})
    file = tmp_path / "bad.gguf"
    convert(tmp_path, "bert", file, **RANK, **LABELS)
    with pytest.raises(ModelError, match="output_labels must be 1 texts"):
        spec_of(file)

    def without_head(tensors: Tensors) -> Tensors:
        return {name: it for name, it in tensors.items() if not name.startswith("cls")}

    convert(tmp_path, "bert", file, change=without_head, **RANK)
    with pytest.raises(ModelError, match=r"needs the tensor cls\.weight or cls\.output"):
        spec_of(file)
