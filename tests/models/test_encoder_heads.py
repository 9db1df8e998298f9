"""Heads of encoders for weights and vectors of tokens, equal to a reference in float32."""

import json
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from octavo import LLM
from octavo.errors import ModelError, RequestError
from octavo.frontend.pooling import sparse_vector
from octavo.outputs import PoolingOutput, PoolingRequestOutput
from octavo.pooling_params import PoolingParams
from tests.encoders import write_encoder
from tests.models.harness import make_hf, make_prompts, spec_of
from tests.models.test_encoders import DEBERTA, DISTIL, MODERN, ODD, ONE_TYPE, SIZES, VOCAB, WIDE
from tests.pooling import (
    change_config,
    dense_config,
    open_llm,
    results,
    states,
    unit,
    write_dense,
    write_json,
    write_modules,
)

SHAPES = {"even": SIZES, "odd": ODD, "wide": WIDE}
LENGTHS = (3, 17, 1, 40, 29, 64)
BGE_M3 = {"architectures": ["BgeM3EmbeddingModel"]}


def texts(begin: int = 0, end: int = 2) -> list[list[int]]:
    """Return texts between special tokens, the last one without them."""
    found = [[begin, *ids, end] for ids in make_prompts(VOCAB, LENGTHS, seed=2)]
    found[3][5:9] = found[3][20:24]  # some tokens twice
    found[4][3:5] = [3, end]
    return [*found, found[1][1:-1]]


