"""Adapters of the embedding and the LM head: answers are those of PEFT's model in float32."""

from __future__ import annotations

import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from octavo import LLM, LoRARequest, SamplingParams
from octavo.errors import AdapterError
from tests.models.cases import CASES
from tests.models.configs.sizes import SIZES
from tests.models.configs.with_towers import TEXT_PARTS
from tests.models.harness import make_hf
from tests.models.test_encoders import SIZES as ENCODER

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None,
    reason="peft is not installed; it belongs to the extra dev",
)
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "skip_tokenizer_init": True}
LORA |= {"dtype": "float32", "max_model_len": 64, "max_logprobs": -1}
PROMPTS = [[(7 * i + 3 * k) % 90 + 3 for i in range(5 + 4 * k)] for k in range(4)]
TARGETS = {
    "embedding": ["embed_tokens"],
    "head": ["lm_head"],
    "both": ["embed_tokens", "lm_head", "q_proj", "down_proj"],
}


def make_base(case: str, folder: Path, **fields: Any) -> Path:
    architecture, config = (CASES | TEXT_PARTS)[case]
    make_hf(architecture, **config | fields).save_pretrained(folder)
    return folder


def make_adapter(base: Path, folder: Path, seed: int = 1, **config: Any) -> Any:
    """Return PEFT's model with a random adapter, and write the adapter."""
    import transformers
    from peft import LoraConfig, get_peft_model

    architecture = json.loads((base / "config.json").read_text())["architectures"][0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tied weights
        model = getattr(transformers, architecture).from_pretrained(base)
        torch.manual_seed(seed)
        adapted = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **config)).eval()
        for name, tensor in adapted.named_parameters():
            if "modules_to_save" in name:
                torch.nn.init.normal_(tensor)
        adapted.save_pretrained(folder)
    return adapted


def logprobs_of(model: Any, tokens: list[int]) -> NDArray[np.float32]:
    """Return the logprob of each token after the first, and then those of the next one."""
    with torch.no_grad():
        rows = model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
    known = rows[range(len(tokens) - 1), tokens[1:]]
    return torch.cat([known, rows[-1]]).numpy()


def answers(
    llm: LLM, adapters: list[LoRARequest | None], prompts: list[list[int]]
) -> list[NDArray[np.float32]]:
    """Return what `logprobs_of` does, for each prompt."""
    vocab = llm.llm_engine.spec.vocab_size
    params = SamplingParams(
        temperature=0.0, max_tokens=1, prompt_logprobs=0, logprobs=vocab, ignore_eos=True
    )
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        params,
        lora_request=adapters,
        use_tqdm=False,
    )
    found = []
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.prompt_logprobs is not None
        assert output.outputs[0].logprobs is not None
        rows = zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
        known = [row[token].logprob for row, token in rows if row is not None]
        (last,) = output.outputs[0].logprobs
        found.append(np.array([*known, *(last[t].logprob for t in range(vocab))], np.float32))
    return found


LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "eager": {"enforce_eager": True},
    "tp": {"tensor_parallel_size": 2, "num_threads": 1},
    "pp": {"pipeline_parallel_size": 2, "num_threads": 1},
}


def check(llm: LLM, base: Path, targets: dict[str, dict[str, Any]], most: float = 1e-5) -> None:
    """Compare an adapter for each of `targets`, alone and together, with PEFT.

    Args:
        llm: the engine.
        base: folder of the model.
        targets: fields of each adapter's config.
        most: largest error of a logprob, as a part of the largest one.
    """
    folders = {name: base.parent / name for name in targets}
    models = [make_adapter(base, folders[name], **fields) for name, fields in targets.items()]
    adapters = [
        LoRARequest(name, i + 1, str(folder)) for i, (name, folder) in enumerate(folders.items())
    ]
    prompts = PROMPTS[: len(models)]
    plain = answers(llm, [None] * len(models), prompts)
    alone = [answers(llm, [it], [p])[0] for it, p in zip(adapters, prompts, strict=True)]
    together = answers(llm, [*adapters, None, *adapters], [*prompts, PROMPTS[0], *prompts])
    assert (together[len(models)] == plain[0]).all()
    for i, (adapted, prompt) in enumerate(zip(models, prompts, strict=True)):
        expected, largest = logprobs_of(adapted, prompt), np.abs(plain[i]).max()
        largest = max(largest, np.abs(expected).max())
        assert np.abs(alone[i] - expected).max() < most * largest, adapters[i].lora_name
        assert np.abs(alone[i] - plain[i]).max() > 1e-2
        assert (alone[i] == together[i]).all()
        assert (alone[i] == together[len(models) + 1 + i]).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_answers_are_those_of_peft(tied: bool, layout: str, tmp_path: Path) -> None:
    base = make_base("llama", tmp_path / "base", tie_word_embeddings=tied)
    targets = {
        name: {"target_modules": modules, "ensure_weight_tying": name == "both"}
        for name, modules in TARGETS.items()
    }
    with LLM(model=str(base), **LORA, **LAYOUTS[layout]) as llm:
        check(llm, base, targets)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_replaced_embeddings_and_heads(tied: bool, layout: str, tmp_path: Path) -> None:
    base = make_base("llama", tmp_path / "base", tie_word_embeddings=tied)
    targets = {
        "embedding": {"modules_to_save": ["embed_tokens"]},
        "head": {"modules_to_save": ["lm_head"], "target_modules": ["embed_tokens", "v_proj"]},
        "both": {"modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": tied},
    }
    targets = {name: {"target_modules": ["q_proj"]} | fields for name, fields in targets.items()}
    modules = ["embed_tokens", "lm_head"]
    with LLM(model=str(base), lora_modules_to_save=modules, **LORA, **LAYOUTS[layout]) as llm:
        check(llm, base, targets)


