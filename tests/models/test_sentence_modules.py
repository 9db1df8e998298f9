"""sentence-transformers folders: modules after a model, prompts, lengths, and damaged files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from octavo import LLM
from octavo.checkpoints.registry import open_checkpoint
from octavo.config import PoolerConfig
from octavo.errors import ConfigError, ModelError, RequestError
from octavo.models.weight_cache import weights_key
from octavo.pooling_params import PoolingParams
from tests.encoders import write_encoder
from tests.models.configs.sizes import SIZES, WIDE_HEADS
from tests.models.harness import make_hf, save_config, spec_of
from tests.pooling import (
    NORMALIZE,
    PROMPTS,
    assert_near,
    change_config,
    dense_config,
    open_llm,
    pool,
    pooling,
    results,
    states,
    unit,
    write_dense,
    write_json,
    write_modules,
)
from tests.small_tokenizers import byte_level, save

MEANS = {
    "mean_tokens": lambda x: x.mean(0),
    "max_tokens": lambda x: x.max(0).values,
    "mean_sqrt_len_tokens": lambda x: x.sum(0) / len(x) ** 0.5,
    "weightedmean_tokens": lambda x: (x * _ramp(x)).sum(0) / _ramp(x).sum(),
    "cls_token": lambda x: x[0],
    "lasttoken": lambda x: x[-1],
}


def _ramp(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(1, len(x) + 1)[:, None].float()


def save_qwen3(folder: Path) -> Any:
    hf_model = make_hf("Qwen3ForCausalLM", **WIDE_HEADS)
    hf_model.save_pretrained(folder)
    return hf_model.model


def test_qwen3_embedding(tmp_path: Path) -> None:
    """A decoder that is published for vectors: the last token's, in a folder of modules."""
    hf_model = save_qwen3(tmp_path)
    write_modules(tmp_path, pooling("lasttoken"), NORMALIZE)
    expected = [unit(x[-1]) for x in states(hf_model)]
    with open_llm(tmp_path) as llm:
        assert_near(results(llm, None), expected)
        with pytest.raises(RequestError, match=r"generates no text"):
            llm.generate({"prompt_token_ids": [5]}, use_tqdm=False)
        assert not llm.llm_engine.spec.generates
    assert spec_of(tmp_path, runner="generate").generates
    assert spec_of(tmp_path, convert="none").generates


@pytest.mark.parametrize("mode", MEANS)
def test_ways_of_pooling(mode: str, tmp_path: Path) -> None:
    """In chunks of any size, too."""
    hf_model = save_qwen3(tmp_path)
    write_modules(tmp_path, pooling(mode))
    expected = [MEANS[mode](x) for x in states(hf_model)]
    with open_llm(tmp_path, max_num_batched_tokens=16, max_num_seqs=4) as llm:
        assert_near(results(llm, None), expected)
        assert_near(results(llm, None, use_activation=True), [unit(x) for x in expected])


def test_joined_vectors_and_the_newer_form(tmp_path: Path) -> None:
    hf_model = save_qwen3(tmp_path)
    hidden = states(hf_model)
    joined = [torch.cat([x[0], x.mean(0), x[-1]]) for x in hidden]
    write_modules(tmp_path, pooling("mean_tokens", "cls_token", "lasttoken"), NORMALIZE)
    assert_near(pool(tmp_path, None), [unit(x) for x in joined])
    one = pool(tmp_path, None, pooler_config={"pooling_type": "MEAN"})
    assert_near(one, [unit(x.mean(0)) for x in hidden])
    write_modules(tmp_path, ("Pooling", {"pooling_mode": ["mean", "max"], "include_prompt": True}))
    assert_near(pool(tmp_path, None), [torch.cat([x.max(0).values, x.mean(0)]) for x in hidden])
    write_modules(tmp_path, ("Pooling", {"pooling_mode": "lasttoken"}))
    assert_near(pool(tmp_path, None), [x[-1] for x in hidden])


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        ("Tanh", torch.tanh),
        ("Identity", lambda x: x),
        ("ReLU", torch.relu),
        ("GELU", torch.nn.functional.gelu),
        ("Sigmoid", torch.sigmoid),
        ("SiLU", torch.nn.functional.silu),
    ],
)
def test_dense(activation: str, function: Any, tmp_path: Path) -> None:
    hf_model = save_qwen3(tmp_path)
    configs = [dense_config(48, 64, activation), dense_config(64, 32, "Identity", bias=False)]
    modules = [("Dense", config) for config in configs]
    write_modules(tmp_path, pooling("mean_tokens"), *modules, NORMALIZE)
    first = write_dense(tmp_path, 2, 48, 64, activation)
    second = write_dense(tmp_path, 3, 64, 32, "Identity", bias=False)
    with torch.no_grad():
        expected = [unit(second(function(first(x.mean(0))))) for x in states(hf_model)]
    with open_llm(tmp_path, quantization=None) as llm:
        found = results(llm, None)
        assert [len(x) for x in found] == [32] * len(PROMPTS)
        assert_near(found, expected)


