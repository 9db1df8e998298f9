"""jina-embeddings-v3: an adapter for each task, equal to a model into which it was merged."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from octavo import LLM, LoRARequest, PoolingParams
from octavo.errors import AdapterError, ModelError, RequestError
from octavo.models.adapters import open_adapter_file
from tests.e2e.harness import serve
from tests.models.harness import make_hf
from tests.pooling import NORMALIZE, pooling, write_json, write_modules
from tests.small_tokenizers import byte_level, save

TASKS = {"retrieval.query": "find ", "retrieval.passage": "keep ", "separation": ""}
RANK, ALPHA = 4, 6
SIZES = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 130, "type_vocab_size": 1}
TEXTS = ["a cat", "the sea and the ships", "?" * 60]
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 3}
WRAPPED = [{"idx": 0, "name": "transformer", "path": "", "type": "custom_st.Transformer"}]


def write_tasks(folder: Path, **changes: Any) -> dict[str, Any]:
    """Write a checkpoint with random adapters as Jina does; return the model of each task."""
    hf = make_hf("JinaEmbeddingsV3Model", **SIZES)
    hf.save_pretrained(folder)
    plain = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    stored: dict[str, Any] = {}
    merged: list[dict[str, Any]] = [dict(plain) for _ in TASKS]
    for name, weight in plain.items():
        module = name.removesuffix(".weight")
        if name == module or "norm" in name or "emb_ln" in name:
            stored[f"roberta.{name}"] = weight
            continue
        (outputs, inputs), is_table = weight.shape, "embeddings" in name
        a_shape, b_shape = (RANK, inputs), (outputs, RANK)
        if is_table:
            a_shape, b_shape = (outputs, RANK), (RANK, inputs)
        a, b = (
            torch.randn(len(TASKS), *it, generator=generator) * 0.2 for it in (a_shape, b_shape)
        )
        prefix = f"roberta.{module}.parametrizations.weight"
        stored |= {f"{prefix}.original": weight, f"{prefix}.0.lora_A": a, f"{prefix}.0.lora_B": b}
        for task, weights in enumerate(merged):
            product = a[task] @ b[task] if is_table else b[task] @ a[task]
            weights[name] = weight + ALPHA / RANK * product
    models = {None: hf}
    for task, weights in zip(TASKS, merged, strict=True):
        path = folder / "merged" / task
        hf.config.save_pretrained(path)
        save_file(weights, path / "model.safetensors", {"format": "pt"})
        models[task] = AutoModel.from_pretrained(path, attn_implementation="eager").eval()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta"}
    config |= {"position_embedding_type": "rotary", "rotary_emb_base": 20000.0}
    config |= {"lora_adaptations": list(TASKS), "task_instructions": TASKS}
    config |= {"lora_rank": RANK, "lora_alpha": ALPHA, "lora_dropout_p": 0.0}
    write_json(folder / "config.json", config | changes)
    save(byte_level(), folder, {"eos_token": "</s>"})
    write_modules(folder, pooling("mean_tokens"), NORMALIZE)
    modules = json.loads((folder / "modules.json").read_text())
    write_json(folder / "modules.json", [*WRAPPED, *modules[1:]])
    return models


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("jina")
    models = write_tasks(folder)
    vectors = {}
    for task, model in models.items():
        for text in TEXTS:
            ids = torch.tensor([byte_level().encode(TASKS.get(task, "") + text)])
            with torch.inference_mode():
                mean = model(ids).last_hidden_state[0].mean(0)
            vectors[task, text] = (mean / mean.norm()).numpy()
    return folder, vectors


ASKED = [(task, text) for text in TEXTS for task in ("retrieval.query", None, *TASKS)]


def embed(llm: LLM, asked: list[tuple[str | None, str]]) -> list[list[float]]:
    params = [PoolingParams(prompt_name=task) for task, _ in asked]
    texts = [text for _, text in asked]
    return [it.outputs.embedding for it in llm.embed(texts, pooling_params=params, use_tqdm=False)]


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_loras": 1}, {"enforce_eager": True}, {"tensor_parallel_size": 2, "num_threads": 1}],
    ids=["together", "in turns", "eager", "tp"],
)
def test_vectors_are_those_of_merged_models(written, settings):
    folder, wanted = written
    with LLM(str(folder), dtype="float32", **LORA | settings) as llm:
        found = embed(llm, ASKED)
        alone = [embed(llm, [asked])[0] for asked in ASKED[:5]]
    assert found[:5] == alone
    for asked, vector in zip(ASKED, found, strict=True):
        np.testing.assert_allclose(vector, wanted[asked], atol=2e-6)
    a, b = (wanted[task, TEXTS[0]] for task in (None, "separation"))
    assert np.abs(a - b).max() > 0.05


def test_a_task_is_an_adapter_by_its_path(written):
    folder, wanted = written
    request = LoRARequest("s", 7, str(folder / "lora_adaptations" / "separation"))
    with LLM(str(folder), dtype="float32", **LORA) as llm:
        (output,) = llm.embed(TEXTS[0], lora_request=request, use_tqdm=False)
        np.testing.assert_allclose(
            output.outputs.embedding, wanted["separation", TEXTS[0]], atol=2e-6
        )
        params = PoolingParams(prompt_name="separation")
        llm.embed(TEXTS[0], pooling_params=params, use_tqdm=False)
        assert llm.llm_engine.list_loras() == {7}
        with pytest.raises(RequestError, match="has an adapter of its own"):
            llm.embed("a", pooling_params=params, lora_request=request)
        with pytest.raises(RequestError, match=r"prompt_name='other'.*retrieval\.query"):
            llm.embed("a", pooling_params=PoolingParams(prompt_name="other"))
        other = LoRARequest("o", 8, str(folder / "lora_adaptations" / "other"))
        with pytest.raises(AdapterError, match="has no task other; it has"):
            llm.embed("a", lora_request=other)


def test_a_client_cannot_name_a_task(written):
    folder, _ = written
    with pytest.raises(AdapterError, match="prompt_name chooses it"):
        open_adapter_file(folder / "lora_adaptations" / "separation", folder)


def test_without_enable_lora(written):
    folder, wanted = written
    with LLM(str(folder), dtype="float32") as llm:
        np.testing.assert_allclose(
            embed(llm, [(None, "a cat")])[0], wanted[None, "a cat"], atol=2e-6
        )
        with pytest.raises(RequestError, match="adapters are off") as caught:
            embed(llm, [("retrieval.query", "a cat")])
        assert caught.value.param == "prompt_name"


def test_task_in_a_request_without_enable_lora(written, tmp_path):
    with serve(tmp_path, "--model", str(written[0]), "--dtype", "float32") as server:
        answer = server.post("/v1/embeddings", {"input": "a", "task": "separation"})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "task")
        assert error["message"].startswith("task='separation' has an adapter")


def test_task_in_a_request(written, tmp_path):
    folder, wanted = written
    flags = ["--model", str(folder), "--dtype", "float32", "--enable-lora", "--max-loras", "3"]
    with serve(tmp_path, *flags) as server:

        def ask(**fields: Any) -> Any:
            body = {"input": TEXTS, "model": str(folder), **fields}
            return server.post("/v1/embeddings", body).json()

        for task in (None, *TASKS):
            found = ask(**({} if task is None else {"task": task}))["data"]
            for text, entry in zip(TEXTS, found, strict=True):
                np.testing.assert_allclose(entry["embedding"], wanted[task, text], atol=2e-6)
        assert "task='x'" in ask(task="x")["error"]["message"]
        both = ask(task="separation", prompt_name="separation")["error"]
        assert both["param"] == "task"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lora_adaptations": ["a", "a", "b"]}, "a list of different names"),
        ({"lora_adaptations": "a"}, "a list of different names"),
    ],
)
def test_tasks_that_are_refused(changes, says, tmp_path):
    write_tasks(tmp_path, **changes)
    with pytest.raises(ModelError, match=says):
        LLM(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lora_adaptations": ["a", "b"], "task_instructions": {}}, r"it must be \[2, ...\]"),
        ({"lora_rank": 3}, "have rank 4, and lora_rank is 3"),
        ({"lora_alpha": 1e300}, "too large"),
    ],
)
def test_adapters_that_are_refused(changes, says, tmp_path):
    write_tasks(tmp_path, **changes)
    name = (changes.get("lora_adaptations") or list(TASKS))[0]
    with LLM(str(tmp_path), **LORA) as llm, pytest.raises(AdapterError, match=says):
        embed(llm, [(name, "a")])
