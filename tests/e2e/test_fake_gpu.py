"""The engine with device=cuda, on tensors that only claim to be there."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from octavo import LLM, SamplingParams
from tests.drafts import SETTINGS, Drafter
from tests.e2e.test_triton import folder
from tests.fake_gpu import CUDA, FakeGpu
from tests.triton import needs_triton

pytestmark = needs_triton


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return FakeGpu(monkeypatch)


PROMPTS = [[5, 6], [40 + i for i in range(7)], [100 + 3 * i for i in range(26)]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
PLAIN = SamplingParams(temperature=0.8, seed=6, max_tokens=4, ignore_eos=True)
RICH = SamplingParams(
    temperature=0.9,
    top_p=0.9,
    top_k=50,
    seed=5,
    max_tokens=6,
    repetition_penalty=1.2,
    allowed_token_ids=list(range(1, 200)),
    ignore_eos=True,
)
LOGPROBS = SamplingParams(temperature=0.0, max_tokens=4, logprobs=3, ignore_eos=True)
SMALL = {
    "skip_tokenizer_init": True,
    "max_model_len": 64,
    "block_size": 8,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 3,
    "num_gpu_blocks_override": 40,
}


def run(model: str, params: list[SamplingParams], gpu: FakeGpu | None = None, **settings: object):
    with LLM(model=model, dtype="float32", **SMALL | settings) as llm:
        requests = [{"prompt_token_ids": ids} for ids in PROMPTS]
        if gpu is not None:
            assert llm._client.core.executor._worker.device == CUDA
            gpu.waits.clear()
        outputs = llm.generate(requests, params, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def ids(outputs: list) -> list[list[int]]:
    return [list(output.token_ids) for output in outputs]


def test_it_insists_on_one_device(gpu: FakeGpu) -> None:
    x = torch.zeros(3, device="cuda")
    assert x.device == CUDA
    assert (x + 1).is_cuda
    with pytest.raises(RuntimeError, match="two devices"):
        x + torch.ones(3)
    with pytest.raises(TypeError, match="numpy"):
        x.numpy()
    assert not gpu.waits
    x.copy_(torch.ones(3), non_blocking=True)
    x.copy_(torch.ones(3).pin_memory(), non_blocking=True)
    assert x.tolist() == [1, 1, 1]
    x[x > 0] = 2
    assert len(gpu.waits) == 3


@pytest.mark.parametrize(
    ("case", "enforce_eager"),
    [("llama", True), *((case, False) for case in ("llama", "gemma2", "gpt2", "mpt"))],
)
def test_steps_never_wait(case: str, enforce_eager: bool, tmp_path: Path, gpu: FakeGpu) -> None:
    """Greedy and plainly sampled requests, prompts in chunks, decode steps captured or not."""
    model = folder(case, tmp_path)
    params = [PLAIN, GREEDY, GREEDY]
    expected = ids(run(model, params, device="cpu"))
    assert ids(run(model, params, gpu, device="cuda", enforce_eager=enforce_eager)) == expected
    assert gpu.waits == []
    assert bool(gpu.replays) != enforce_eager


@pytest.mark.parametrize(
    "settings",
    [
        {"num_gpu_blocks_override": 6, "max_model_len": 40},
        {"kv_cache_dtype": "fp8"},
        {"batch_invariant": True},
        {"async_scheduling": False},
        {"attention_backend": "reference"},
    ],
    ids=str,
)
def test_settings(settings: dict[str, object], tmp_path: Path, gpu: FakeGpu) -> None:
    model = folder("llama", tmp_path)
    params = [PLAIN, GREEDY, GREEDY]
    on_cpu = {k: v for k, v in settings.items() if k != "batch_invariant"}
    expected = ids(run(model, params, device="cpu", **on_cpu))
    assert ids(run(model, params, gpu, device="cuda", **settings)) == expected
    assert bool(gpu.waits) == ("attention_backend" in settings), "the reference looks at lengths"


@pytest.mark.parametrize("blocks", [40, 7])
def test_everything_that_sampling_has(blocks: int, tmp_path: Path, gpu: FakeGpu) -> None:
    """With few blocks, requests are preempted and start over."""
    model = folder("llama", tmp_path)
    bias = SamplingParams(
        temperature=0.0,
        max_tokens=6,
        min_tokens=3,
        logit_bias={5: 2.0},
        allowed_token_ids=[4, 5, 6, 7],
        ignore_eos=True,
    )
    params = [RICH, bias, LOGPROBS]
    expected = run(model, params, device="cpu")
    settings = {"num_gpu_blocks_override": blocks, "max_model_len": 40}
    outputs = run(model, params, gpu, device="cuda", **settings)
    assert ids(outputs) == ids(expected)
    for entry, other in zip(outputs[2].logprobs, expected[2].logprobs, strict=True):
        assert list(entry) == list(other)
    assert gpu.waits, "these do wait"


@pytest.mark.parametrize("settings", [{}, {"num_gpu_blocks_override": 7, "max_model_len": 40}])
def test_drafts(
    settings: dict[str, object], tmp_path: Path, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps with drafts are waited for; those between them are captured and keep their tokens."""
    model = folder("llama", tmp_path)
    params = [msgspec.structs.replace(p, max_tokens=14) for p in (PLAIN, GREEDY, RICH)]
    settings = settings | {"batch_invariant": True}
    expected = ids(run(model, params, gpu, device="cuda", **settings))
    replays = gpu.replays
    drafter = Drafter(monkeypatch, expected)
    assert ids(run(model, params, gpu, device="cuda", **settings, **SETTINGS)) == expected
    assert drafter.num_tokens > 1.2 * drafter.num_steps
    assert gpu.replays > replays
    assert gpu.waits


def test_several_answers_and_prompt_logprobs(tmp_path: Path, gpu: FakeGpu) -> None:
    """Copies of blocks, and logits of whole prompts."""
    model = folder("llama", tmp_path)
    params = SamplingParams(n=3, seed=1, max_tokens=4, prompt_logprobs=2, logprobs=-1)
    settings = {"max_logprobs": -1}
    expected = ids(run(model, [params] * 3, device="cpu", **settings))
    assert ids(run(model, [params] * 3, device="cuda", **settings)) == expected


def test_a_request_whose_logits_are_not_finite(tmp_path: Path, gpu: FakeGpu) -> None:
    with LLM(model=folder("llama", tmp_path), device="cuda", dtype="float32", **SMALL) as llm:
        steps = llm._client.core.executor._worker.runner.state.steps
        forward = steps._forward

        def broken(*args, **kwargs):
            result = forward(*args, **kwargs)
            if result.tokens is not None:
                result.tokens.fill_(-1)
            return result

        steps._forward = broken
        params = SamplingParams(temperature=0.0, max_tokens=3)
        (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
        assert output.outputs[0].finish_reason == "error"
        assert "not finite" in output.outputs[0].stop_reason
        steps._forward = forward
        (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 3
