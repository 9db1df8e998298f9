"""Trial of steps without weights: the kernels, and the bytes, of the model's own steps."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo import _native
from octavo.config import EngineConfig
from octavo.kernels.memory import map_memory
from octavo.kernels.native import NativeOps
from octavo.models.spec import ModelSpec
from octavo.plan.setup import WorkerSetup
from octavo.plan.step_cost import PARTS, Batch, StepCost
from octavo.platforms.cpu import CPUPlatform
from octavo.system.device import resident_memory
from octavo.worker import step_trial
from octavo.worker.scratch import measure_scratch
from octavo.worker.step_trial import StepTrial
from tests.models.cases import CASES
from tests.models.harness import Runner, load, save_config, spec_of


def make_trial(
    spec: ModelSpec, dtype: str = "float32", memory: int | None = None, **settings: Any
) -> StepTrial:
    setup = WorkerSetup(
        config=EngineConfig.from_kwargs(max_num_seqs=8, **settings),
        spec=spec,
        model_path=Path("nowhere"),
        dtype=dtype,
        max_model_len=128,
        max_num_batched_tokens=128,
    )
    backend = CPUPlatform().make_attention_backend(setup, "cpu")
    mapped = None if memory is None else map_memory(memory)
    return StepTrial(setup, measure_scratch(setup, backend), 128, 8, mapped)


def reads(cost: StepCost) -> dict[str, float]:
    """Return the bytes that each kernel reads, by its name."""
    found: dict[str, float] = {}
    for kernel in cost.kernels:
        found[kernel.name] = found.get(kernel.name, 0.0) + kernel.nbytes
    return found


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_trial, "_LEAST_ROUNDS", 1)
    monkeypatch.setattr(step_trial, "_MOST_ROUNDS", 1)


@pytest.mark.parametrize("case", CASES)
def test_kernels_and_reads_are_those_of_the_model(case: str, tmp_path: Path) -> None:
    architecture, config = CASES[case]
    spec = save_config(tmp_path, architecture, config)
    runner = Runner(load(tmp_path, load_format="dummy", ops=NativeOps()), 1, 128, "cpu")
    _native.take_spans()
    _native.set_profiling(True)
    try:
        runner.step({0: list(range(20))})
    finally:
        _native.set_profiling(False)
    expected: dict[str, float] = {}
    for name, _, _, nbytes, _, _ in _native.take_spans():
        read = nbytes if name.split()[0] in PARTS else 0.0
        expected[name] = expected.get(name, 0.0) + read
    found = reads(make_trial(spec).run(((0, 20),)))
    assert found.pop("sample") == 0
    assert found.keys() == expected.keys()
    linears = [spec.head.lm_head, *filter(None, [spec.head.project])]
    head = {f"linear {linear.outputs}x{linear.inputs}" for linear in linears}
    for name in found.keys() - {"experts"}:
        if name not in head:  # the runner's logits are of all tokens
            assert found[name] == pytest.approx(expected[name]), name


def test_steps_of_several_requests_read_weights_once(tmp_path: Path) -> None:
    trial = make_trial(save_config(tmp_path, *CASES["llama"]))
    one, two = (reads(trial.run(((40, 1),) * count)) for count in (1, 2))
    assert two["attention"] == 2 * one["attention"]
    products = [name for name in one if name.startswith("linear")]
    assert sum(two[name] for name in products) < 1.3 * sum(one[name] for name in products)


def test_experts_of_a_step_are_read_once(tmp_path: Path) -> None:
    case = next(name for name in CASES if CASES[name][0] == "Qwen3MoeForCausalLM")
    spec = save_config(tmp_path, *CASES[case])
    nbytes = sum(w.nbytes("float32") for w in spec.weights() if w.expert is not None)
    expert = next(w.expert for w in spec.weights() if w.expert is not None)
    trial = make_trial(spec)
    one, many = (reads(trial.run(((0, count),)))["experts"] for count in (1, 100))
    assert one == pytest.approx(nbytes * expert.active / expert.count)
    assert many == pytest.approx(nbytes, rel=1e-6)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_weights_are_read_in_their_form(quantization: str, tmp_path: Path) -> None:
    config = CASES["llama"][1] | {"hidden_size": 256, "intermediate_size": 512}
    save_config(tmp_path, "LlamaForCausalLM", config)
    plain, quantized = (
        reads(make_trial(spec_of(tmp_path, quantization=form), "bfloat16").run(((9, 1),)))
        for form in (None, quantization)
    )
    ratio = quantized["linear_q 1024x256"] / plain["linear 1024x256"]
    assert ratio == pytest.approx({"int8": 1 / 2, "int4": 4.5 / 16}[quantization], rel=0.05)


def test_a_quantized_cache_is_read_in_its_form(tmp_path: Path) -> None:
    spec = save_config(tmp_path, *CASES["llama"])
    batch: Batch = ((127, 1),)
    plain = reads(make_trial(spec).run(batch))["attention"]
    quantized = reads(make_trial(spec, kv_cache_dtype="fp8").run(batch))["attention"]
    assert quantized == pytest.approx(plain / 4, rel=0.1)


def test_long_steps_are_tried_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = make_trial(save_config(tmp_path, *CASES["llama"]))
    sizes: list[Batch] = []
    fill = trial._fill

    def record(batch: Batch) -> None:
        sizes.append(batch)
        fill(batch)

    monkeypatch.setattr(trial, "_fill", record)
    trial._most_seconds = 0.0
    cost = trial.run(((28, 100),))
    assert ((28 + 34, 32),) in sizes  # the middle
    assert min(kernel.seconds for kernel in cost.kernels) > 0
    sizes.clear()
    trial.run(((0, 25),) * 4)
    assert ((0, 25),) in sizes  # one of the prompts


def test_weights_take_no_memory(tmp_path: Path) -> None:
    config = CASES["llama"][1] | {"hidden_size": 2048, "intermediate_size": 16384}
    spec = save_config(tmp_path, "LlamaForCausalLM", config)
    assert spec.weight_nbytes("bfloat16") > 200 * 2**20
    before = resident_memory()
    trial = make_trial(spec, "bfloat16")
    trial.run(((3, 1),))
    after = resident_memory()
    assert before is not None
    assert after is not None
    assert after < before + 32 * 2**20


def test_only_one_layer_of_a_kind_runs(tmp_path: Path) -> None:
    spec = save_config(tmp_path, *CASES["llama"])
    more = replace(spec, layers=spec.layers * 3)
    few, many = (reads(make_trial(one).run(((9, 1),))) for one in (spec, more))
    assert many["attention"] == 3 * few["attention"]


@pytest.mark.parametrize("case", CASES)
def test_layers_in_memory_are_those_of_the_model(case: str, tmp_path: Path) -> None:
    spec = save_config(tmp_path, *CASES[case])
    batch: Batch = ((100, 1), (30, 1), (1, 1))
    computing = reads(make_trial(spec).run(batch))
    trial = make_trial(spec, memory=2**26)
    assert list(trial._kinds.run) == list(range(len(spec.layers)))
    assert set(trial._kinds.run.values()) == {1.0}
    found = reads(trial.run(batch))
    assert found.keys() == computing.keys()
    for name in found.keys() - {"experts"}:
        assert found[name] == pytest.approx(computing[name]), name


def test_layers_share_memory_in_turns(tmp_path: Path) -> None:
    spec = save_config(tmp_path, *CASES["llama"])
    many = replace(spec, layers=spec.layers * 8)
    layer = sum(w.nbytes("float32") for w in spec.weights() if w.name.startswith("layers.0."))
    largest = max(w.nbytes("float32") for w in spec.weights())
    room = 4 * max(2 * layer, largest) // 3 + 64  # a quarter is for caches
    trial = make_trial(many, memory=room)
    assert 2 <= len(trial._kinds.run) < len(many.layers)
    assert sum(trial._kinds.run.values()) == pytest.approx(len(many.layers))
    everything = make_trial(many, memory=2**26)
    batch: Batch = ((100, 1),)
    assert reads(trial.run(batch)) == pytest.approx(reads(everything.run(batch)))


def test_weights_that_exceed_the_memory_are_left_out(tmp_path: Path) -> None:
    config = CASES["llama"][1] | {"vocab_size": 4096, "tie_word_embeddings": False}
    spec = save_config(tmp_path, "LlamaForCausalLM", config)
    head = spec.head.lm_head
    name = f"linear {head.outputs}x{head.inputs}"
    room = 4 * (4 * head.outputs * head.inputs - 1) // 3
    found = reads(make_trial(spec, memory=room).run(((5, 1),)))
    assert name not in found
    assert reads(make_trial(spec).run(((5, 1),))).keys() == {*found, name}


def test_requests_in_memory_have_their_own_blocks(tmp_path: Path) -> None:
    spec = save_config(tmp_path, *CASES["llama"])
    for memory, blocks in ((None, 1), (2**26, 3)):
        trial = make_trial(spec, memory=memory)
        trial._fill(((100, 1),) * 3)
        table = trial._buffers.table
        assert len({*table.block_tables[0, :3, 0].tolist()}) == blocks
        slots = table.slot_mappings[0, :3].tolist()
        expected = table.block_tables[0, :3, 100 // 16] * 16 + 100 % 16
        assert slots == expected.tolist()
