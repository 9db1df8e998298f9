"""Engine with device=cuda, on tensors that only claim to be on a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from octavo import LLM, LoRARequest, SamplingParams
from octavo.checkpoints.registry import open_checkpoint
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.frontend.guards import Guards
from octavo.kernels.reference import ReferenceOps
from octavo.kernels.torch_tensors import from_torch
from octavo.messages import GuardSpec
from octavo.models.adaptable_model import EMBED, AdaptableModel
from octavo.models.blocks.base import is_adaptable
from octavo.models.registry import read_spec
from octavo.quantization import int4
from octavo.quantization.base import PackedShape
from octavo.quantization.gptq import GPTQ
from octavo.quantization.int4 import GROUP_SIZE
from octavo.system.tensor import from_numpy
from octavo.worker import model_runner
from tests.adapters import PREFIX, make_factors, write_adapter
from tests.drafts import SETTINGS, Drafter
from tests.e2e.test_triton import folder
from tests.encoders import write_encoder
from tests.fake_gpu import CUDA, FakeGpu
from tests.models.cases import CASES
from tests.models.harness import make_hf
from tests.quantization.test_gptq import module as gptq_module
from tests.triton import needs_triton

pytestmark = needs_triton


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a model as small as it can be: interpreted kernels are slow."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    return folder("llama", tmp_path_factory.mktemp("llama"), **sizes)


def dequantize(model: str, form: str, group: int, folder: Path) -> str:
    """Write the model with the numbers of its quantized weights; return its folder."""
    hf, ops = AutoModelForCausalLM.from_pretrained(model), ReferenceOps()
    for module in hf.modules():
        if isinstance(module, torch.nn.Linear):
            weight = ops.quantize_weight([from_torch(module.weight)], form, group)
            numbers = (weight.data[..., :-1] * weight.data[..., -1:]).flatten(1)[:, : weight.k]
            module.weight.data.copy_(numbers)
    hf.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def twins(llama: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return, for each quantization, a model of the numbers that it makes of `llama`."""
    forms = {"int4": ("int4_levels", GROUP_SIZE), "fp8": ("fp8", 0)}
    return {
        name: dequantize(llama, form, group, tmp_path_factory.mktemp(name))
        for name, (form, group) in forms.items()
    }


