"""Processors of vLLM's interface: each request has a separate one, so batches change nothing."""

import sys

import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.config import EngineConfig
from octavo.errors import ConfigError, RequestError
from octavo.sampling.plugins import load_named
from octavo.sampling.state import SamplingState
from octavo.sampling.vllm_config import VllmConfig
from octavo.sampling.vllm_logits_processors import (
    AdapterLogitsProcessor,
    BatchUpdate,
    MoveDirectionality,
    process_dict_updates,
)
from tests.params import Params
from tests.sampling.harness import run

VOCAB = 60

MODULE = """
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
)


class NoRepeat(LogitsProcessor):
    "Excludes the last `no_repeat` tokens; of the batch's mean it makes a bias, to depend on it."

    @classmethod
    def validate_params(cls, params):
        count = (params.extra_args or {}).get("no_repeat", 0)
        if not isinstance(count, int):
            raise ValueError(f"no_repeat={count!r} is no integer")

    def __init__(self, vllm_config: VllmConfig, device, is_pin_memory):
        assert vllm_config.model_config.get_vocab_size() > 0
        self.live = {}

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update: BatchUpdate | None):
        if batch_update is None:
            return
        for index, params, prompt, output in batch_update.added:
            self.live[index] = (params.extra_args or {}).get("no_repeat", 0), output

    def apply(self, logits):
        logits = logits + logits.mean()
        for index, (count, output) in self.live.items():
            if count:
                logits[index, output[-count:]] = float("-inf")
        return logits


class Flatten(LogitsProcessor):
    "Keeps the order of tokens."

    def __init__(self, vllm_config, device, is_pin_memory):
        pass

    def is_argmax_invariant(self):
        return True

    def update_state(self, batch_update):
        pass

    def apply(self, logits):
        return torch.where(logits < logits.amax(1, keepdim=True) - 1, -torch.inf, logits)


class Only(AdapterLogitsProcessor):
    "Allows the token `only`, and from the third on the first one of the prompt."

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        only = (params.extra_args or {}).get("only")
        if only is None:
            return None

        def process(prompt, output, logits):
            kept = prompt[0] if len(output) > 1 else only
            mask = torch.full_like(logits, float("-inf"))
            mask[kept] = logits[kept]
            return mask

        return process
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module that imports vLLM, as its users do."""
    (tmp_path / "written_for_vllm.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    # The modules of both packages are restored after the test.
    before = {name for name in sys.modules if name.partition(".")[0] == "vllm"}
    meta_path = list(sys.meta_path)
    yield "written_for_vllm"
    for name in [n for n in sys.modules if n.partition(".")[0] == "vllm" and n not in before]:
        del sys.modules[name]
    sys.modules.pop("written_for_vllm", None)
    sys.meta_path[:] = meta_path
    from octavo.frontend.llm_engine import LLMEngine

    LLMEngine.metrics_prefix = "octavo"


def make_state(*names, rows=4):
    config = VllmConfig(EngineConfig(), VOCAB, 128)
    make = lambda kind: kind(config, torch.device("cpu"), False)  # noqa: E731
    return SamplingState(rows, VOCAB, load_named(names, rows, VOCAB, make))


def params(**fields):
    return Params(**fields).core(VOCAB)


def greedy(**extra_args):
    return params(temperature=0.0, extra_args=extra_args or None)


def test_a_resumed_request_and_one_of_many_are_no_others(module, sampler):
    names = [f"{module}:NoRepeat", f"{module}:Only"]
    state = make_state(*names)
    rng = np.random.default_rng(0)
    kinds = [greedy(no_repeat=2), greedy(), greedy(only=7), greedy(only=8)]
    outputs = [rng.integers(0, VOCAB, 3).tolist() for _ in kinds]
    logits = rng.normal(size=(4, VOCAB))
    for row, kind in enumerate(kinds):
        logits[row, outputs[row]] += 10
        state.add_row(row, kind, [3 + row, *outputs[row][: 1 if row < 3 else 0]], 1)
    three = np.arange(3)
    state.append(three, np.array([o[1:] for o in outputs[:3]]).flatten(), np.full(3, 2))
    together = run(sampler, logits, state.metadata(np.arange(4))).token_ids.tolist()
    assert together[0] not in outputs[0][1:]
    assert together[1] in outputs[1]
    assert together[2:] == [5, 8]
    for row in range(3):
        alone = make_state(*names, rows=1)
        alone.add_row(0, kinds[row], [3 + row, *outputs[row]], 1)
        got = run(sampler, logits[row : row + 1], alone.metadata(np.array([0])))
        assert got.token_ids[0] == together[row]


def test_what_keeps_the_most_probable_token_is_not_shown_greedy_rows(module, sampler):
    state = make_state(f"{module}:Flatten", rows=31)
    state.add_row(30, greedy(), [1], 1)
    for seed in range(30):
        state.add_row(seed, params(temperature=0.5, seed=seed), [1], 1)
    metadata = state.metadata(np.arange(31))
    ((_, step),) = metadata.processors
    assert 30 not in step.rows
    # It excludes tokens 1 below the best: only after the temperature this includes token 6.
    logits = np.full((31, VOCAB), -9.0)
    logits[:, 5], logits[:, 6] = 1.0, 0.4
    assert set(run(sampler, logits, metadata).token_ids.tolist()) == {5}


def test_parameters_that_it_does_not_like_fail_their_request(module):
    state = make_state(f"{module}:NoRepeat")
    with pytest.raises(RequestError, match="NoRepeat failed: no_repeat='x' is no integer"):
        state.add_row(0, greedy(no_repeat="x"), [1], 1)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("NoRepeat", "write it as module:Class"),
        ("written_for_vllm:Missing", "Missing"),
        ("written_for_vllm:torch", "it is not a class"),
        ("written_for_vllm:SamplingParams", "not a subclass"),
        ("frobnicate:X", "No module named 'frobnicate'"),
        ("__main__:X", "another process"),
    ],
)
def test_what_cannot_be_used_is_named(module, name, said):
    with pytest.raises(ConfigError, match=said) as error:
        make_state(name)
    assert repr(name) in str(error.value)


