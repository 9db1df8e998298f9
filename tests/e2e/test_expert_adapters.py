"""Adapters of experts: equal to PEFT's models in float32, and the same bits in every layout."""

import importlib.util
import os
import signal
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, LoRARequest, SamplingParams
from octavo.errors import AdapterError, ConfigError
from tests.adapters import write_adapter
from tests.models.cases import CASES
from tests.models.configs.sizes import VOCAB
from tests.models.harness import make_hf

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


FEW = {"num_experts": 9, "num_experts_per_tok": 2, "num_hidden_layers": 2}
FEW |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and three adapters: of experts in both forms, and of the first layer only."""
    folder = tmp_path_factory.mktemp("mixture")
    architecture, config = CASES["qwen3-moe"]
    make_hf(architecture, **config | FEW).save_pretrained(folder / "base")
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.2

    hidden, inner, experts, rank = config["hidden_size"], 40, 9, 3
    for name, layers in (("a", 2), ("first", 1)):
        tensors, single = {}, {}
        for layer in range(layers):
            prefix = f"base_model.model.model.layers.{layer}."
            for module, outputs in (("mlp.gate", experts), ("self_attn.o_proj", hidden)):
                inputs = hidden if module == "mlp.gate" else 4 * config["head_dim"]
                both = {"A": random(rank, inputs), "B": random(outputs, rank)}
                both = {f"{prefix}{module}.lora_{x}.weight": it for x, it in both.items()}
                tensors |= both
                single |= both
            for part, outputs, inputs, names in (
                (".base_layer", 2 * inner, hidden, ("gate_proj", "up_proj")),
                ("", hidden, inner, ("down_proj",)),
            ):
                a, b = random(experts * rank, inputs), random(outputs, experts * rank)
                fused = f"{prefix}mlp.experts{part}"
                tensors |= {f"{fused}.lora_A.weight": a, f"{fused}.lora_B.weight": b}
                for expert in range(experts):
                    rows = b[:, expert::experts].chunk(len(names))
                    for module, some in zip(names, rows, strict=True):
                        own = f"{prefix}mlp.experts.{expert}.{module}"
                        single[f"{own}.lora_A.weight"] = a[expert * rank :][:rank].clone()
                        single[f"{own}.lora_B.weight"] = some.clone()
        write_adapter(folder / name, tensors, r=rank, lora_alpha=4)
        if name == "a":
            write_adapter(folder / "single", single, r=rank, lora_alpha=4)
    return folder


def requests(mixture: Path) -> list[LoRARequest | None]:
    names = ("a", None, "first", "single", "a", None, "a")
    return [it and LoRARequest(it, len(it), str(mixture / it)) for it in names]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def alone(request: pytest.FixtureRequest, mixture: Path) -> tuple[str, list[Any]]:
    """Answers of one request at a time, whose adapters take one slot in turn."""
    with engine(mixture / "base", dtype=request.param, max_loras=1) as llm:
        found = [ask(llm, [it])[0] for it in requests(mixture)]
    with engine(mixture / "base", dtype=request.param, enable_lora=False) as llm:
        (plain,) = ask(llm, [None])
    assert found[1] == plain, "a model without adapters"
    assert found[0] == found[3], "fused and single experts"
    assert len({str(it) for it in found[:3]}) == 3
    return request.param, found


# Decisions from the tokens of one step, so that experts move all the time.
EPLB = {"num_redundant_experts": 1, "window_size": 1, "step_interval": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "eager": {"enforce_eager": True, "max_num_batched_tokens": 37, "max_num_seqs": 3},
    "columns": {"tensor_parallel_size": 2, "num_threads": 1},
    "experts": {"tensor_parallel_size": 2, "num_threads": 1, "enable_expert_parallel": True},
    "engines": {"data_parallel_size": 2, "num_threads": 1, "enable_expert_parallel": True},
    "engines and processes": {
        "data_parallel_size": 2,
        "tensor_parallel_size": 2,
        "num_threads": 1,
        "enable_expert_parallel": True,
        "enforce_eager": True,
    },
    "balanced": {
        "tensor_parallel_size": 2,
        "num_threads": 1,
        "enable_expert_parallel": True,
        "enable_eplb": True,
        "eplb_config": EPLB,
        "weight_cache": "off",
    },
    "balanced engines": {
        "data_parallel_size": 2,
        "num_threads": 1,
        "enable_expert_parallel": True,
        "enable_eplb": True,
        "eplb_config": EPLB,
        "weight_cache": "off",
    },
    "stages": {"pipeline_parallel_size": 2, "num_threads": 1},
    "cache": {"expert_cache": 2**18},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_same_bits_in_every_layout(
    layout: str, alone: tuple[str, list[Any]], mixture: Path, tmp_path: Path
) -> None:
    dtype, expected = alone
    settings = {"dtype": dtype, "max_loras": 3, "weight_cache": str(tmp_path)} | LAYOUTS[layout]
    with engine(mixture / "base", **settings) as llm:
        assert ask(llm, requests(mixture)) == expected
        if layout == "cache":
            assert llm.stats().expert_cache_misses > 0
        if "balanced" in layout:
            for _ in range(3):
                assert ask(llm, requests(mixture)) == expected
            assert llm.stats().num_expert_rearrangements > 2


@pytest.mark.parametrize("layout", ["balanced", "balanced engines"])
def test_a_draft_model_whose_experts_do_not_move(layout: str, mixture: Path) -> None:
    path = str(mixture / "a")
    adapters = [LoRARequest("a", 1, path, draft_path=path), None]
    with engine(mixture / "base") as llm:
        expected = ask(llm, [LoRARequest("a", 1, path), None])
    draft = {"model": str(mixture / "base"), "method": "draft_model", "num_speculative_tokens": 2}
    with engine(mixture / "base", speculative_config=draft, **LAYOUTS[layout]) as llm:
        assert ask(llm, adapters) == expected


def test_death_of_an_engine(alone: tuple[str, list[Any]], mixture: Path) -> None:
    """Its successor reads its adapters again, and takes over the experts that have moved."""
    dtype, expected = alone
    settings = {"dtype": dtype, "max_loras": 3}
    with engine(mixture / "base", **settings | LAYOUTS["balanced engines"]) as llm:
        assert ask(llm, requests(mixture)) == expected
        client: Any = llm._client
        timer = threading.Timer(0.05, os.kill, (client.pids[1], signal.SIGKILL))
        timer.start()
        assert ask(llm, requests(mixture) * 3) == expected * 3
        timer.join()
        assert ask(llm, requests(mixture)) == expected


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_experts(quantization: str, mixture: Path) -> None:
    with engine(mixture / "base", quantization=quantization, max_loras=3) as llm:
        found = [ask(llm, [it])[0] for it in requests(mixture)]
        assert ask(llm, requests(mixture)) == found
        assert found[0] == found[3]
        assert found[0] != found[1]


def test_target_modules(mixture: Path) -> None:
    """Memory is planned for the modules of the setting only, and adapters of others are refused."""
    adapter = LoRARequest("a", 1, str(mixture / "a"))
    planned = {}
    with engine(mixture / "base") as llm:
        (expected,) = ask(llm, [adapter])
        planned["all"] = llm.memory_plan.nbytes("adapters")
    named = ["o_proj", "gate", "experts"]
    with engine(mixture / "base", lora_target_modules=named) as llm:
        assert ask(llm, [adapter, adapter]) == [expected] * 2
        planned["named"] = llm.memory_plan.nbytes("adapters")
    with engine(mixture / "base", lora_target_modules=["qkv_proj", "gate", "down_proj"]) as llm:
        with pytest.raises(AdapterError, match="leaves out o_proj; add it to the setting"):
            ask(llm, [adapter])
        planned["some"] = llm.memory_plan.nbytes("adapters")
    with engine(mixture / "base", lora_target_modules=["o_proj", "gate"]) as llm:
        for name, ends in (("a", "gate_proj, up_proj"), ("single", "down_proj, gate_proj")):
            with pytest.raises(AdapterError, match=f"lora_target_modules leaves out {ends}"):
                ask(llm, [LoRARequest(name, 2, str(mixture / name))])
        planned["few"] = llm.memory_plan.nbytes("adapters")
    assert planned["few"] < planned["some"] < planned["named"] < planned["all"]
    with pytest.raises(ConfigError, match="has no q, norm that adapters can change; choose from"):
        engine(mixture / "base", lora_target_modules=["o_proj", "q", "norm"])
