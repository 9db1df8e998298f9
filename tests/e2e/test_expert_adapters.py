"""Adapters of experts: equal to PEFT's models in float32, and the same bits in every layout."""

import importlib.util
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM, LoRARequest, SamplingParams
from octavo.errors import AdapterError, ConfigError
from tests.models.harness import make_hf
from tests.models.test_parity import CASES, VOCAB

needs_peft = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None,
    reason="peft is not installed; it belongs to the extra dev",
)
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=5)
PROMPT = [(7 * i + i * i) % VOCAB for i in range(21)]
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


def engine(folder: Path, **settings: Any) -> LLM:
    given = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 64, **LORA}
    return LLM(str(folder), **given | settings)


def ask(llm: LLM, adapters: list[LoRARequest | None]) -> list[Any]:
    prompts = [{"prompt_token_ids": PROMPT}] * len(adapters)
    outputs = llm.generate(prompts, PARAMS, lora_request=adapters, use_tqdm=False)
    return [(out.outputs[0].token_ids, out.outputs[0].logprobs) for out in outputs]


def make_adapter(folder: Path, case: str, modules: list[str], parameters: list[str]) -> Any:
    """Write a model and an adapter with random numbers; return PEFT's model."""
    from peft import LoraConfig, get_peft_model

    architecture, config = CASES[case]
    hf = make_hf(architecture, **config)
    hf.save_pretrained(folder / "base")
    wanted = LoraConfig(
        r=3,
        lora_alpha=4,
        target_modules=modules,
        target_parameters=parameters,
        alpha_pattern={r".*\.0\..*down_proj": 5},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(hf, wanted)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
    adapted.save_pretrained(folder / "adapter", save_embedding_layers=False)
    return adapted


def check(model: Any, answer: Any) -> float:
    """Compare an answer with a model of transformers; return the largest difference."""
    tokens, rows = answer
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + list(tokens)])).logits[0].float()
    expected = torch.log_softmax(logits, -1)
    return max(
        abs(it.logprob - float(expected[len(PROMPT) - 1 + i, token]))
        for i, row in enumerate(rows)
        for token, it in row.items()
    )


CONTENTS = {
    "mixtral": (["q_proj"], ["experts.gate_up_proj", "experts.down_proj", "mlp.gate.weight"]),
    "qwen2-moe": (
        ["shared_expert.up_proj", "shared_expert.down_proj", "shared_expert_gate"],
        ["experts.gate_up_proj", "experts.down_proj", "mlp.gate.weight"],
    ),
    "qwen3-moe": ([], ["experts.down_proj"]),
    "olmoe": (["o_proj"], ["experts.gate_up_proj"]),
    "deepseek-v3-moe": (["kv_a_proj_with_mqa"], ["experts.gate_up_proj", "experts.down_proj"]),
    "gpt-oss": (["k_proj"], ["experts.gate_up_proj", "experts.down_proj"]),
    "llama4": ([], ["experts.gate_up_proj", "experts.down_proj"]),
}


@needs_peft
@pytest.mark.parametrize("case", CONTENTS)
def test_equal_to_peft(case: str, tmp_path: Path) -> None:
    adapted = make_adapter(tmp_path, case, *CONTENTS[case])
    adapter = LoRARequest("a", 1, str(tmp_path / "adapter"))
    with engine(tmp_path / "base") as llm:
        found, plain = ask(llm, [adapter, None])
        assert ask(llm, [None])[0] == plain
        assert ask(llm, [adapter])[0] == found
    assert check(adapted, found) < 2e-3
    assert check(adapted, plain) > 2e-2
    with adapted.disable_adapter():
        assert check(adapted, plain) < 2e-3
