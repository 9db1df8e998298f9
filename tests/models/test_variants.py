"""Pooling models of decoder families, equal to those of transformers in float32."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from octavo import SamplingParams
from octavo.config import PoolerConfig
from octavo.errors import ConfigError, ModelError, RequestError
from octavo.models.registry import FAMILIES
from octavo.models.variants import Variant, find_variant
from tests.models.configs.dense import FALCON, GPT2
from tests.models.configs.sizes import SIZES, VOCAB, WIDE_HEADS
from tests.models.harness import make_hf, spec_of
from tests.pooling import (
    PROMPTS,
    assert_near,
    change_config,
    change_weights,
    logits,
    open_llm,
    pool,
    results,
    states,
    unit,
)
from tests.small_tokenizers import byte_level, save

CLASSIFIERS: dict[str, dict[str, Any]] = {
    "LlamaForSequenceClassification": SIZES,
    "Qwen2ForSequenceClassification": SIZES,
    "Qwen3ForSequenceClassification": WIDE_HEADS,
    "MistralForSequenceClassification": SIZES | {"sliding_window": 9},
    "Gemma3TextForSequenceClassification": WIDE_HEADS,
    "Qwen3MoeForSequenceClassification": WIDE_HEADS
    | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
    "GPT2ForSequenceClassification": GPT2 | {"pad_token_id": 0},
    "FalconForSequenceClassification": FALCON | {"new_decoder_architecture": False},
}
MODELS: dict[str, dict[str, Any]] = {
    "LlamaModel": SIZES,
    "MistralModel": SIZES | {"sliding_window": 9},
    "Qwen3Model": WIDE_HEADS,
    "Gemma3TextModel": WIDE_HEADS | {"sliding_window": 9},
    "GPT2Model": GPT2,
}
QWEN3_RERANKER = {"architectures": ["Qwen3ForSequenceClassification"]}
QWEN3_RERANKER |= {"classifier_from_token": ["a", "b"], "is_original_qwen3_reranker": True}


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_sequence_classification(name: str, tmp_path: Path) -> None:
    hf_model = make_hf(name, **CLASSIFIERS[name], num_labels=3)
    hf_model.save_pretrained(tmp_path)
    expected = logits(hf_model)
    with open_llm(tmp_path) as llm:
        assert_near(results(llm, "classify", use_activation=False), expected)
        assert_near(results(llm, None), [torch.softmax(x, -1) for x in expected])
        rows = llm.classify([{"prompt_token_ids": ids} for ids in PROMPTS], use_tqdm=False)
        assert [row.outputs.num_classes for row in rows] == [3] * len(PROMPTS)
        with pytest.raises(RequestError, match=r"generates no text\. It can: classify"):
            llm.generate({"prompt_token_ids": [5]}, use_tqdm=False)


@pytest.mark.parametrize("name", ["Qwen2ForTokenClassification", "LlamaForTokenClassification"])
def test_token_classification(name: str, tmp_path: Path) -> None:
    hf_model = make_hf(name, **SIZES, id2label={0: "O", 1: "PER", 2: "LOC"})
    hf_model.save_pretrained(tmp_path)
    expected = logits(hf_model)
    with open_llm(tmp_path) as llm:
        assert_near(results(llm, None), [torch.softmax(x, -1) for x in expected])
        assert llm.llm_engine.spec.poolers[0].labels == ("O", "PER", "LOC")


@pytest.mark.parametrize("name", MODELS)
def test_bare_models_are_pooling_models(name: str, tmp_path: Path) -> None:
    hf_model = make_hf(name, **MODELS[name])
    hf_model.save_pretrained(tmp_path)
    hidden = states(hf_model)
    with open_llm(tmp_path) as llm:
        assert_near(results(llm, "embed"), [unit(x[-1]) for x in hidden])
        assert_near(results(llm, "token_embed"), [unit(x) for x in hidden])


def test_a_decoder_also_has_vectors(tmp_path: Path) -> None:
    """As in llama.cpp and Ollama; its answers are the same."""
    hf_model = make_hf("LlamaForCausalLM", **SIZES)
    hf_model.save_pretrained(tmp_path)
    with open_llm(tmp_path) as llm:
        assert_near(results(llm, "embed"), [unit(x[-1]) for x in states(hf_model.model)])
        greedy = SamplingParams(temperature=0)
        answer = llm.generate({"prompt_token_ids": PROMPTS[3]}, greedy, use_tqdm=False)[0]
        with torch.no_grad():
            best = hf_model(torch.tensor([PROMPTS[3]])).logits[0, -1].argmax()
        assert answer.outputs[0].token_ids[0] == best
    with (
        open_llm(tmp_path, runner="generate") as llm,
        pytest.raises(RequestError, match=r"cannot do that\. It can: generate"),
    ):
        results(llm, "embed")


def test_runner_and_convert(tmp_path: Path) -> None:
    hf_model = make_hf("LlamaForSequenceClassification", **SIZES, num_labels=1)
    hf_model.save_pretrained(tmp_path / "scores")
    decoder = make_hf("LlamaForCausalLM", **SIZES, tie_word_embeddings=False)
    decoder.save_pretrained(tmp_path / "text")
    make_hf("BertModel", **SIZES).save_pretrained(tmp_path / "encoder")

    def poolers(folder: str, **settings: Any) -> list[str]:
        spec = spec_of(tmp_path / folder, **settings)
        return ["generate"] * spec.generates + [pooler.task for pooler in spec.poolers]

    vectors = ["embed", "token_embed"]
    assert poolers("text") == ["generate", *vectors]
    assert poolers("text", runner="pooling") == vectors
    assert poolers("text", convert="embed") == vectors
    assert poolers("text", convert="classify") == ["classify"]
    assert poolers("text", runner="generate") == ["generate"]
    assert poolers("text", convert="none") == ["generate"]
    assert poolers("encoder") == poolers("encoder", runner="pooling", convert="none") == vectors
    assert poolers("scores") == poolers("scores", convert="none") == ["classify"]
    for folder, settings, says in (
        ("encoder", {"runner": "generate"}, "runner=generate: this model .BertModel. generates no"),
        ("scores", {"runner": "generate"}, "generates no text"),
        ("text", {"runner": "generate", "convert": "embed"}, "contradict"),
        ("text", {"runner": "pooling", "convert": "none"}, "convert=none forbids"),
        ("scores", {"convert": "embed"}, "convert=embed: .* can do classify"),
        ("encoder", {"convert": "classify"}, "convert=classify: .* can do embed, token_embed"),
    ):
        with pytest.raises(ConfigError, match=says):
            poolers(folder, **settings)
    with pytest.raises(ModelError, match=r"lacks 1 tensors .* score\.weight"):
        pool(tmp_path / "text", None, convert="classify")
    with pytest.raises(ConfigError, match=r"speculative_config: .* generates no text"):
        pool(tmp_path / "scores", None, speculative_config={"method": "ngram"})
    change_config(tmp_path / "scores", architectures=["LlamaForCausalLM"])
    assert_near(
        pool(tmp_path / "scores", None, convert="classify"), [x.sigmoid() for x in logits(hf_model)]
    )


def test_find_variant() -> None:
    def find(name: str) -> Variant | None:
        return find_variant(name, FAMILIES)

    assert find("LlamaBidirectionalModel") == Variant("LlamaForCausalLM", "Model", True)
    assert find("GPT2Model") == Variant("GPT2LMHeadModel", "Model")
    assert find("Gemma3TextModel") == Variant("Gemma3ForCausalLM", "Model")
    assert find("Qwen2ForProcessRewardModel") == Variant(
        "Qwen2ForCausalLM", "ForProcessRewardModel"
    )
    assert find("NoSuchModel") is find("LlamaForQuestionAnswering") is None


def _score_rewards(folder: Path, size: int) -> torch.nn.Sequential:
    """Turn a saved Qwen2 into a reward model; return its head."""
    torch.manual_seed(5)
    linear = torch.nn.Linear
    head = torch.nn.Sequential(linear(48, 48), torch.nn.ReLU(), linear(48, size))
    change_weights(folder, **{f"score.{k}": v.detach() for k, v in head.state_dict().items()})
    return head


def test_reward_model(tmp_path: Path) -> None:
    hf_model = make_hf("Qwen2Model", **SIZES)
    hf_model.save_pretrained(tmp_path)
    head = _score_rewards(tmp_path, 1)
    change_config(tmp_path, architectures=["Qwen2ForRewardModel"])
    with torch.no_grad():
        expected = [head(x) for x in states(hf_model)]
    with open_llm(tmp_path) as llm:
        assert_near(results(llm, None), expected)
        rows = llm.reward([{"prompt_token_ids": ids} for ids in PROMPTS], use_tqdm=False)
        assert_near([row.outputs.data for row in rows], expected)


def test_process_reward_model(tmp_path: Path) -> None:
    """Scores at the ends of steps only, which a token marks."""
    hf_model = make_hf("Qwen2ForCausalLM", **SIZES, tie_word_embeddings=False)
    hf_model.save_pretrained(tmp_path)
    head = _score_rewards(tmp_path, 2)
    change_config(tmp_path, architectures=["Qwen2ForProcessRewardModel"])
    tag, prompts = 7, [[7, 9, 7], [8, 9, 11], [9, *[30] * 20, 7, 12], [5, 7]]
    with torch.no_grad():
        scores = [head(x) for x in states(hf_model.model, prompts)]
    expected = [
        torch.softmax(x, -1)[torch.tensor(ids) == tag]
        for x, ids in zip(scores, prompts, strict=True)
    ]
    with open_llm(tmp_path) as llm:
        assert_near(results(llm, None, prompts, step_tag_id=tag), expected)
        assert_near(results(llm, None, prompts), [torch.softmax(x, -1) for x in scores])
    changes = {"pooling_type": "STEP", "step_tag_id": tag, "returned_token_ids": [1]}
    changes["use_activation"] = False
    with open_llm(tmp_path, pooler_config=changes) as llm:
        found = results(llm, None, prompts)
        assert [row.shape for row in found] == [(2, 1), (0, 1), (1, 1), (1, 1)]
        selected = [x[torch.tensor(ids) == tag, 1:] for x, ids in zip(scores, prompts, strict=True)]
        assert_near(found, selected)
    with pytest.raises(ConfigError, match=r"returned_token_ids=.2.: the model has 2 classes"):
        spec_of(tmp_path, pooler_config=PoolerConfig(returned_token_ids=[2]))


@pytest.mark.parametrize("tied", [True, False])
def test_reranker_from_tokens(tied: bool, tmp_path: Path) -> None:
    """Qwen3-Reranker as it is published: a decoder that answers yes or no."""
    fields = WIDE_HEADS | {"vocab_size": 300, "tie_word_embeddings": tied}
    hf_model = make_hf("Qwen3ForCausalLM", **fields)
    hf_model.save_pretrained(tmp_path)
    save(byte_level(), tmp_path, {"eos_token": "</s>"})
    no, yes = ord("a"), ord("b")
    texts = ["What?", "Who is it", "Here"]
    pairs = [list(b"What?") + list(text.encode()) for text in texts]
    with torch.no_grad():
        rows = [hf_model(torch.tensor([ids])).logits[0, -1] for ids in pairs]
    expected = [torch.sigmoid(row[yes] - row[no]) for row in rows]
    with open_llm(tmp_path, hf_overrides=QWEN3_RERANKER) as llm:
        found = llm.score("What?", texts, use_tqdm=False)
        assert [row.prompt_token_ids for row in found] == pairs
        scores = torch.tensor([row.outputs.score for row in found])
        torch.testing.assert_close(scores, torch.stack(expected), rtol=1e-4, atol=1e-5)
        assert not llm.llm_engine.spec.generates
    overrides = {"architectures": ["Qwen3ForSequenceClassification"]}
    overrides |= {"classifier_from_token": ["b", "a", "</s>"], "method": "no_post_processing"}
    with open_llm(tmp_path, hf_overrides=overrides) as llm:
        found = results(llm, "classify", pairs, use_activation=False)
        for ours, row in zip(found, rows, strict=True):
            theirs = row[[yes, no, 257]]
            torch.testing.assert_close(torch.tensor(ours), theirs, rtol=1e-4, atol=2e-5)
    for changes, says in (
        ({"classifier_from_token": ["a", "no such"]}, "no token 'no such'"),
        ({"classifier_from_token": ["a"]}, "this method needs two tokens"),
        ({"classifier_from_token": "a"}, "must be a list of tokens"),
        ({"is_original_qwen3_reranker": False}, "the field method is missing"),
        ({"method": "argmax"}, "supported: from_2_way_softmax, no_post_processing"),
    ):
        with pytest.raises(ModelError, match=says):
            spec_of(tmp_path, hf_overrides=QWEN3_RERANKER | changes)
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(ModelError, match=r"tokenizer\.json is damaged"):
        spec_of(tmp_path, hf_overrides=QWEN3_RERANKER)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        spec_of(tmp_path, hf_overrides=QWEN3_RERANKER)


@pytest.mark.parametrize("window", [8, 9, 30])
def test_embedding_gemma(window: int, tmp_path: Path) -> None:
    """Half of the window is before a token, and half of it after."""
    fields = WIDE_HEADS | {"use_bidirectional_attention": True, "sliding_window": window}
    hf_model = make_hf("Gemma3TextModel", **fields)
    hf_model.save_pretrained(tmp_path)
    change_config(tmp_path, sliding_window=window)  # transformers saves an odd one as even
    hidden = states(hf_model)
    with open_llm(tmp_path, pooler_config={"pooling_type": "MEAN"}) as llm:
        assert_near(results(llm, "embed"), [unit(x.mean(0)) for x in hidden])
        assert_near(results(llm, "token_embed"), [unit(x) for x in hidden])
    with pytest.raises(ConfigError, match="runner=generate"):
        spec_of(tmp_path, runner="generate")


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("LlamaModel", SIZES),
        ("Qwen3Model", WIDE_HEADS),
        ("Qwen2ForCausalLM", SIZES | {"use_sliding_window": True, "sliding_window": 5}),
        ("MistralModel", SIZES | {"sliding_window": 6}),
    ],
)
def test_is_causal_false(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """GTE-Qwen2, and bidirectional Llamas."""
    if name == "Qwen2ForCausalLM":
        fields = fields | {"max_window_layers": 1}
    hf_model = make_hf(name, **fields, is_causal=False)
    hf_model.save_pretrained(tmp_path)
    bare = hf_model.model if name.endswith("LM") else hf_model
    for module in bare.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False
    assert json.loads((tmp_path / "config.json").read_text())["is_causal"] is False
    hidden = states(bare)
    with open_llm(tmp_path) as llm:
        assert_near(results(llm, "token_embed"), [unit(x) for x in hidden])
        assert_near(results(llm, "embed"), [unit(x[-1]) for x in hidden])


@pytest.mark.parametrize("kind", ["avg", "last", "cls", "weighted_avg"])
def test_bidirectional_llama(kind: str, tmp_path: Path) -> None:
    """Not in transformers: Llama with is_causal=false, as in vLLM; config.json has the pooling."""
    hf_model = make_hf("LlamaModel", **SIZES, is_causal=False)
    hf_model.save_pretrained(tmp_path)
    change_config(tmp_path, architectures=["LlamaBidirectionalModel"], is_causal=None, pooling=kind)
    hidden = states(hf_model)
    weights = [torch.arange(1, len(x) + 1)[:, None] for x in hidden]
    expected = {
        "avg": [x.mean(0) for x in hidden],
        "last": [x[-1] for x in hidden],
        "cls": [x[0] for x in hidden],
        "weighted_avg": [(x * w).sum(0) / w.sum() for x, w in zip(hidden, weights, strict=True)],
    }[kind]
    assert_near(pool(tmp_path, None), [unit(x) for x in expected])
    change_config(tmp_path, pooling="colbert")
    with pytest.raises(ModelError, match="pooling='colbert' is not supported"):
        spec_of(tmp_path)


def test_models_that_must_read_from_left_to_right(tmp_path: Path) -> None:
    config = transformers.MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1)
    config.architectures = ["MambaForCausalLM"]
    config.save_pretrained(tmp_path)
    change_config(tmp_path, is_causal=False)
    with pytest.raises(ModelError, match="from left to right only"):
        spec_of(tmp_path)


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_quantized(quantization: str, tmp_path: Path) -> None:
    """The head stays as it is, so that its classes differ by the model's own weights."""
    hf_model = make_hf("LlamaForSequenceClassification", **SIZES, num_labels=3)
    hf_model.save_pretrained(tmp_path)
    spec = spec_of(tmp_path, quantization=quantization)
    forms = {weight.name: weight.form.name for weight in spec.weights() if weight.kind == "linear"}
    assert forms.pop("poolers.classify.0.weight") == "plain"
    assert set(forms.values()) == {quantization}
    plain, found = pool(tmp_path, None), pool(tmp_path, None, quantization=quantization)
    assert all(abs(a - b).max() < 0.2 for a, b in zip(plain, found, strict=True))
    assert load_file(tmp_path / "model.safetensors")["score.weight"].shape == (3, 48)
