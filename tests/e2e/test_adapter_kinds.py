"""Kinds of LoRA adapters: answers are those of PEFT's model, at any batch and in any layout."""

import copy
import importlib.util
import shutil
import warnings

import numpy as np
import pytest
import torch

from octavo import LLM, LoRARequest, SamplingParams
from tests.models.harness import make_hf
from tests.ranks import use_ranks

if importlib.util.find_spec("peft") is None:
    pytest.skip("peft is not installed; it belongs to the extra dev", allow_module_level=True)

PROMPTS = [[5 + (7 * i + j * (1 + i)) % 100 for j in range(9 + 14 * i)] for i in range(3)]
PARAMS = SamplingParams(
    max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=2, prompt_logprobs=0
)
SETTINGS = {
    "skip_tokenizer_init": True,
    "max_model_len": 64,
    "max_num_seqs": 16,
    "num_threads": 1,
    "dtype": "float32",
    "enable_lora": True,
    "max_loras": 12,
}
CONFIG = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_bias": True,
    "mlp_bias": True,
}
LINEAR = [f"{x}_proj" for x in ("q", "k", "v", "o", "gate", "up", "down")]
KINDS = {
    "LoRA": {},
    "bias of B": {"lora_bias": True},
    "rsLoRA with a bias of B": {"lora_bias": True, "use_rslora": True, "lora_alpha": 3},
    "DoRA": {"use_dora": True},
    "rsDoRA of some modules": {
        "use_dora": True,
        "use_rslora": True,
        "target_modules": ["k_proj", "down_proj"],
        "rank_pattern": {"layers.1.mlp.down_proj": 2},
    },
    "some layers": {
        "layers_to_transform": [0, 2],
        "layers_pattern": "layers",
        "target_modules": ["v_proj", "up_proj"],
    },
    "EVA": {"init_lora_weights": "eva"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "PiSSA": {"init_lora_weights": "pissa"},
    "OLoRA": {"init_lora_weights": "olora"},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Return a model with biases, and its folder."""
    model = make_hf("LlamaForCausalLM", **CONFIG)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    folder = tmp_path_factory.mktemp("base")
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory):
    """Return requests by kind, and logprobs of the prompts' tokens by PEFT."""
    from peft import LoraConfig, get_peft_model

    root, requests, expected = tmp_path_factory.mktemp("adapters"), {}, {}
    expected[None] = logprobs(base[0])
    for number, (kind, fields) in enumerate(KINDS.items(), 1):
        torch.manual_seed(number)
        common = {"r": 4, "lora_alpha": 6, "target_modules": LINEAR, "init_lora_weights": False}
        path, start = root / str(number), root / f"{number}-start"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # EVA's start needs data, which a training has
            model = get_peft_model(copy.deepcopy(base[0]), LoraConfig(**common | fields))
            config = model.peft_config["default"]
            is_converted = config.init_lora_weights not in (False, "eva", "orthogonal")
            if is_converted:
                config.init_lora_weights, stored = True, config.init_lora_weights
                model.save_pretrained(start)
                config.init_lora_weights = stored
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "magnitude" in name:
                        parameter *= 0.7 + 0.6 * torch.rand(parameter.shape)
                    elif "lora_" in name:
                        parameter += 0.2 * torch.randn(parameter.shape)
            more = {"path_initial_model_for_weight_conversion": str(start)} if is_converted else {}
            model.save_pretrained(path, **more)
        requests[kind] = LoRARequest(kind, number, str(path))
        expected[kind] = logprobs(model)
        if not is_converted and "bias" not in kind:
            assert np.allclose(logprobs(model.merge_and_unload()), expected[kind], atol=1e-4)
    return requests, expected


@torch.no_grad()
def logprobs(model):
    found = []
    for prompt in PROMPTS:
        tokens = torch.tensor([prompt])
        rows = model(tokens).logits[0].log_softmax(-1)
        found += [rows[i, token].item() for i, token in enumerate(prompt[1:])]
    return np.array(found)


def ask(llm, requests):
    """Return the answers to all prompts with each adapter, all at once."""
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    given = [request for request in requests for _ in prompts]
    outputs = llm.generate(prompts * len(requests), PARAMS, lora_request=given, use_tqdm=False)
    bits = [
        (
            output.outputs[0].token_ids,
            [
                sorted((t, it.logprob) for t, it in row.items())
                for row in output.outputs[0].logprobs
            ],
            [
                row[token].logprob
                for token, row in zip(
                    output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
                )
            ],
        )
        for output in outputs
    ]
    return [bits[i : i + len(prompts)] for i in range(0, len(bits), len(prompts))]


@pytest.fixture(scope="module")
def alone(base, adapters):
    """Answers with each adapter, one after the other."""
    with LLM(str(base[1]), **SETTINGS | {"max_loras": 1}) as llm:
        return {kind: ask(llm, [adapters[0].get(kind)])[0] for kind in (None, *KINDS)}


def prompt_logprobs(answers):
    return np.array([number for _, _, row in answers for number in row])


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_logprobs_are_those_of_peft(kind, adapters, alone):
    expected = adapters[1][kind]
    np.testing.assert_allclose(prompt_logprobs(alone[kind]), expected, atol=2e-4)
    if kind is not None:
        assert np.abs(expected - adapters[1][None]).max() > 0.1


@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 3)], ids=["one", "tp", "pp"])
def test_all_at_once_give_the_bits_of_each_alone(ranks, base, adapters, alone, monkeypatch):
    use_ranks(monkeypatch, *ranks)
    order = [None, *reversed(KINDS), None]
    with LLM(str(base[1]), max_num_batched_tokens=40, **SETTINGS) as llm:
        found = ask(llm, [adapters[0].get(kind) for kind in order])
    for kind, answers in zip(order, found, strict=True):
        assert answers == alone[kind], kind