@pytest.fixture(scope="module")
def gpu(twins: dict[str, str]) -> Iterator[FakeGpu]:
    """Fake the GPU after transformers has loaded its models: it would keep faked functions."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield FakeGpu(monkeypatch)


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


@pytest.fixture(scope="module")
def llm(llama: str, gpu: FakeGpu) -> Iterator[LLM]:
    """Return an engine on the GPU, with captured steps and no setting beyond `SMALL`."""
    with LLM(model=llama, dtype="float32", device="cuda", max_logprobs=-1, **SMALL) as llm:
        yield llm


def generate(llm: LLM, params: list[SamplingParams], gpu: FakeGpu | None = None):
    if gpu is not None:
        assert llm._client.core.executor._worker.device == CUDA
        gpu.waits.clear()
    llm.reset_prefix_cache()
    requests = [{"prompt_token_ids": ids} for ids in PROMPTS]
    outputs = llm.generate(requests, params, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def run(model: str, params: list[SamplingParams], gpu: FakeGpu | None = None, **settings: object):
    with LLM(model=model, dtype="float32", **SMALL | settings) as llm:
        return generate(llm, params, gpu)


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


def test_steps_never_wait(llama: str, llm: LLM, gpu: FakeGpu) -> None:
    """Greedy and plainly sampled requests, prompts in chunks, captured decode steps."""
    params, replays = [PLAIN, GREEDY, GREEDY], gpu.replays
    assert ids(generate(llm, params, gpu)) == ids(run(llama, params, device="cpu"))
    assert gpu.waits == []
    assert gpu.replays > replays


@pytest.mark.parametrize(
    ("case", "enforce_eager", "sizes"),
    [
        ("llama", True, {"hidden_size": 32, "intermediate_size": 32}),
        ("gemma2", False, {"hidden_size": 32, "intermediate_size": 32}),
        ("gpt2", False, {"n_embd": 32, "n_inner": 32}),
        ("gpt-oss", False, {"hidden_size": 32}),
        ("gemma4-moe", False, {"layer_types": ["sliding_attention", "full_attention"]}),
        ("kimi-linear", False, {"layer_types": ["linear_attention", "full_attention"]}),
        ("qwen3.5", False, {"layer_types": ["linear_attention", "full_attention"]}),
        ("mamba2-odd", False, {"hidden_size": 35}),
        ("mamba-odd", True, {"hidden_size": 35}),
        ("rwkv7", False, {"hidden_size": 32}),
    ],
)
def test_steps_of_other_kinds_never_wait(
    case: str, enforce_eager: bool, sizes: dict[str, Any], tmp_path: Path, gpu: FakeGpu
) -> None:
    model, params = folder(case, tmp_path, **sizes), [PLAIN, GREEDY, GREEDY]
    expected, replays = ids(run(model, params, device="cpu")), gpu.replays
    assert ids(run(model, params, gpu, device="cuda", enforce_eager=enforce_eager)) == expected
    assert gpu.waits == []
    assert (gpu.replays > replays) != enforce_eager


@pytest.mark.parametrize(
    "settings",
    [
        {"num_gpu_blocks_override": 6, "max_model_len": 40, "batch_invariant": True},
        {"kv_cache_dtype": "fp8", "async_scheduling": False},
        {"attention_backend": "reference"},
    ],
    ids=str,
)
def test_settings(settings: dict[str, object], llama: str, gpu: FakeGpu) -> None:
    params = [PLAIN, GREEDY, GREEDY]
    on_cpu = {k: v for k, v in settings.items() if k != "batch_invariant"}
    expected = ids(run(llama, params, device="cpu", **on_cpu))
    assert ids(run(llama, params, gpu, device="cuda", **settings)) == expected
    assert bool(gpu.waits) == ("attention_backend" in settings), "the reference looks at lengths"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype=int8 .* use fp8_e4m3"),
        ({"head_dim": 514}, "head_size=514: .* use attention_backend=reference"),
    ],
)
def test_what_is_not_supported_is_said_before_loading(
    changes: dict[str, Any],
    message: str,
    llama: str,
    tmp_path: Path,
    gpu: FakeGpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_runner, "load_model", lambda *_, **__: pytest.fail("too late"))
    config = json.loads(Path(llama, "config.json").read_text()) | changes
    Path(tmp_path, "config.json").write_text(json.dumps(config))
    settings = {"kv_cache_dtype": changes.get("kv_cache_dtype", "auto"), "load_format": "dummy"}
    with pytest.raises(ConfigError, match=message):
        run(str(tmp_path), [GREEDY], device="cuda", **settings)


def test_int8(llama: str, gpu: FakeGpu) -> None:
    """Weights and activations have the same bits as on a CPU, and sums of products are exact."""
    params, settings = [PLAIN, GREEDY, GREEDY], {"quantization": "int8"}
    expected, replays = ids(run(llama, params, device="cpu", **settings)), gpu.replays
    assert ids(run(llama, params, gpu, device="cuda", **settings)) == expected
    assert gpu.waits == []
    assert gpu.replays > replays


@pytest.mark.parametrize("name", ["int4", "fp8"])
def test_weights_of_codes(
    name: str, llama: str, twins: dict[str, str], gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Activations stay in the model's type: the tokens are those of the dequantized weights."""
    monkeypatch.setattr(int4, "SMALL", 0)  # otherwise, weights as small as these are int8
    params = [PLAIN, GREEDY, GREEDY]
    expected = ids(run(twins[name], params, device="cpu"))
    got = run(llama, params, gpu, device="cuda", quantization=name, enforce_eager=True)
    assert ids(got) == expected
    assert gpu.waits == []


def test_a_weight_of_a_checkpoint(gpu: FakeGpu) -> None:
    """The product with the unit matrix is the weight, with zeros and an order of inputs."""
    stored, weight = gptq_module(np.random.default_rng(0), 40, 96, group=32, ordered=True)
    form = GPTQ(group_size=32, symmetric=False, ordered=True)
    names = (source.name.removeprefix("m.") for source in form.sources("m", 40, 96))
    tensors = [from_numpy(np.ascontiguousarray(stored[name])) for name in names]
    from octavo.kernels.triton.ops import TritonOps  # needs triton

    ops = TritonOps(CUDA, upcast=True)
    packed = form.pack(ops, form.cut(tensors, [slice(None)], None), PackedShape(40, 96, "float32"))
    got = ops.linear(ops.to_device(np.eye(96, dtype=np.float32)), packed)
    np.testing.assert_allclose(ops.to_host(got).T, weight, rtol=1e-6, atol=1e-8)


INVOCATION = [43, 44]