def assert_near(found: list[np.ndarray], expected: list[Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == tuple(theirs.shape)
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-4, atol=2e-5)


def assert_alone_as_in_a_batch(
    folder: Path, task: str, prompts: list[list[int]], **settings: Any
) -> None:
    """Compare the bits of results alone, in a batch, and backwards in one."""
    for dtype in ("float32", "bfloat16"):
        with open_llm(folder, max_model_len=78, dtype=dtype, **settings) as llm:
            alone = [results(llm, task, [ids])[0] for ids in prompts]
            for _ in range(2):
                among = results(llm, task, prompts[::-1])[::-1]
                assert [x.tobytes() for x in among] == [x.tobytes() for x in alone]
                among = results(llm, task, prompts)
                assert [x.tobytes() for x in among] == [x.tobytes() for x in alone]


def write_bge_m3(folder: Path, shape: str) -> tuple[Any, torch.nn.Linear, torch.nn.Linear]:
    """Write BGE-M3's files; return the encoder and its two heads."""
    hf = make_hf("XLMRobertaModel", **SHAPES[shape])
    hf.save_pretrained(folder)
    size = SHAPES[shape]["hidden_size"]
    heads = torch.nn.Linear(size, 1), torch.nn.Linear(size, size)
    for name, head in zip(("sparse_linear", "colbert_linear"), heads, strict=True):
        torch.save(head.state_dict(), folder / f"{name}.pt")
    return hf, *heads


@pytest.mark.parametrize("shape", SHAPES)
def test_bge_m3(shape: str, tmp_path: Path) -> None:
    hf, sparse, colbert = write_bge_m3(tmp_path, shape)
    prompts = texts()
    hidden = states(hf, prompts)
    with torch.no_grad():
        vectors = [unit(colbert(x[ids[0] == 0 :])) for x, ids in zip(hidden, prompts, strict=True)]
        weights = [sparse(x).relu()[:, 0] for x in hidden]
    inner = [w[1:-1] for w in weights[:-1]] + weights[-1:]
    with open_llm(tmp_path, max_model_len=78, hf_overrides=BGE_M3) as llm:
        assert_near(results(llm, None, prompts), [unit(x[0]) for x in hidden])
        assert_near(results(llm, "token_embed", prompts), vectors)
        found = results(llm, "token_classify", prompts)
        assert_near(found, inner)
        bare = results(llm, "token_classify", prompts, use_activation=False)
        assert min(x.min() for x in bare) < 0
        pooler = llm.llm_engine.spec.pooler("token_classify")
    assert pooler is not None
    for data, ids, theirs in zip(found, prompts, weights, strict=True):
        output = PoolingRequestOutput("r", PoolingOutput(data), ids, 0)
        entries, ours = sparse_vector(output, pooler, PoolingParams())
        expected: dict[int, float] = {}
        for token, weight in zip(ids, theirs.tolist(), strict=True):  # as FlagEmbedding does
            if token not in (0, 1, 2, 3) and weight > expected.get(token, 0):
                expected[token] = weight
        assert entries.tolist() == sorted(expected)
        np.testing.assert_allclose(ours, [expected[i] for i in entries], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("task", ["embed", "token_embed", "token_classify"])
def test_bge_m3_in_a_batch(task: str, tmp_path: Path) -> None:
    write_bge_m3(tmp_path, "odd")
    assert_alone_as_in_a_batch(tmp_path, task, texts(), hf_overrides=BGE_M3)


def test_bge_m3_without_its_heads(tmp_path: Path) -> None:
    write_bge_m3(tmp_path, "even")
    (tmp_path / "sparse_linear.pt").unlink()
    with pytest.raises(ModelError, match=r"sparse_linear.pt is missing"):
        open_llm(tmp_path, max_model_len=78, hf_overrides=BGE_M3).__enter__()
    torch.save(functional.relu, tmp_path / "sparse_linear.pt")
    with pytest.raises(ModelError, match=r"sparse_linear.pt cannot be read.*than tensors"):
        open_llm(tmp_path, max_model_len=78, hf_overrides=BGE_M3).__enter__()
    assert [p.task for p in spec_of(tmp_path).poolers] == ["embed", "token_embed"]


def write_colbert(folder: Path, name: str, prefix: str, sizes: dict[str, Any], size: int) -> Any:
    """Write an encoder with a matrix for vectors of `size` numbers; return both."""
    hf = make_hf(name, **sizes)
    hf.save_pretrained(folder)
    linear = torch.nn.Linear(sizes["hidden_size"], size, bias=False)
    tensors = load_file(folder / "model.safetensors")
    tensors = {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
    save_file(tensors | {"linear.weight": linear.weight.detach()}, folder / "model.safetensors")
    return hf, linear


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("field", ["dim", "colbert_dim", "projection_dim", ""])
def test_colbert_with_bert(shape: str, field: str, tmp_path: Path) -> None:
    hf, linear = write_colbert(tmp_path, "BertModel", "bert.", SHAPES[shape], 13)
    fields = {field: 13} if field else {}
    change_config(tmp_path, architectures=["HF_ColBERT"], **fields)
    if not field:
        with pytest.raises(ModelError, match="does not have the size of a token's vector"):
            spec_of(tmp_path)
        overrides = {"dim": 13}
    prompts = texts()
    with torch.no_grad():
        expected = [unit(linear(x)) for x in states(hf, prompts)]
    with open_llm(tmp_path, max_model_len=78, hf_overrides=fields or overrides) as llm:
        assert_near(results(llm, None, prompts), expected)
        assert [pooler.task for pooler in llm.llm_engine.spec.poolers] == ["token_embed"]
        with pytest.raises(RequestError, match="It can: token_embed"):
            results(llm, "embed", prompts)


@pytest.mark.parametrize("sizes", [MODERN, MODERN | {"num_attention_heads": 2}, MODERN | ODD])
def test_colbert_with_modernbert(sizes: dict[str, Any], tmp_path: Path) -> None:
    if sizes["hidden_size"] == 39:
        sizes = sizes | {"hidden_size": 42}
    hf, linear = write_colbert(tmp_path, "ModernBertModel", "", sizes, 24)
    change_config(tmp_path, architectures=["ColBERTModernBertModel"], colbert_dim=24)
    prompts = texts()
    with torch.no_grad():
        expected = [unit(linear(x)) for x in states(hf, prompts)]
    with open_llm(tmp_path, max_model_len=78) as llm:
        assert_near(results(llm, "token_embed", prompts), expected)
        bare = results(llm, "token_embed", prompts, use_activation=False)
    with torch.no_grad():
        assert_near(bare, [linear(x) for x in states(hf, prompts)])


@pytest.mark.parametrize("architecture", ["HF_ColBERT", "ColBERTJinaRobertaModel"])
@pytest.mark.parametrize("sizes", [ONE_TYPE, ONE_TYPE | {"num_attention_heads": 2}, WIDE])
def test_colbert_of_jina(architecture: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    """The encoder is that of jina-embeddings-v3, with the fields of Jina's code."""
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    hf, linear = write_colbert(
        tmp_path, "JinaEmbeddingsV3Model", "roberta.", sizes | {"rope_parameters": rope}, 16
    )
    fields = {"architectures": [architecture], "model_type": "xlm-roberta", "colbert_dim": 16}
    fields |= {"position_embedding_type": "rotary", "rotary_emb_base": 5000.0}
    fields |= {"matryoshka_dimensions": [8, 16]}
    change_config(tmp_path, rope_parameters=None, **fields)
    prompts = texts()
    with torch.no_grad():
        rows = [linear(x) for x in states(hf, prompts)]
    with open_llm(tmp_path, max_model_len=78) as llm:
        assert_near(results(llm, None, prompts), [unit(x) for x in rows])
        short = results(llm, None, prompts, dimensions=8)
        assert_near(short, [unit(x[:, :8]) for x in rows])


@pytest.mark.parametrize("name", ["BertModel", "ModernBertModel"])
def test_colbert_in_a_batch(name: str, tmp_path: Path) -> None:
    sizes = MODERN if name == "ModernBertModel" else ODD
    write_colbert(tmp_path, name, "bert." if name == "BertModel" else "", sizes, 24)
    architecture = "HF_ColBERT" if name == "BertModel" else "ColBERTModernBertModel"
    change_config(tmp_path, architectures=[architecture], dim=24)
    assert_alone_as_in_a_batch(tmp_path, "token_embed", texts())


MARKERS = ["[Q] ", "[D] ", "[MASK]"]
PYLATE = {"query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": 24}
PYLATE |= {"document_length": 20, "similarity_fn_name": "MaxSim"}
QUERY, DOCUMENTS = "what is it?", ["it is, a book.", "no", "a very long text about octavos", "it"]


def write_pylate(
    folder: Path, architecture: str = "BertModel", sizes: dict[str, Any] = SIZES, **config: Any
) -> tuple[Any, torch.nn.Linear, torch.nn.Linear]:
    """Write a folder of PyLate with two Dense modules; return its parts."""
    write_encoder(folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(MARKERS)
    tokenizer.save(str(folder / "tokenizer.json"))
    hf = make_hf(architecture, **sizes | {"vocab_size": 128, "max_position_embeddings": 64})
    hf.save_pretrained(folder)
    dense = "Dense", dense_config(40, 24, "Identity", bias=False)
    write_modules(folder, dense, ("Dense", dense_config(24, 16, "Tanh")))
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["type"] = "pylate.models.Dense.Dense"
    write_json(folder / "modules.json", modules)
    write_json(folder / "config_sentence_transformers.json", PYLATE | config)
    first = write_dense(folder, 1, 40, 24, "Identity", bias=False)
    return hf, first, write_dense(folder, 2, 24, 16, "Tanh")


def by_pylate(folder: Path, parts: Any, text: str, *, is_query: bool, masks: str = "") -> Tensor:
    """Compute the vectors of a text as PyLate does. `masks` of a query: seen, unseen, or none."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    length = 24 if is_query else 20
    tokenizer.enable_truncation(length - 1)
    ids = tokenizer.encode(text).ids
    ids[1:1] = [tokenizer.token_to_id("[Q] " if is_query else "[D] ")]
    seen = [1] * len(ids)
    if is_query and masks:
        more = length - len(ids)
        ids += [tokenizer.token_to_id("[MASK]")] * more
        seen += [int(masks == "seen")] * more
    hf, first, second = parts
    hf.set_attn_implementation("sdpa")  # PyLate's; a token that sees nothing gets 0
    with torch.no_grad():
        hidden = hf(torch.tensor([ids]), attention_mask=torch.tensor([seen])).last_hidden_state[0]
        vectors = unit(torch.tanh(second(first(hidden))))
    skipped = {tokenizer.token_to_id(mark) for mark in string.punctuation}
    return vectors if is_query else vectors[[i not in skipped for i in ids]]


@pytest.mark.parametrize(
    ("architecture", "sizes", "masks"),
    [
        ("BertModel", SIZES, ""),
        ("BertModel", SIZES, "seen"),
        ("BertModel", SIZES, "unseen"),
        ("ModernBertModel", MODERN, "unseen"),  # the last masks see nothing in their window
    ],
)
def test_late_interaction_as_pylate_computes_it(
    architecture: str, sizes: dict[str, Any], masks: str, tmp_path: Path
) -> None:
    config = {"do_query_expansion": bool(masks), "attend_to_expansion_tokens": masks == "seen"}
    parts = write_pylate(tmp_path, architecture, sizes, **config)
    query = by_pylate(tmp_path, parts, QUERY, is_query=True, masks=masks)
    documents = [by_pylate(tmp_path, parts, it, is_query=False) for it in DOCUMENTS]
    with LLM(str(tmp_path), dtype="float32") as llm:
        scores = [o.outputs.score for o in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
        expected = [float((query @ rows.T).amax(1).sum()) for rows in documents]
        assert scores == pytest.approx(expected, rel=1e-5)
        alone = [llm.score(QUERY, it, use_tqdm=False)[0].outputs.score for it in DOCUMENTS]
        assert alone == scores
        asked = PoolingParams(task="token_embed", prompt_name="query")
        found = llm.encode([QUERY, "it", DOCUMENTS[2]], asked, use_tqdm=False)
        short = by_pylate(tmp_path, parts, "it", is_query=True, masks=masks)
        assert_near([o.outputs.data for o in found[:2]], [query, short])
        assert [len(o.prompt_token_ids) for o in found] == [24 if masks else 14, len(short), 24]
        plain = llm.encode(DOCUMENTS[:1], pooling_task="token_embed", use_tqdm=False)[0]
        assert len(plain.outputs.data) == len(DOCUMENTS[0]) + 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_unseen_masks_in_a_batch(dtype: str, tmp_path: Path) -> None:
    write_pylate(tmp_path, "ModernBertModel", MODERN)
    texts = [QUERY, "it", "", "what is", "a book of texts"]
    asked = PoolingParams(task="token_embed", prompt_name="query")
    with LLM(str(tmp_path), dtype=dtype) as llm:
        alone = [llm.encode([it], asked, use_tqdm=False)[0].outputs.data for it in texts]
        for order in (texts, texts[::-1]):
            among = dict(zip(order, llm.encode(order, asked, use_tqdm=False), strict=True))
            found = [among[text].outputs.data.tobytes() for text in texts]
            assert found == [data.tobytes() for data in alone]


def test_roles_that_a_request_cannot_name(tmp_path: Path) -> None:
    write_pylate(tmp_path)
    with LLM(str(tmp_path), dtype="float32") as llm:
        asked = PoolingParams(task="token_embed", prompt_name="passage")
        with pytest.raises(RequestError, match=r"prompt_name='passage'.*has query, document;"):
            llm.encode(QUERY, asked, use_tqdm=False)
        asked = PoolingParams(task="token_embed", prompt_name="query")
        with pytest.raises(RequestError, match=r"prompt_name='query' is for single texts"):
            llm.encode({"prompt": "a", "text_pair": "b"}, asked, use_tqdm=False)


def test_masks_that_cannot_be_hidden(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Octavo leaves them out, and says so."""
    write_pylate(tmp_path, "DebertaV2Model", DEBERTA)
    spec = spec_of(tmp_path)
    assert [role.mask for role in spec.poolers[0].roles] == [None, None]
    assert not spec.step_arrays
    assert "scores differ from PyLate's" in caplog.text


def test_roles_of_stanfords_files(tmp_path: Path) -> None:
    write_pylate(tmp_path)
    (tmp_path / "modules.json").unlink()
    change_config(tmp_path, architectures=["HF_ColBERT"])
    write_json(tmp_path / "config_sentence_transformers.json", {})
    metadata = {"dim": 24, "query_token_id": "[Q] ", "doc_token_id": "[D] ", "query_maxlen": 20}
    metadata |= {"doc_maxlen": 300, "attend_to_mask_tokens": True, "mask_punctuation": False}
    write_json(tmp_path / "artifact.metadata", metadata)
    (pooler,) = spec_of(tmp_path).poolers
    query, document = pooler.roles
    assert (pooler.size, query.marker, document.marker, query.mask) == (24, 99, 100, 101)
    assert (query.max_tokens, document.max_tokens, document.skipped) == (20, 64, ())
    write_json(tmp_path / "artifact.metadata", metadata | {"mask_punctuation": True})
    assert len(spec_of(tmp_path).poolers[0].roles[1].skipped) == len(string.punctuation)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"query_prefix": "[none]"}, r"query_prefix='\[none\]'.*the vocabulary has no token"),
        ({"document_prefix": 5}, "document_prefix=5.*it must be a token"),
        ({"skiplist_words": "."}, "skiplist_words=.*it must be a list of tokens"),
        ({"query_length": 2}, "query_length=2"),
    ],
)
def test_damaged_files_of_pylate(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_pylate(tmp_path, **config)
    with pytest.raises(ModelError, match=message):
        spec_of(tmp_path)


def test_a_dense_module_with_a_sum(tmp_path: Path) -> None:
    write_pylate(tmp_path)
    config = dense_config(40, 24, "Identity", bias=False) | {"use_residual": True}
    write_json(tmp_path / "1_Dense" / "config.json", config)
    with pytest.raises(ModelError, match=r"use_residual=True.*sum with the layer's input"):
        spec_of(tmp_path)
    write_json(tmp_path / "artifact.metadata", [])
    write_json(tmp_path / "1_Dense" / "config.json", config | {"use_residual": False})
    with pytest.raises(ModelError, match=r"artifact.metadata is damaged"):
        spec_of(tmp_path)


SPARSE_SIZES: dict[str, dict[str, Any]] = {
    "BertForMaskedLM": ODD | {"hidden_act": "relu"},
    "RobertaForMaskedLM": SIZES,
    "XLMRobertaForMaskedLM": WIDE,
    "CamembertForMaskedLM": SIZES,
    "DistilBertForMaskedLM": DISTIL,
    "ModernBertForMaskedLM": MODERN | {"classifier_bias": True, "norm_bias": True},
}


def write_sparse(folder: Path, architecture: str, **config: str) -> Any:
    """Write a folder of a SparseEncoder; return the model of transformers."""
    hf = make_hf(architecture, **SPARSE_SIZES[architecture])
    hf.save_pretrained(folder)
    write_modules(folder, ("SpladePooling", config))
    modules = json.loads((folder / "modules.json").read_text())
    for module, name in zip(modules, ("MLMTransformer", "SpladePooling"), strict=True):
        module["type"] = f"sentence_transformers.sparse_encoder.models.{name}"
    write_json(folder / "modules.json", modules)
    return hf


@pytest.mark.parametrize("architecture", SPARSE_SIZES)
@pytest.mark.parametrize(
    "config",
    [{}, {"pooling_strategy": "sum"}, {"activation_function": "log1p_relu"}],
    ids=["max", "sum", "twice"],
)
def test_sparse_encoder(architecture: str, config: dict[str, str], tmp_path: Path) -> None:
    hf = write_sparse(tmp_path, architecture, **config)
    prompts = [[max(i, 4) for i in ids] for ids in texts()]
    expected = []
    for ids in prompts:
        with torch.no_grad():
            x = hf(torch.tensor([ids])).logits[0].relu().log1p()
        x = x.log1p() if "activation_function" in config else x
        expected.append(x.sum(0) if "pooling_strategy" in config else x.amax(0))
    with open_llm(tmp_path, max_model_len=78) as llm:
        assert_near(results(llm, "embed", prompts), expected)
        spec = llm.llm_engine.spec
        assert spec.sentences.similarity_fn_name == "dot"
        assert spec.poolers[0].sparse


@pytest.mark.parametrize("strategy", ["max", "sum"])
def test_sparse_encoder_in_a_batch(strategy: str, tmp_path: Path) -> None:
    write_sparse(tmp_path, "DistilBertForMaskedLM", pooling_strategy=strategy)
    assert_alone_as_in_a_batch(tmp_path, "embed", texts())


def test_files_of_a_sparse_encoder(tmp_path: Path) -> None:
    write_sparse(tmp_path, "BertForMaskedLM")
    write_json(tmp_path / "sentence_bert_config.json", {"max_seq_length": 12})
    config = {"prompts": {"query": "q: "}, "similarity_fn_name": "cosine"}
    write_json(tmp_path / "config_sentence_transformers.json", config)
    spec = spec_of(tmp_path)
    assert (spec.max_model_len, spec.sentences.similarity_fn_name) == (12, "cosine")
    assert dict(spec.sentences.prompts) == {"query": "q: "}
    write_json(tmp_path / "1_SpladePooling" / "config.json", {"pooling_strategy": "mean"})
    with pytest.raises(ModelError, match=r"pooling_strategy='mean'.*supported: max, sum"):
        spec_of(tmp_path)
    change_config(tmp_path, architectures=["BertModel"])
    with pytest.raises(ModelError, match=r"architectures=.*sparse encoders that are supported"):
        spec_of(tmp_path)


@pytest.mark.parametrize("name", ["Router", "Asym", "SparseStaticEmbedding", "SparseAutoEncoder"])
def test_modules_that_octavo_does_not_have(name: str, tmp_path: Path) -> None:
    make_hf("BertForMaskedLM", **SIZES).save_pretrained(tmp_path)
    module = {"idx": 0, "path": "", "type": f"sentence_transformers.sparse_encoder.models.{name}"}
    write_json(tmp_path / "modules.json", [module])
    with pytest.raises(ModelError, match=rf"names the module {name} \(.*Octavo does not have"):
        spec_of(tmp_path)