def test_sums_of_ranks(base, adapters, monkeypatch):
    """Ranks that divide the inputs of a layer add the biases once."""
    use_ranks(monkeypatch, 2, mode="reduce")
    with LLM(str(base[1]), **SETTINGS) as llm:
        found = ask(llm, [adapters[0].get(kind) for kind in (None, *KINDS)])
    for kind, answers in zip((None, *KINDS), found, strict=True):
        np.testing.assert_allclose(prompt_logprobs(answers), adapters[1][kind], atol=2e-4)


def test_other_weights_of_a_model_that_has_slept(base, adapters, tmp_path):
    """The gains of DoRA are those of the weights that are in memory."""
    folder = shutil.copytree(base[1], tmp_path / "model")
    requests = [adapters[0][kind] for kind in ("DoRA", "bias of B")]
    with LLM(str(folder), enable_sleep_mode=True, **SETTINGS) as llm:
        before = ask(llm, requests)
        llm.sleep(level=1)
        llm.wake_up()
        assert ask(llm, requests) == before
        llm.sleep(level=2)
        other = copy.deepcopy(base[0])
        with torch.no_grad():
            for parameter in other.parameters():
                parameter *= 1 + 0.3 * torch.rand(parameter.shape)
        other.save_pretrained(folder)
        llm.wake_up()
        found = ask(llm, requests)
    with LLM(str(folder), **SETTINGS) as llm:
        assert found == ask(llm, requests) != before


def test_an_adapter_that_is_gone_after_a_sleep(base, adapters, tmp_path):
    """The engine wakes up; only requests with the adapter fail."""
    lost = LoRARequest("lost", 90, str(tmp_path / "adapter"))
    shutil.copytree(adapters[0]["DoRA"].lora_path, lost.lora_path)
    prompts = [{"prompt_token_ids": PROMPTS[0]}] * 2
    with LLM(str(base[1]), enable_sleep_mode=True, **SETTINGS) as llm:
        before = ask(llm, [lost, None])
        llm.sleep(level=2)
        shutil.rmtree(lost.lora_path)
        llm.wake_up()
        outputs = llm.generate(prompts, PARAMS, lora_request=[lost, None], use_tqdm=False)
        assert [it.outputs[0].finish_reason for it in outputs] == ["error", "length"]
        assert ask(llm, [None]) == before[1:]


def test_a_base_that_has_changed_on_disk(base, adapters, tmp_path):
    """DoRA would divide by norms of other weights; others do not need them."""
    folder = shutil.copytree(base[1], tmp_path / "model")
    with LLM(str(folder), **SETTINGS) as llm:
        (folder / "model.safetensors").touch()
        given = [adapters[0][kind] for kind in ("DoRA", "LoRA")]
        prompts = [{"prompt_token_ids": PROMPTS[0]}] * 2
        outputs = llm.generate(prompts, PARAMS, lora_request=given, use_tqdm=False)
    assert outputs[0].outputs[0].finish_reason == "error"
    assert "has changed since the model was loaded" in outputs[0].outputs[0].stop_reason
    assert outputs[1].outputs[0].finish_reason == "length"