def test_a_bias_of_the_head_is_replaced(tmp_path: Path) -> None:
    base = make_base("gptj", tmp_path / "base")
    fields = {"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]}
    with LLM(model=str(base), lora_modules_to_save=["lm_head"], **LORA) as llm:
        check(llm, base, {"head": fields})


def test_without_the_setting_replaced_modules_are_refused(tmp_path: Path) -> None:
    base = make_base("llama", tmp_path / "base")
    fields = {"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]}
    make_adapter(base, tmp_path / "a", **fields)
    with (
        LLM(model=str(base), lora_modules_to_save=["embed_tokens"], **LORA) as llm,
        pytest.raises(AdapterError, match="Set lora_modules_to_save=lm_head, with which memory"),
    ):
        answers(llm, [LoRARequest("a", 1, str(tmp_path / "a"))], PROMPTS[:1])


FAMILIES = ("gpt2", "bloom", "gemma2", "gemma3", "granite", "opt-350m", "gpt-neox", "falcon-7b")
FAMILIES += ("cohere", "mpt", "gemma3n", "gemma4")
"""Scales of embeddings and logits, norms, projections, names, tied weights, several streams."""


@pytest.mark.parametrize("case", FAMILIES)
def test_every_family_has_an_embedding_and_a_head(case: str, tmp_path: Path) -> None:
    base = make_base(case, tmp_path / "base")
    with LLM(model=str(base), **LORA) as llm:
        check(llm, base, {"both": {"target_modules": embeddings_of(base)}})


def embeddings_of(base: Path) -> list[str]:
    """Return the names of the modules of the embedding and the LM head."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    return [name for name, module in model.named_modules() if module in ends]


def test_quantized_tables(tmp_path: Path) -> None:
    base = make_base("llama", tmp_path / "base")
    targets = {name: {"target_modules": modules} for name, modules in TARGETS.items()}
    with LLM(model=str(base), quantization="int8", **LORA) as llm:
        check(llm, base, targets, 0.05)


CLASSIFIERS = {
    "llama": ("LlamaForSequenceClassification", SIZES | {"num_labels": 3}, ["q_proj"]),
    "bert": ("BertForSequenceClassification", ENCODER, ["query", "pooler.dense"]),
    "roberta": ("RobertaForSequenceClassification", ENCODER, ["value"]),
}


@pytest.mark.parametrize("case", CLASSIFIERS)
@pytest.mark.parametrize("layout", ["one", "tp", "pp"])
def test_heads_of_classifiers(case: str, layout: str, tmp_path: Path) -> None:
    """PEFT saves them whole; a layer before may have factors."""
    architecture, config, modules = CLASSIFIERS[case]
    base = tmp_path / "base"
    make_hf(architecture, **config).save_pretrained(base)
    if case != "llama" and layout == "pp":
        pytest.skip("encoders have one stage")
    fields = {"target_modules": modules, "task_type": "SEQ_CLS"}
    models = [make_adapter(base, tmp_path / f"{i}", i, **fields) for i in range(2)]
    adapters = [LoRARequest(f"{i}", i + 1, str(tmp_path / f"{i}")) for i in range(2)]

    def classify(llm: LLM, asked: list[LoRARequest | None]) -> NDArray[np.float32]:
        prompts = [{"prompt_token_ids": p} for p, _ in zip(PROMPTS * 2, asked, strict=False)]
        outputs = llm.classify(prompts, lora_request=asked, use_tqdm=False)
        return np.array([output.outputs.probs for output in outputs], np.float32)

    with LLM(model=str(base), **LORA, **LAYOUTS[layout]) as llm:
        alone = [classify(llm, [it]) for it in (*adapters, None)]
        found = classify(llm, [*adapters, None, *adapters, None])
    assert (found[:1] == alone[0]).all()
    for i, model in enumerate(models):
        for row in (i, i + 3):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([(PROMPTS * 2)[row]])).logits
            assert np.abs(found[row] - logits.softmax(-1)[0].numpy()).max() < 1e-5
    assert np.abs(found[:2] - alone[2]).max() > 1e-2


def test_heads_of_token_classifiers(tmp_path: Path) -> None:
    base = tmp_path / "base"
    make_hf("BertForTokenClassification", **ENCODER).save_pretrained(base)
    fields = {"target_modules": ["key"], "task_type": "TOKEN_CLS"}
    model = make_adapter(base, tmp_path / "a", **fields)
    with LLM(model=str(base), **LORA) as llm:
        (output,) = llm.encode(
            {"prompt_token_ids": PROMPTS[1]},
            pooling_task="token_classify",
            lora_request=LoRARequest("a", 1, str(tmp_path / "a")),
            use_tqdm=False,
        )
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([PROMPTS[1]])).logits[0].softmax(-1).numpy()
    assert np.abs(np.asarray(output.outputs.data) - expected).max() < 1e-5