def test_entries_follow_their_requests():
    kept = {0: "a", 1: "b", 2: "c"}
    make = lambda params, prompt, output: params  # noqa: E731
    swap, one_way = MoveDirectionality.SWAP, MoveDirectionality.UNIDIRECTIONAL
    update = BatchUpdate(3, [2], [(2, "d", None, []), (1, None, None, [])], [(0, 1, swap)])
    assert process_dict_updates(kept, update, make)
    assert kept == {1: "a", 2: "d"}
    assert process_dict_updates(kept, BatchUpdate(2, [], [], [(2, 0, one_way)]), make)
    assert kept == {0: "d", 1: "a"}
    assert not process_dict_updates(kept, None, make)


def test_settings_have_vllms_names():
    config = VllmConfig(EngineConfig(), VOCAB, 128)
    assert config.model_config.max_model_len == 128
    assert config.model_config.model == EngineConfig().model.model
    assert config.speculative_config is None
    assert config.scheduler_config.max_num_seqs > 0
    with pytest.raises(AttributeError, match=r"have no lora_config; .* model_config"):
        _ = config.lora_config


class Alternating(AdapterLogitsProcessor):
    """Processor that allows even tokens only."""

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        def process(output, logits):
            logits[1::2] = -torch.inf
            return logits

        return process if params.extra_args else None


PROMPTS = ["Once upon a time", "The cat", "One day"]
SMALL = {"max_model_len": 128, "kv_cache_memory_bytes": "16M"}
EVEN = SamplingParams(max_tokens=12, seed=3, extra_args={"even": True})


def test_answers_in_an_engine():
    plain = SamplingParams(max_tokens=12, seed=3)
    with LLM(**SMALL) as llm:
        expected = llm.generate(PROMPTS[1], plain, use_tqdm=False)[0].outputs[0]
    with LLM(logits_processors=[Alternating], **SMALL) as llm:
        together = llm.generate(PROMPTS, [EVEN, plain, EVEN], use_tqdm=False)
        alone = llm.generate(PROMPTS[2], EVEN, use_tqdm=False)
    ids = [output.outputs[0].token_ids for output in together]
    assert ids[1] == expected.token_ids
    assert ids[2] == alone[0].outputs[0].token_ids
    assert all(token % 2 == 0 for token in ids[0] + ids[2])

    class Hidden(Alternating):
        pass

    with pytest.raises(ConfigError, match="define it at module level"):
        LLM(logits_processors=[Hidden])


def test_an_engine_in_another_process_finds_the_class(module, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    params = SamplingParams(max_tokens=5, temperature=0, extra_args={"only": 7})
    with LLM(logits_processors=[f"{module}:Only"], isolate=True, **SMALL) as llm:
        (output,) = llm.generate({"prompt_token_ids": [9, 4]}, params, use_tqdm=False)
    assert output.outputs[0].token_ids == [7, 7, 9, 9, 9]