def write_adapters(
    base: str, folder: Path, whole: tuple[str, ...] = ()
) -> list[LoRARequest | None]:
    """Return no adapter, and two adapters of different ranks of a model.

    The first one has its own modules `whole`, and factors of all other modules. The second one
    begins at `INVOCATION`, and changes half of all modules but the embedding.
    """
    spec = read_spec(open_checkpoint(Path(base), "auto"), EngineConfig().model)
    names = {weight.name.removesuffix("weight") for weight in spec.weights()}
    model = AdaptableModel(spec, {EMBED, *filter(is_adaptable, names)}, whole)
    generator = torch.Generator().manual_seed(0)
    own = {
        f"{PREFIX}{name}.{kind}": torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        for name, module in model.replaceable.items()
        for kind, shape in module.shapes.items()
    }
    mine = [name for name in model.modules if name not in model.replaceable]
    factors = make_factors(model, mine, rank=3, seed=3)
    fields = {"modules_to_save": [name.rpartition(".")[2] for name in model.replaceable] or None}
    first = write_adapter(folder / "first", factors | own, r=3, lora_alpha=6, **fields)
    some = [it for it in model.modules if not model.modules[it].is_embedding][1::2]
    factors = make_factors(model, some, rank=8, seed=8)
    fields = {"r": 8, "lora_alpha": 16, "alora_invocation_tokens": INVOCATION}
    second = write_adapter(folder / "second", factors, **fields)
    requests = [LoRARequest(path.name, i, str(path)) for i, path in enumerate((first, second), 1)]
    return [None, *requests]


LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
WHOLE = ("embed_tokens", "lm_head")


def check_adapters(
    model: str, adapters: list[LoRARequest | None], gpu: FakeGpu, **settings: Any
) -> None:
    """Check that tokens are those of the CPU, and that no step waits, also for adapters."""
    params = [PLAIN, GREEDY, msgspec.structs.replace(GREEDY, max_tokens=5)]
    native = {k: v for k, v in settings.items() if k in ("quantization", "lora_modules_to_save")}

    def ask(llm: LLM, requests: list[LoRARequest | None]) -> list[list[int]]:
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
        outputs = llm.generate(prompts, params, lora_request=requests, use_tqdm=False)
        return ids([output.outputs[0] for output in outputs])

    mixes = [[adapters[0], adapters[2], adapters[1]], [adapters[1]] * 3, [None] * 3]
    with LLM(model=model, dtype="float32", device="cpu", **SMALL | native | LORA) as llm:
        expected = [ask(llm, mix) for mix in mixes]
    assert len({str(tokens) for tokens in expected}) == len(mixes)
    few = {"max_loras": 1} if "batch_invariant" in settings else {}  # slots change adapters
    with LLM(model=model, dtype="float32", device="cuda", **SMALL | settings | LORA | few) as llm:
        gpu.waits.clear()
        replays = gpu.replays
        assert [ask(llm, mix) for mix in mixes] == expected
        assert gpu.waits == []
        assert (gpu.replays > replays) != ("enforce_eager" in settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"enforce_eager": True, "quantization": "int8"},
        {"batch_invariant": True, "lora_modules_to_save": list(WHOLE)},
    ],
    ids=["captured", "eager int8", "invariant whole"],
)
def test_adapters(settings: dict[str, Any], llama: str, gpu: FakeGpu, tmp_path: Path) -> None:
    """All linear layers, embedding and LM head; whole ones; activated LoRA."""
    whole = WHOLE if "lora_modules_to_save" in settings else ()
    check_adapters(llama, write_adapters(llama, tmp_path, whole), gpu, **settings)


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("qwen3-moe", {}),
        ("llama4", {"enforce_eager": True}),
        ("gpt-oss", {"enforce_eager": True, "quantization": "int8"}),
    ],
)
def test_adapters_of_experts(
    case: str, settings: dict[str, Any], gpu: FakeGpu, tmp_path: Path
) -> None:
    """Routers and experts, one by one and fused, with biases and factors of inputs."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 32}
    model = folder(case, tmp_path / "base", **sizes)
    check_adapters(model, write_adapters(model, tmp_path), gpu, **settings)


def test_adapters_of_a_classifier(gpu: FakeGpu, tmp_path: Path) -> None:
    """The head of classes is a whole layer; all other layers have factors."""
    architecture, config = CASES["llama"]
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_labels": 3}
    name = architecture.replace("CausalLM", "SequenceClassification")
    make_hf(name, **config | sizes | {"pad_token_id": 0}).save_pretrained(tmp_path / "base")
    base = str(tmp_path / "base")
    adapters = write_adapters(base, tmp_path)
    requests = [{"prompt_token_ids": ids} for ids in PROMPTS]
    found = []
    for device in ("cpu", "cuda"):
        settings = SMALL | LORA | {"device": device, "convert": "classify", "dtype": "float32"}
        settings |= {"runner": "pooling", "batch_invariant": device == "cuda"}
        with LLM(base, **settings) as llm:
            for mix in (adapters, [None, adapters[1], adapters[1]], [None] * 3):
                outputs = llm.classify(requests, lora_request=mix, use_tqdm=False)
                found.append([output.outputs.probs for output in outputs])
    np.testing.assert_allclose(found[:3], found[3:], atol=1e-5)
    assert found[0][0] == found[2][0]
    assert found[0][1:] != found[1][1:] != found[2][1:]
    assert found[3][1] == found[4][1]


def test_everything_that_sampling_has(llama: str, llm: LLM, gpu: FakeGpu) -> None:
    """With few blocks, requests are preempted and start again."""
    bias = SamplingParams(
        temperature=0.0,
        max_tokens=6,
        min_tokens=3,
        logit_bias={5: 2.0},
        allowed_token_ids=[4, 5, 6, 7],
        ignore_eos=True,
    )
    params = [RICH, bias, LOGPROBS]
    expected = run(llama, params, device="cpu")
    few = {"num_gpu_blocks_override": 7, "max_model_len": 40}
    for outputs in (generate(llm, params, gpu), run(llama, params, gpu, device="cuda", **few)):
        assert ids(outputs) == ids(expected)
        for entry, other in zip(outputs[2].logprobs, expected[2].logprobs, strict=True):
            assert list(entry) == list(other)
        assert gpu.waits, "these do wait"


def test_drafts(llama: str, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with drafts are waited for; those between them are captured and keep their tokens.
    The number of blocks is too small, so requests are preempted and start again."""
    params = [msgspec.structs.replace(p, max_tokens=10) for p in (PLAIN, GREEDY, RICH)]
    settings = {"num_gpu_blocks_override": 7, "max_model_len": 40, "batch_invariant": True}
    expected, replays = ids(run(llama, params, device="cpu")), gpu.replays
    drafter = Drafter(monkeypatch, expected)
    with LLM(
        model=llama, dtype="float32", device="cuda", **SMALL | settings | SETTINGS
    ) as drafting:
        assert ids(generate(drafting, params, gpu)) == expected
        assert drafting.stats().num_preemptions > 0
    assert drafter.num_tokens > 1.2 * drafter.num_steps
    assert gpu.replays > replays
    assert gpu.waits


