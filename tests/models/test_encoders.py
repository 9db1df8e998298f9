"""Hidden states and classes of every encoder, equal to those of transformers in float32."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from octavo.checkpoints.registry import open_checkpoint
from octavo.errors import ModelError
from octavo.kernels.native import NativeOps
from octavo.kernels.torch_tensors import as_torch
from octavo.layers.pooler import Floats, PooledRow
from octavo.models.blocks.attention import RelativeBias, share_heads
from octavo.models.blocks.disentangled import Distances
from octavo.models.decoder import DecoderModel
from octavo.models.loader import LoadedWeights
from octavo.system.distributed import Rank
from tests.models.harness import (
    Runner,
    load,
    make_hf,
    make_prompts,
    save_and_load,
    save_config,
    spec_of,
)

VOCAB = 97
LENGTHS = (1, 17, 3, 40, 64, 33, 26)
"""Numbers of tokens of the texts, all in one step."""
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 40, "intermediate_size": 56}
SIZES |= {"num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 80}
SIZES |= {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "num_labels": 3}
ODD = SIZES | {"hidden_size": 39, "num_attention_heads": 3, "intermediate_size": 41}
WIDE = SIZES | {"num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 100}
DISTIL = {"vocab_size": VOCAB, "dim": 40, "hidden_dim": 56, "n_layers": 3, "n_heads": 4}
DISTIL |= {"max_position_embeddings": 80, "pad_token_id": 1, "num_labels": 3}
MODERN = SIZES | {"local_attention": 14, "num_hidden_layers": 4, "cls_token_id": 1}
MODERN |= {"sep_token_id": 1}
ONE_TYPE = SIZES | {"type_vocab_size": 1}
DISENTANGLED = {"relative_attention": True, "pos_att_type": "p2c|c2p"}
DEBERTA = SIZES | DISENTANGLED | {"position_buckets": 16, "norm_rel_ebd": "layer_norm"}
DEBERTA |= {"share_att_key": True, "position_biased_input": False, "type_vocab_size": 0}
CONV = {"conv_kernel_size": 3, "conv_act": "gelu"}
FIRST = SIZES | DISENTANGLED | {"position_biased_input": False, "type_vocab_size": 0}
CLASSES, TOKENS = "ForSequenceClassification", "ForTokenClassification"

ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", SIZES),
    "bert-odd": (f"Bert{CLASSES}", ODD),
    "bert-wide": (f"Bert{TOKENS}", WIDE | {"hidden_act": "gelu_new", "type_vocab_size": 1}),
    "bert-mlm": ("BertForMaskedLM", SIZES | {"hidden_act": "relu"}),
    "roberta": (f"Roberta{CLASSES}", ODD | {"pad_token_id": 3}),
    "roberta-model": ("RobertaModel", SIZES),
    "roberta-tokens": (f"Roberta{TOKENS}", WIDE),
    "xlm-roberta": (f"XLMRoberta{CLASSES}", ONE_TYPE | {"num_labels": 1}),
    "xlm-roberta-model": ("XLMRobertaModel", ODD),
    "xlm-roberta-tokens": (f"XLMRoberta{TOKENS}", WIDE),
    "camembert": (f"Camembert{CLASSES}", SIZES),
    "camembert-model": ("CamembertModel", ODD),
    "camembert-tokens": (f"Camembert{TOKENS}", WIDE),
    "distilbert": (f"DistilBert{CLASSES}", DISTIL),
    "distilbert-model": ("DistilBertModel", DISTIL | {"dim": 39, "n_heads": 3}),
    "distilbert-tokens": (f"DistilBert{TOKENS}", DISTIL | {"n_heads": 2, "activation": "relu"}),
    "electra": (f"Electra{CLASSES}", ODD | {"embedding_size": 17}),
    "electra-model": ("ElectraModel", SIZES | {"embedding_size": 40}),
    "electra-tokens": (f"Electra{TOKENS}", WIDE | {"embedding_size": 24}),
    "mpnet": (f"MPNet{CLASSES}", SIZES),
    "mpnet-model": ("MPNetModel", ODD | {"max_position_embeddings": 300}),
    "mpnet-tokens": (f"MPNet{TOKENS}", WIDE | {"relative_attention_num_buckets": 32}),
    "albert": (f"Albert{CLASSES}", SIZES | {"embedding_size": 17}),
    "albert-model": ("AlbertModel", ODD | {"num_hidden_groups": 2, "embedding_size": 8}),
    "albert-tokens": (f"Albert{TOKENS}", WIDE | {"hidden_act": "gelu", "embedding_size": 40}),
    "modernbert": (f"ModernBert{CLASSES}", MODERN),
    "modernbert-model": ("ModernBertModel", MODERN | {"norm_bias": True, "local_attention": 9}),
    "modernbert-mean": (
        f"ModernBert{CLASSES}",
        MODERN
        | {"classifier_pooling": "mean", "classifier_bias": True, "attention_bias": True}
        | {"mlp_bias": True, "norm_bias": True},
    ),
    "modernbert-tokens": (f"ModernBert{TOKENS}", MODERN | {"num_attention_heads": 2}),
    "eurobert": (f"EuroBert{CLASSES}", SIZES | {"num_key_value_heads": 2, "mask_token_id": 3}),
    "eurobert-model": ("EuroBertModel", WIDE | {"num_key_value_heads": 2, "mask_token_id": 3}),
    "eurobert-first": (
        f"EuroBert{CLASSES}",
        SIZES | {"classifier_pooling": "bos", "mask_token_id": 3},
    ),
    "eurobert-tokens": (f"EuroBert{TOKENS}", SIZES | {"mask_token_id": 3}),
    "deberta": (f"DebertaV2{CLASSES}", DEBERTA | {"num_labels": 1}),
    "deberta-model": ("DebertaV2Model", DEBERTA | {"max_relative_positions": 24}),
    "deberta-tokens": (f"DebertaV2{TOKENS}", DEBERTA | {"hidden_act": "gelu_new"}),
    "deberta-own": (f"DebertaV2{CLASSES}", ODD | DISENTANGLED | {"type_vocab_size": 0}),
    "deberta-keys": (f"DebertaV2{TOKENS}", DEBERTA | {"pos_att_type": ["c2p"]}),
    "deberta-queries": (
        "DebertaV2ForMaskedLM",
        DEBERTA | {"share_att_key": False, "pos_att_type": "P2C", "max_relative_positions": 11},
    ),
    "deberta-absolute": (
        f"DebertaV2{CLASSES}",
        SIZES | {"pos_att_type": "c2p|p2c", "type_vocab_size": 2, "norm_rel_ebd": "layer_norm"},
    ),
    "deberta-conv": (
        f"DebertaV2{CLASSES}",
        DEBERTA | CONV,
    ),
    "deberta-conv-model": ("DebertaV2Model", DEBERTA | CONV | {"conv_kernel_size": 5}),
    "deberta-conv-tokens": (f"DebertaV2{TOKENS}", ODD | DISENTANGLED | CONV),
    "deberta-v1": (f"Deberta{CLASSES}", FIRST | {"num_labels": 1}),
    "deberta-v1-model": ("DebertaModel", FIRST | ODD | {"max_relative_positions": 24}),
    "deberta-v1-tokens": (
        f"Deberta{TOKENS}",
        FIRST | WIDE | {"pos_att_type": "p2c", "position_biased_input": True},
    ),
    "deberta-v1-mlm": (
        "DebertaForMaskedLM",
        FIRST | {"pos_att_type": ["c2p"], "type_vocab_size": 2},
    ),
    "deberta-unused": (f"DebertaV2{TOKENS}", DEBERTA | {"pos_att_type": None}),
    "gte": (f"Gte{CLASSES}", ONE_TYPE),
    "gte-model": ("GteModel", WIDE | {"type_vocab_size": 0}),
    "gte-tokens": (f"Gte{TOKENS}", SIZES | {"type_vocab_size": 2}),
    "nomic": (f"NomicBert{CLASSES}", SIZES),
    "nomic-model": ("NomicBertModel", WIDE),
    "nomic-tokens": (f"NomicBert{TOKENS}", SIZES | {"head_dim": 6}),
    "jina-v3": (f"JinaEmbeddingsV3{CLASSES}", ONE_TYPE),
    "jina-v3-model": ("JinaEmbeddingsV3Model", WIDE | {"type_vocab_size": 2}),
    "jina-v3-tokens": (f"JinaEmbeddingsV3{TOKENS}", ONE_TYPE),
}
BATCHED = ("bert", "roberta-tokens", "distilbert", "electra", "mpnet", "albert-model", "modernbert")
BATCHED += ("modernbert-mean", "eurobert", "gte", "nomic", "jina-v3", "deberta", "deberta-own")
BATCHED += ("deberta-conv", "deberta-v1")
"""Cases of each kind for comparisons of bits."""
TYPELESS = ("DistilBert", "MPNet", "ModernBert", "EuroBert")
"""Encoders without token types."""


def texts(config: dict[str, Any] = SIZES) -> tuple[list[list[int]], list[list[int]]]:
    """Return texts, and the types of their tokens: every second text is a pair."""
    ids = make_prompts(VOCAB - 4, LENGTHS, seed=1)
    # No case has a padding token among them.
    ids = [[token + 1 for token in text] for text in ids]
    pairs = config.get("type_vocab_size", 2) == 2
    types = [[int(pairs and i % 2 and p > 5) for p in range(len(t))] for i, t in enumerate(ids)]
    return ids, types


def compute(model: DecoderModel, ids: list[list[int]], types: list[list[int]]) -> list[Tensor]:
    """Return the hidden states of each text; all are in one step."""
    runner = Runner(model, len(ids), 128)
    flat = [kind for text in types for kind in text]
    hidden, starts = runner.hidden(dict(enumerate(ids)), flat)
    states = as_torch(hidden)
    return [states[a:b] for a, b in pairwise(starts)]


def pool(model: DecoderModel, task: str, states: Tensor, chunk: int = 128) -> Floats:
    """Return the result of a text, of which `chunk` tokens are pooled at a time."""
    pooler, hidden = model.poolers[task], states.float().numpy()
    parts = [(i, hidden[i : i + chunk]) for i in range(0, len(hidden), chunk)]
    if pooler.pooling == ("all",):
        return np.concatenate([pooler.head(part) for _, part in parts])
    row = PooledRow(pooler.pooling)
    for first, part in parts:
        row.add(pooler.of_tokens(part), first)
    return pooler.head(row.result(len(hidden))[None])[0]


@pytest.mark.parametrize("case", ENCODERS)
def test_same_as_transformers(case: str, tmp_path: Path) -> None:
    architecture, config = ENCODERS[case]
    hf = make_hf(architecture, **config)
    model = save_and_load(hf, tmp_path)
    ids, types = texts(config)
    found = compute(model, ids, types)
    tasks = [pooler.task for pooler in model.spec.poolers]
    for text, kinds, states in zip(ids, types, found, strict=True):
        inputs = {"input_ids": torch.tensor([text])}
        if not architecture.startswith(TYPELESS):
            inputs["token_type_ids"] = torch.tensor([kinds])
        with torch.inference_mode():
            out = hf(**inputs, output_hidden_states=True)
        hidden = out.hidden_states[-1] if "logits" in out else out.last_hidden_state
        torch.testing.assert_close(states, hidden[0], atol=2e-5, rtol=2e-5)
        if CLASSES in architecture or TOKENS in architecture:
            result = torch.from_numpy(pool(model, tasks[0], states))
            torch.testing.assert_close(result, out.logits[0], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", BATCHED)
def test_the_same_bits_alone_and_in_any_batch(case: str, dtype: str, tmp_path: Path) -> None:
    architecture, config = ENCODERS[case]
    model = save_and_load(make_hf(architecture, **config), tmp_path, dtype)
    task = model.spec.poolers[0].task
    ids, types = texts(config)
    alone = [compute(model, [a], [b])[0] for a, b in zip(ids, types, strict=True)]
    backwards = compute(model, ids[::-1], types[::-1])[::-1]
    for states, others, among in zip(alone, compute(model, ids, types), backwards, strict=True):
        assert torch.equal(states, others)
        assert torch.equal(states, among)
        whole = pool(model, task, states)
        assert np.array_equal(whole, pool(model, task, states, chunk=7))


def test_ranks_of_deberta_v1(tmp_path: Path) -> None:
    """The module of queries, keys and values has no bias of keys, and rows head by head."""
    make_hf("DebertaModel", **FIRST).save_pretrained(tmp_path)
    state, head = load_file(tmp_path / "model.safetensors"), 10
    name = "encoder.layer.2.attention.self."
    queries, values = state[f"{name}q_bias"], state[f"{name}v_bias"]
    spec = spec_of(tmp_path)
    for rank in (Rank(0, 1), Rank(0, 3), Rank(1, 3), Rank(2, 3)):
        weights = LoadedWeights(
            spec.split(rank),
            open_checkpoint(tmp_path),
            dtype="float32",
            ops=NativeOps(),
            cache=None,
        ).load()
        begin, end = (head * at for at in share_heads(4, 4, rank)[0])
        own = slice(begin, end)
        bias = torch.cat([queries[own], torch.zeros(end - begin), values[own]])
        assert torch.equal(as_torch(weights["layers.2.qkv_proj.bias"]), bias)


def renamed(folder: Path, names: dict[str, str], config: dict[str, Any]) -> None:
    """Change a saved model's names of tensors, by parts of names, and replace fields."""
    tensors = load_file(folder / "model.safetensors")
    for old, new in names.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text()) | config
    known = {name: value for name, value in fields.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(known))


