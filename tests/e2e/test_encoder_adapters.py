"""Adapters of encoders, embedders and classifiers: equal to PEFT's models in float32."""

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo import LLM, LoRARequest
from octavo.models.adaptable_model import AdaptableModel
from tests.adapters import make_factors, write_adapter
from tests.encoders import write_encoder
from tests.models.cases import CASES
from tests.models.harness import make_hf, spec_of
from tests.models.test_encoders import ENCODERS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None,
    reason="peft is not installed; it belongs to the extra dev",
)
TEXTS = [[5 + (7 * i + j * j) % 80 for j in range(n)] for i, n in enumerate((9, 17, 30, 4))]
SETTINGS: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 64}
SETTINGS |= {"runner": "pooling", "enable_lora": True, "max_loras": 2}

_, LLAMA = CASES["llama"]
DECODERS = {
    "llama-embed": ("LlamaModel", LLAMA),
    "llama-classify": (
        "LlamaForSequenceClassification",
        LLAMA | {"num_labels": 3, "pad_token_id": 0},
    ),
}
NAMES = ("bert", "bert-odd", "roberta", "roberta-model", "xlm-roberta", "xlm-roberta-model")
NAMES += ("modernbert", "modernbert-model", "deberta", "deberta-v1-model", *DECODERS)


def make_adapter(folder: Path, architecture: str, config: dict[str, Any], number: int) -> Any:
    """Write an adapter of all layers; return PEFT's model."""
    from peft import LoraConfig, get_peft_model

    model = make_hf(architecture, **config)
    heads = ("classif", "pooler", "score", "head")
    # DeBERTa's queries and keys also make tables of distances; see docs/lora.md.
    if architecture.startswith("Deberta"):
        heads += ("query_proj", "key_proj", "in_proj", "pos_")
    names = [
        name
        for name, module in model.named_modules()
        if type(module).__name__ == "Linear" and not any(head in name for head in heads)
    ]
    task = None if "Sequence" in architecture else "FEATURE_EXTRACTION"
    wanted = LoraConfig(r=3, lora_alpha=4, target_modules=names, task_type=task)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(model, wanted)
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.15)
    adapted.save_pretrained(folder, save_embedding_layers=False)
    return adapted.eval()


def compute(model: Any, tokens: list[int], pooled: int) -> np.ndarray:
    """Return a text's classes, or the normed hidden state of a token."""
    with torch.no_grad():
        found = model(torch.tensor([tokens]))
    if "logits" in found:
        logits = found.logits[0]
        return (logits.softmax(-1) if len(logits) > 1 else logits.sigmoid()).numpy()
    return torch.nn.functional.normalize(found.last_hidden_state[0, pooled], dim=0).numpy()


@pytest.mark.parametrize("case", NAMES)
def test_equal_to_peft(case: str, tmp_path: Path) -> None:
    """Texts with several adapters and without one, in one batch and alone."""
    architecture, config = (ENCODERS | DECODERS)[case]
    plain = make_hf(architecture, **config)
    plain.save_pretrained(tmp_path / "base")
    models = [make_adapter(tmp_path / str(i), architecture, config, i) for i in range(2)]
    models += [plain, models[0]]
    adapters = [LoRARequest(str(i), i + 1, str(tmp_path / str(i))) for i in range(2)]
    each = [*adapters, None, adapters[0]]
    prompts = [{"prompt_token_ids": tokens} for tokens in TEXTS]
    classifies = "Sequence" in architecture
    convert = {} if case in ENCODERS else {"convert": "classify" if classifies else "embed"}
    with LLM(str(tmp_path / "base"), **SETTINGS, **convert) as llm:

        def ask(prompts: Any, adapters: Any) -> list[list[float]]:
            if classifies:
                outputs = llm.classify(prompts, lora_request=adapters, use_tqdm=False)
                return [it.outputs.probs for it in outputs]
            outputs = llm.embed(prompts, lora_request=adapters, use_tqdm=False)
            return [it.outputs.embedding for it in outputs]

        found = ask(prompts, each)
        assert [ask([p], a)[0] for p, a in zip(prompts, each, strict=True)] == found
    for tokens, model, answer in zip(TEXTS, models, found, strict=True):
        expected = compute(model, tokens, 0 if case in ENCODERS else -1)
        assert np.abs(expected - answer).max() < 2e-5
    assert np.abs(compute(plain, TEXTS[0], 0 if case in ENCODERS else -1) - found[0]).max() > 1e-3


def test_scores_are_those_of_the_vectors(tmp_path: Path) -> None:
    base = write_encoder(tmp_path / "base")
    factors = make_factors(AdaptableModel(spec_of(tmp_path / "base")))
    folder = write_adapter(tmp_path / "a", factors, lora_alpha=2)
    adapter = LoRARequest("a", 1, str(folder))
    settings = SETTINGS | {"skip_tokenizer_init": False, "load_format": "dummy"}
    texts, scores = ["a cat", "the dogs"], []
    with LLM(base, **settings) as llm:
        for it in (None, adapter):
            outputs = llm.embed(texts, lora_request=it, use_tqdm=False)
            first, second = (np.array(output.outputs.embedding) for output in outputs)
            (found,) = llm.score(*texts, lora_request=it, use_tqdm=False)
            assert abs(found.outputs.score - first @ second) < 1e-5
            scores.append(found.outputs.score)
    assert abs(scores[0] - scores[1]) > 1e-3