def test_dense_of_each_token(tmp_path: Path) -> None:
    """As in vLLM; not after several ways of pooling, whose vectors are longer than a token's."""
    hf_model = save_qwen3(tmp_path)
    write_modules(tmp_path, pooling("mean_tokens"), ("Dense", dense_config(48, 64, "Tanh")))
    linear = write_dense(tmp_path, 2, 48, 64, "Tanh")
    with torch.no_grad():
        expected = [unit(torch.tanh(linear(x))) for x in states(hf_model)]
    assert_near(pool(tmp_path, "token_embed"), expected)
    with open_llm(tmp_path) as llm:
        bare = results(llm, "token_embed", bare=True, use_activation=False)
        with pytest.raises(RequestError, match="bare=True: the task embed has no vectors of"):
            results(llm, "embed", bare=True)
    assert_near(bare, states(hf_model))
    ways = pooling("mean_tokens", "max_tokens")
    write_modules(tmp_path, ways, ("Dense", dense_config(96, 64, "Tanh")))
    write_dense(tmp_path, 2, 96, 64, "Tanh")
    assert_near(pool(tmp_path, "token_embed"), [unit(x) for x in states(hf_model)])


@pytest.mark.parametrize("name", ["dot", "euclidean", "manhattan", "cosine"])
def test_scores_by_the_similarity_that_a_folder_names(name: str, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path)
    write_modules(tmp_path, pooling("mean_tokens"))
    write_json(tmp_path / "config_sentence_transformers.json", {"similarity_fn_name": name})
    with LLM(folder, load_format="dummy") as llm:
        x, *others = (o.outputs.embedding for o in llm.embed(["a", "b", "cd"], use_tqdm=False))
        found = [o.outputs.score for o in llm.score("a", ["b", "cd"], use_tqdm=False)]
    x, y = torch.tensor([x]), torch.tensor(others)
    expected = {
        "dot": (x @ y.T)[0],
        "cosine": (unit(x) @ unit(y).T)[0],
        "euclidean": -torch.cdist(x, y)[0],
        "manhattan": -torch.cdist(x, y, p=1)[0],
    }
    assert found == pytest.approx(expected[name].tolist(), rel=1e-3)


def test_dense_in_a_torch_file_and_a_norm(tmp_path: Path) -> None:
    """EmbeddingGemma's and LaBSE's modules; the cache of weights depends on their files."""
    fields = WIDE_HEADS | {"use_bidirectional_attention": True, "sliding_window": 16}
    hf_model = make_hf("Gemma3TextModel", **fields)
    hf_model.save_pretrained(tmp_path)
    dense = "Dense", dense_config(48, 40, "Tanh")
    write_modules(tmp_path, pooling("mean_tokens"), dense, ("LayerNorm", {"dimension": 40}))
    linear = write_dense(tmp_path, 2, 48, 40, "Tanh")
    (tmp_path / "2_Dense" / "model.safetensors").unlink()
    tensors = {f"linear.{name}": value for name, value in linear.state_dict().items()}
    torch.save(tensors, tmp_path / "2_Dense" / "pytorch_model.bin")
    norm = torch.nn.LayerNorm(40)
    with torch.no_grad():
        norm.weight.normal_(1, 0.2)
        norm.bias.normal_(0, 0.2)
    file = tmp_path / "3_LayerNorm" / "model.safetensors"
    save_file({f"norm.{k}": v.detach() for k, v in norm.state_dict().items()}, file)
    with torch.no_grad():
        expected = [norm(torch.tanh(linear(x.mean(0)))) for x in states(hf_model)]
    assert_near(pool(tmp_path, None), expected)
    spec, checkpoint = spec_of(tmp_path), open_checkpoint(tmp_path)
    key = weights_key(spec, checkpoint, "float32")
    save_file({f"norm.{k}": v.detach() + 1 for k, v in norm.state_dict().items()}, file)
    assert weights_key(spec, checkpoint, "float32") != key
    file.unlink()
    with pytest.raises(ModelError, match=r"3_LayerNorm has neither model.safetensors nor"):
        pool(tmp_path, None)