def test_old_names_of_norms(tmp_path: Path) -> None:
    hf, (ids, types) = make_hf("BertForMaskedLM", **SIZES), texts()
    expected = compute(save_and_load(hf, tmp_path), ids, types)
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed(tmp_path, old, {})
    assert all(map(torch.equal, compute(load(tmp_path), ids, types), expected))


def test_a_bare_encoder_in_a_checkpoint_with_a_head(tmp_path: Path) -> None:
    hf, (ids, types) = make_hf("BertForMaskedLM", **SIZES), texts()
    expected = compute(save_and_load(hf, tmp_path), ids, types)
    renamed(tmp_path, {}, {"architectures": ["BertModel"]})
    assert all(map(torch.equal, compute(load(tmp_path), ids, types), expected))


@pytest.mark.parametrize("scaled", [False, True])
def test_gte_with_alibabas_names(scaled: bool, tmp_path: Path) -> None:
    """NTK scaling with a fixed factor: a larger base, and slightly lower frequencies."""
    rope = {"rope_type": "default", "rope_theta": 5e3}
    fields = {"rope_theta": 5e3, "position_embedding_type": "rope", "rope_parameters": ...}
    if scaled:
        rope = {"rope_type": "linear", "rope_theta": 2e4, "factor": 4.0 ** (2 / 10)}
        fields |= {"rope_scaling": {"type": "ntk", "factor": 4.0}}
    hf = make_hf(f"Gte{CLASSES}", **ONE_TYPE, rope_parameters=rope)
    ids, types = texts(ONE_TYPE)
    expected = compute(save_and_load(hf, tmp_path), ids, types)
    fields |= {"architectures": [f"New{CLASSES}"], "model_type": "new"}
    renamed(tmp_path, {"gte.": "new."}, fields)
    model = load(tmp_path)
    assert model.spec.max_model_len == SIZES["max_position_embeddings"]
    for a, b in zip(compute(model, ids, types), expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_nomic_bert_with_the_fields_of_its_code(tmp_path: Path) -> None:
    make_hf("NomicBertModel", **SIZES).save_pretrained(tmp_path)
    expected = spec_of(tmp_path)
    config = {
        "architectures": ["NomicBertModel"],
        "auto_map": {"AutoModel": "modeling_hf_nomic_bert.NomicBertModel"},
        "activation_function": "swiglu",
        "causal": False,
        "layer_norm_epsilon": 1e-12,
        "max_trained_positions": 80,
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
        "qkv_proj_bias": False,
        "n_embd": 40,
        "n_head": 4,
        "n_inner": 56,
        "n_layer": 3,
        "n_positions": 8192,
        "parallel_block": False,
        "prenorm": False,
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_scale_base": None,
        "rotary_scaling_factor": 2,
        "torch_dtype": "float32",
        "type_vocab_size": 2,
        "vocab_size": VOCAB,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert spec_of(tmp_path, trust_remote_code=True) == expected
    with pytest.raises(ModelError, match="auto_map"):
        spec_of(tmp_path)


@pytest.mark.parametrize(
    ("shape", "slopes"),
    [(ODD, (-4, -8, -2)), (SIZES, (-2, -4, -6, -8)), (WIDE, (-4, -8))],
    ids=["odd", "four heads", "wide"],
)
def test_jina_embeddings_v2(shape: dict[str, Any], slopes: tuple[int, ...], tmp_path: Path) -> None:
    """A reference of its code: ALiBi on both sides, and a gate with GELU.

    `slopes` are the exponents of the heads' slopes, powers of 2.
    """
    make_hf(f"Bert{CLASSES}", **shape).save_pretrained(tmp_path)
    config = {"architectures": [f"JinaBert{CLASSES}"], "position_embedding_type": "alibi"}
    renamed(
        tmp_path,
        {"output.dense": "mlp.wo", "attention.mlp.wo": "attention.output.dense"}
        | {".output.LayerNorm": ".mlp.layernorm", "attention.mlp.": "attention.output."}
        | {"attention.output.layernorm": "attention.output.LayerNorm"},
        config | {"feed_forward_type": "geglu"},
    )
    file, hidden = tmp_path / "model.safetensors", shape["hidden_size"]
    state = load_file(file)
    del state["bert.embeddings.position_embeddings.weight"]
    for name in [name for name in state if "intermediate" in name]:
        tensor = state.pop(name)
        if name.endswith("weight"):
            torch.manual_seed(len(state))
            gated = torch.cat([tensor, 0.3 * torch.randn(tensor.shape)])
            state[name.replace("intermediate.dense", "mlp.gated_layers")] = gated
    save_file(state, file)
    ids, types = texts()
    model = load(tmp_path)

    def linear(name: str, x: Tensor) -> Tensor:
        return functional.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    def norm(name: str, x: Tensor) -> Tensor:
        weights = state[f"{name}.weight"], state[f"{name}.bias"]
        return functional.layer_norm(x, (hidden,), *weights, eps=1e-12)

    factors = torch.tensor([2.0**slope for slope in slopes])
    for text, kinds, found in zip(ids, types, compute(model, ids, types), strict=True):
        assert torch.equal(found, compute(model, [text], [kinds])[0])
        at = torch.arange(len(text))
        bias = -(at[:, None] - at[None]).abs() * factors[:, None, None]
        x = state["bert.embeddings.word_embeddings.weight"][text]
        x = x + state["bert.embeddings.token_type_embeddings.weight"][kinds]
        x = norm("bert.embeddings.LayerNorm", x)
        for i in range(shape["num_hidden_layers"]):
            layer = f"bert.encoder.layer.{i}."
            heads = [
                linear(f"{layer}attention.self.{part}", x)
                .view(len(text), len(slopes), -1)
                .transpose(0, 1)
                for part in ("query", "key", "value")
            ]
            out = functional.scaled_dot_product_attention(*heads, attn_mask=bias)
            out = linear(f"{layer}attention.output.dense", out.transpose(0, 1).flatten(1))
            x = norm(f"{layer}attention.output.LayerNorm", out + x)
            gate, up = linear(f"{layer}mlp.gated_layers", x).chunk(2, dim=-1)
            out = linear(f"{layer}mlp.wo", functional.gelu(gate) * up)
            x = norm(f"{layer}mlp.layernorm", out + x)
        torch.testing.assert_close(found, x, atol=2e-5, rtol=2e-5)
        logits = linear("classifier", linear("bert.pooler.dense", x[0]).tanh())
        result = torch.from_numpy(pool(model, "classify", found))
        torch.testing.assert_close(result, logits, atol=2e-5, rtol=2e-5)


def test_buckets_of_distances() -> None:
    bias = RelativeBias("", 32, 4)
    distances = torch.arange(-500, 501)
    expected = MPNetEncoder.relative_position_bucket(distances, num_buckets=32)
    assert bias.rows == tuple(expected.tolist()[500 - 128 : 501 + 128])
    assert set(expected[: 500 - 128].tolist()) == {bias.rows[0]}
    assert set(expected[501 + 128 :].tolist()) == {bias.rows[-1]}


@pytest.mark.parametrize("buckets", [256, 2, 4, 32, 510, None])
def test_rows_of_distances(buckets: int | None) -> None:
    """The rows of transformers, also for longer texts than a table of distances has."""
    longest, most = 512, 4 * 512
    before = -torch.arange(-most, most + 1)
    half = buckets or longest
    if buckets is None:
        bucket = before
    else:
        bucket = make_log_bucket_position(before, buckets, longest).long()
    expected = (bucket + half).clamp(0, 2 * half - 1)
    distances = Distances(longest, buckets)
    assert distances.rows == 2 * half
    rows = as_torch(distances.compute())
    assert torch.equal(rows, expected[most - longest : most + longest + 1].int())
    assert set(expected[: most - longest].tolist()) == {int(rows[0])}
    assert set(expected[most + longest + 1 :].tolist()) == {int(rows[-1])}


def test_layers_of_albert_share_their_weights(tmp_path: Path) -> None:
    sizes = SIZES | {"embedding_size": 17}
    one, twelve = (
        save_config(tmp_path, "AlbertModel", sizes | {"num_hidden_layers": layers})
        for layers in (1, 12)
    )
    assert len(twelve.layers) == 12
    assert twelve.weights() == one.weights()
    assert twelve.weight_nbytes("float32") == one.weight_nbytes("float32")
    halves = save_config(
        tmp_path, "AlbertModel", sizes | {"num_hidden_layers": 5, "num_hidden_groups": 2}
    )
    assert halves.shared_layers == (0, 0, 0, 1, 1)
    assert halves.stage(2, 4).shared_layers == (0, 1)


@pytest.mark.parametrize(
    ("case", "fields", "message"),
    [
        ("bert", {"is_decoder": True}, "is_decoder=True.*only encoders"),
        ("bert", {"add_cross_attention": True}, "add_cross_attention=True.*only encoders"),
        ("bert", {"position_embedding_type": "relative_key"}, "only learned ones"),
        ("bert", {"hidden_size": 42}, "4 heads do not divide"),
        ("bert-odd", {"id2label": ["a", "b"]}, "id2label=.*numbers of the classes"),
        ("bert-odd", {"id2label": {"first": "a"}}, "id2label=.*numbers of the classes"),
        (
            "bert-odd",
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}},
            "activation_fn=.*supported: torch.nn.modules.linear.Identity",
        ),
        (
            "xlm-roberta-model",
            {"lora_adaptations": ["retrieval.query"]},
            "adapters of tasks need rotary",
        ),
        ("albert", {"inner_group_num": 2}, "only groups of one layer"),
        ("modernbert", {"classifier_pooling": "max"}, "supported: cls, mean"),
        ("modernbert", {"layer_types": ["full_attention"]}, "one type for each of 4 layers"),
        ("eurobert", {"clf_pooling": "max"}, "supported: bos, mean, late"),
        ("gte", {"logn_attention_scale": True}, "a scale by the length"),
        ("gte", {"pack_qkv": False}, "only one matrix"),
        ("gte", {"layer_norm_type": "rms_norm"}, "only layer norms"),
        ("gte", {"position_embedding_type": "absolute"}, "only rotary ones"),
        ("gte", {"rope_scaling": {"type": "ntk", "factor": 2, "mixed_b": 0.6}}, "mixed_b=0.6"),
        ("nomic", {"n_embd": 40, "prenorm": True}, "prenorm=True"),
        ("nomic", {"n_embd": 40, "activation_function": "geglu"}, "supported: swiglu, gelu"),
        ("nomic", {"n_embd": 40, "rotary_emb_fraction": 0.5}, "whole heads"),
        ("nomic", {"num_experts": 8}, "mixtures of experts"),
        ("deberta", {"conv_kernel_size": 4}, "conv_kernel_size=4.*it must be odd"),
        ("deberta", {"conv_kernel_size": 3, "conv_act": "tanh"}, "conv_act='tanh'.*supported"),
        ("deberta", CONV | {"conv_groups": 2}, "conv_groups=2.*all channels"),
        ("deberta-v1", {"talking_head": True}, "heads that do not mix"),
        ("deberta", {"embedding_size": 8}, "embedding_size=8"),
        ("deberta", {"attention_head_size": 20}, "the hidden size together"),
        ("deberta", {"pooler_hidden_act": "tanh"}, "only GELU"),
        ("deberta", {"pooler_hidden_size": 20}, "only a head of the hidden size"),
        ("deberta", {"pos_att_type": "c2p|p2p"}, "pos_att_type='c2p.p2p'.*supported: c2p, p2c"),
        ("deberta", {"norm_rel_ebd": "rms_norm"}, "supported: none, layer_norm"),
        ("deberta", {"position_buckets": 17}, "it must be even, and less than 158"),
        ("deberta", {"position_buckets": 160}, "it must be even, and less than 158"),
        ("bert", {"architectures": ["JinaBertModel"]}, "only ALiBi"),
        (
            "bert",
            {"architectures": ["JinaBertModel"], "position_embedding_type": "alibi"},
            "feed_forward_type='original'.*only GEGLU",
        ),
    ],
)
def test_refused(case: str, fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_config(tmp_path, *ENCODERS[case])
    config = json.loads((tmp_path / "config.json").read_text()) | fields
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        spec_of(tmp_path)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "softmax"),
        ({"id2label": {"0": "score"}}, "sigmoid"),
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"problem_type": "regression"}, "none"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "none"),
        (
            {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"},
            "sigmoid",
        ),
    ],
)
def test_last_function_of_classifiers(
    fields: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    save_config(tmp_path, *ENCODERS["roberta"])
    config = json.loads((tmp_path / "config.json").read_text()) | fields
    (tmp_path / "config.json").write_text(json.dumps(config))
    pooler = spec_of(tmp_path).poolers[0]
    assert pooler.activation == expected
    assert len(pooler.labels) == pooler.size == (1 if "id2label" in fields else 3)


def test_splade(tmp_path: Path) -> None:
    """Weights of the vocabulary, from the head that predicts masked tokens."""
    hf, (ids, types) = make_hf("BertForMaskedLM", **ODD), texts()
    hf.save_pretrained(tmp_path)
    renamed(tmp_path, {}, {"architectures": ["BertSpladeSparseEmbeddingModel"]})
    model = load(tmp_path)
    assert model.spec.poolers[0].size == VOCAB
    for text, kinds, states in zip(ids, types, compute(model, ids, types), strict=True):
        with torch.inference_mode():
            out = hf(torch.tensor([text]), token_type_ids=torch.tensor([kinds])).logits[0]
        found = pool(model, "embed", states)
        expected = out.relu().log1p().amax(0)
        torch.testing.assert_close(torch.from_numpy(found), expected, atol=2e-5, rtol=2e-5)
        assert np.array_equal(found, pool(model, "embed", states, chunk=7))