def test_several_answers_and_prompt_logprobs(llama: str, llm: LLM) -> None:
    """Copies of blocks, and logits of whole prompts."""
    params = SamplingParams(n=3, seed=1, max_tokens=4, prompt_logprobs=2, logprobs=-1)
    expected = ids(run(llama, [params] * 3, device="cpu", max_logprobs=-1))
    assert ids(generate(llm, [params] * 3)) == expected


def test_a_request_whose_logits_are_not_finite(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = llm._client.core.executor._worker.runner.state.steps
    forward = steps._forward

    def broken(*args, **kwargs):
        result = forward(*args, **kwargs)
        if result.tokens is not None:
            result.tokens.fill_(-1)
        return result

    params = SamplingParams(temperature=0.0, max_tokens=3)
    with monkeypatch.context() as patched:
        patched.setattr(steps, "_forward", broken)
        (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
        assert output.outputs[0].finish_reason == "error"
        assert "not finite" in output.outputs[0].stop_reason
    (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3


def test_forced_ends_of_reasoning(llama: str, llm: LLM, gpu: FakeGpu, monkeypatch) -> None:
    """Rows whose tokens depend on those before them wait for these."""
    spec = GuardSpec((1,), (7, 9), thinks=True, budget=2, repetition="close_thinking")
    monkeypatch.setattr(Guards, "make", lambda guards, params, prompt: spec)
    params = [GREEDY, PLAIN, RICH]
    found = ids(generate(llm, params, gpu))
    assert [tokens[2:4] for tokens in found] == [[7, 9]] * 3
    assert found == ids(run(llama, params))


@pytest.mark.parametrize("runner", ["auto", "pooling"])
def test_vectors_are_those_of_the_cpu(
    runner: str, llama: str, gpu: FakeGpu, tmp_path: Path
) -> None:
    """Vectors of an encoder, of a decoder beside answers, and of a decoder without an LM head."""
    models = [(llama, None)]
    if runner == "pooling":
        models.append((write_encoder(tmp_path, num_hidden_layers=1), "dummy"))
    requests = [{"prompt_token_ids": ids} for ids in ([5, 6], [40 + i for i in range(7)])]
    for model, load_format in models:
        vectors = []
        for device in ("cuda", "cpu"):
            settings = SMALL | {"device": device, "runner": runner, "dtype": "float32"}
            if load_format is not None:
                settings["load_format"] = load_format
            with LLM(model=model, **settings) as llm:
                outputs = llm.encode(requests, pooling_task="embed", use_tqdm=False)
                vectors.append([output.outputs.data for output in outputs])
        for ours, theirs in zip(*vectors, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)