def test_shorter_vectors(tmp_path: Path) -> None:
    hf_model = save_qwen3(tmp_path)
    write_modules(tmp_path, pooling("lasttoken"), NORMALIZE)
    hidden = [x[-1] for x in states(hf_model)]
    with open_llm(tmp_path) as llm, pytest.raises(RequestError, match="not trained for shorter"):
        results(llm, None, dimensions=16)
    change_config(tmp_path, is_matryoshka=True)
    with open_llm(tmp_path, pooler_config={"dimensions": 24}) as llm:
        assert_near(results(llm, None, dimensions=16), [unit(x[:16]) for x in hidden])
        assert_near(results(llm, None), [unit(x[:24]) for x in hidden])
        assert_near(results(llm, None, dimensions=48), [unit(x) for x in hidden])
        with pytest.raises(RequestError, match=r"choose one of: 1 to 48"):
            results(llm, None, dimensions=49)
    change_config(tmp_path, matryoshka_dimensions=[8, 32])
    write_json(tmp_path / "config_sentence_transformers.json", {"truncate_dim": 32})
    with open_llm(tmp_path) as llm:
        assert_near(results(llm, None), [unit(x[:32]) for x in hidden])
        with pytest.raises(RequestError, match=r"choose one of: 8, 32"):
            results(llm, None, dimensions=16)
    with pytest.raises(ConfigError, match=r"pooler_config: dimensions=16: .* one of: 8, 32"):
        spec_of(tmp_path, pooler_config=PoolerConfig(dimensions=16))
    write_json(tmp_path / "config_sentence_transformers.json", {"truncate_dim": 49})
    with pytest.raises(ModelError, match=r"truncate_dim=49 is more than the 48 numbers"):
        spec_of(tmp_path)


def test_prompts(tmp_path: Path) -> None:
    fields = WIDE_HEADS | {"vocab_size": 300}
    make_hf("Qwen3ForCausalLM", **fields).save_pretrained(tmp_path)
    save(byte_level(), tmp_path, {"eos_token": "</s>"})
    write_modules(tmp_path, pooling("lasttoken"), NORMALIZE)
    sentences = {"prompts": {"query": "find ", "document": ""}, "similarity_fn_name": "dot"}
    write_json(tmp_path / "config_sentence_transformers.json", sentences)
    spec = spec_of(tmp_path).sentences
    assert spec.prompts == (("query", "find "), ("document", ""))
    assert (spec.default_prompt_name, spec.similarity_fn_name) == (None, "dot")

    def ids(llm: Any, text: Any, **params: Any) -> list[int]:
        asked = PoolingParams(**params)
        return llm.embed(text, pooling_params=asked, use_tqdm=False)[0].prompt_token_ids

    with open_llm(tmp_path) as llm:
        assert ids(llm, "a") == ids(llm, "a", prompt_name="document") == list(b"a")
        assert ids(llm, "a", prompt_name="query") == list(b"find a")
        for text, name in (("a", "question"), ({"prompt_token_ids": [5]}, "query")):
            with pytest.raises(RequestError, match=r"prompt_name='.*' is|has query, document"):
                ids(llm, text, prompt_name=name)
    default = sentences | {"default_prompt_name": "query"}
    write_json(tmp_path / "config_sentence_transformers.json", default)
    with open_llm(tmp_path) as llm:
        assert ids(llm, "a") == list(b"find a")
        assert ids(llm, "a", prompt_name="") == list(b"a")
        assert ids(llm, {"prompt_token_ids": [5]}) == [5]


def test_longest_text(tmp_path: Path) -> None:
    save_config(tmp_path, "Qwen3ForCausalLM", WIDE_HEADS)
    write_modules(tmp_path, pooling("lasttoken"))
    assert spec_of(tmp_path).max_model_len == 128
    for wanted, length in ((50, 50), (None, 128), (500, 128)):
        write_json(tmp_path / "sentence_bert_config.json", {"max_seq_length": wanted})
        assert spec_of(tmp_path).max_model_len == length


@pytest.mark.parametrize(
    ("file", "value", "says"),
    [
        ("modules.json", {"type": "x"}, "must be a list of modules"),
        ("modules.json", [{"type": "custom_st.Transformer"}], "never runs such code"),
        ("modules.json", [], "names no Pooling module"),
        ("modules.json", [{"type": "sentence_transformers.models.CNN"}], "the module CNN at a"),
        ("modules.json", [{"type": "sentence_transformers.models.Normalize"}], "Normalize at a"),
        ("modules.json", "pooling at ../x", r"'\.\./x/config\.json', which is outside"),
        ("modules.json", "pooling at /etc", r"'etc/config\.json'|etc.config.json is missing"),
        ("modules.json", "pooling at C:\\x", "which is outside"),
        ("modules.json", "pooling at none", r"none/config\.json is missing or damaged"),
        ("modules.json", "pooling at " + "a" * 9000, "File name too long"),
        ("1_Pooling/config.json", {"word_embedding_dimension": 47}, "hidden states have 48"),
        ("1_Pooling/config.json", [], "is missing or damaged"),
        ("1_Pooling/config.json", {}, "names no way of pooling"),
        ("1_Pooling/config.json", {"pooling_mode": "attention"}, "supported: cls, max"),
        ("1_Pooling/config.json", {"pooling_mode_lasttoken": "yes"}, "must be true or false"),
        ("1_Pooling/config.json", {"pooling_mode": "cls", "include_prompt": False}, "include_pro"),
        ("2_Dense/config.json", {"in_features": 48}, "out_features is missing"),
        ("2_Dense/config.json", dense_config(47, 9, "Tanh"), "vectors before it have 48 numbers"),
        ("2_Dense/config.json", dense_config(48, 9, "Softsign"), "supported: torch.nn.modules.li"),
        ("2_Dense/config.json", dense_config(48, 41, "Tanh"), r"shape \[40, 48\], but config.json"),
        ("2_Dense/config.json", dense_config(48, 40, "Tanh", bias=False), "holds 1 tensors"),
        ("sentence_bert_config.json", {"max_seq_length": 0}, "max_seq_length=0"),
        ("sentence_bert_config.json", [5], "is missing or damaged"),
        ("config_sentence_transformers.json", {"prompts": {"a": 5}}, "an object of texts"),
        ("config_sentence_transformers.json", {"default_prompt_name": "a"}, "prompts has none"),
        ("config_sentence_transformers.json", {"similarity_fn_name": "l3"}, "supported: cosine"),
        ("config.json", {"matryoshka_dimensions": [0]}, "list of positive numbers"),
    ],
)
def test_damaged_files(file: str, value: Any, says: str, tmp_path: Path) -> None:
    hf_model = make_hf("LlamaModel", **SIZES)
    hf_model.save_pretrained(tmp_path)
    write_modules(tmp_path, pooling("lasttoken"), ("Dense", dense_config(48, 40, "Tanh")))
    write_dense(tmp_path, 2, 48, 40, "Tanh")
    assert all(np.isfinite(x).all() for x in pool(tmp_path, None))
    if file == "config.json":
        change_config(tmp_path, **value)
    else:
        if isinstance(value, str):
            path = value.removeprefix("pooling at ")
            value = [{"type": "sentence_transformers.models.Pooling", "path": path}]
        write_json(tmp_path / file, value)
    with pytest.raises(ModelError, match=says):
        pool(tmp_path, None)


def test_a_file_that_is_no_json(tmp_path: Path) -> None:
    save_config(tmp_path, "Qwen3ForCausalLM", WIDE_HEADS)
    (tmp_path / "modules.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match=r"modules\.json is damaged"):
        spec_of(tmp_path)
