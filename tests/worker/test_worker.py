"""Memory of a worker on a GPU, with stand-ins for torch's answers."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo.checkpoints.registry import open_checkpoint
from octavo.config import EngineConfig
from octavo.errors import ConfigError, EngineDeadError
from octavo.messages import (
    CoreSamplingParams,
    NewRequestData,
    ScheduledRequest,
    SchedulerOutput,
)
from octavo.models.registry import read_spec
from octavo.plan.memory_plan import make_memory_plan
from octavo.plan.setup import WorkerSetup
from octavo.platforms import cpu, cuda
from octavo.platforms.cpu import CPUPlatform
from octavo.platforms.cuda import CUDAPlatform
from octavo.system import device
from octavo.worker import worker as under_test
from octavo.worker.worker import Worker
from tests.models.cases import CASES
from tests.models.harness import make_hf
from tests.triton import needs_triton

pytestmark = needs_triton
MIB = 2**20


class Card(CPUPlatform):
    """Processor that reports memory as torch does for a GPU."""

    measure_memory = CUDAPlatform.measure_memory
    computing = CUDAPlatform.computing
    cause = CUDAPlatform.cause


def make_setup(folder: Path, **settings: object) -> WorkerSetup:
    architecture, config = CASES["llama"]
    make_hf(architecture, **config).save_pretrained(folder)
    return WorkerSetup(
        config=EngineConfig.from_kwargs(
            model=str(folder),
            block_size=8,
            **{"max_num_seqs": 3, "attention_backend": "triton"} | settings,
        ),
        spec=read_spec(open_checkpoint(folder)),
        model_path=folder,
        dtype="float32",
        max_model_len=64,
        max_num_batched_tokens=20,
    )


def make_worker(folder: Path, **settings: object) -> tuple[Worker, WorkerSetup]:
    setup = make_setup(folder, **settings)
    return Worker(setup, Card()), setup


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a card of 1000 MiB with 20 MiB of weights and a step with a peak of 50 MiB."""
    for name, value in {
        "memory_allocated": 20 * MIB,
        "max_memory_allocated": 70 * MIB,
        "memory_reserved": 30 * MIB,
        "mem_get_info": (900 * MIB, 1000 * MIB),
        "is_available": True,
        "current_device": 0,
        "get_device_capability": (9, 0),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    for name in ("reset_peak_memory_stats", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a card")
    monkeypatch.setattr(device, "num_cuda_devices", lambda: 1)


def run_step(worker: Worker) -> list[list[int]]:
    data = NewRequestData([5, 6, 7], 3, CoreSamplingParams(temperature=0.0), 0)
    worker.execute_model(SchedulerOutput([ScheduledRequest("a", 3, [[1]], new=data)], 3), list)
    return worker.sample_tokens().get().sampled_token_ids


def test_measured_then_planned_then_run(gpu: None, tmp_path: Path) -> None:
    worker, setup = make_worker(tmp_path)
    memory = worker.measure_memory()
    # 3 requests of 6 tokens each fit the 20 tokens of a step: one block, and the one kept free.
    kv_nbytes = 2 * len(setup.spec.layers) * 2 * 8 * setup.spec.caches[0].num_kv_heads
    kv_nbytes *= setup.spec.caches[0].head_size * 4
    assert memory.nbytes("weights") == 20 * MIB
    step = 50 * MIB - kv_nbytes
    graphs = 3 * cuda._GRAPH_NBYTES + 4 * 3 * setup.spec.vocab_size
    assert memory.nbytes("activations") == step + math.ceil(step * 3 / 20) + graphs
    assert memory.nbytes("runtime") == (100 - 30) * MIB
    plan, kv_cache = make_memory_plan(setup.config, setup.spec, memory, max_num_batched_tokens=20)
    assert plan.total <= plan.limit
    worker.initialize_kv_cache(kv_cache)
    [[token]] = run_step(worker)
    other, _ = make_worker(tmp_path)
    other.initialize_kv_cache(kv_cache)
    assert run_step(other) == [[token]], "measuring leaves nothing behind"


def test_what_the_largest_step_took_is_given_back_before_memory_is_looked_at(
    gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    names = ("reset_peak_memory_stats", "max_memory_allocated", "synchronize", "empty_cache")
    for name in (*names, "mem_get_info"):
        known = getattr(torch.cuda, name)

        def noted(*args: object, name: str = name, known: Any = known) -> object:
            calls.append(name)
            return known(*args)

        monkeypatch.setattr(torch.cuda, name, noted)
    worker, _ = make_worker(tmp_path)
    monkeypatch.setattr(worker.runner, "run_largest_step", lambda: calls.append("run") or 0)
    worker.measure_memory()
    assert calls == [names[0], "run", *names[1:], "mem_get_info"]


@pytest.mark.parametrize(
    ("settings", "blocks"),
    [
        ({"max_num_seqs": 3}, 1),  # of 20 tokens 6 each
        ({"max_num_seqs": 1}, 3),
        ({"max_num_seqs": 2}, 2),
        ({"max_num_seqs": 30}, 1),  # no more requests than tokens
    ],
)
def test_the_largest_step(
    gpu: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, int],
    blocks: int,
) -> None:
    worker, setup = make_worker(tmp_path, **settings)
    steps: list[SchedulerOutput] = []
    monkeypatch.setattr(worker.runner, "execute_model", steps.append)  # it runs: see above
    monkeypatch.setattr(worker.runner, "sample_tokens", lambda: SimpleNamespace(get=list))
    nbytes = worker.runner.run_largest_step()
    spec = setup.spec
    of_block = 2 * len(spec.layers) * 8 * spec.caches[0].num_kv_heads * spec.caches[0].head_size * 4
    assert nbytes == (blocks + 1) * of_block  # including the free one
    [work] = steps
    num_reqs = min(settings["max_num_seqs"], 20)
    assert len(work.scheduled_reqs) == num_reqs
    assert work.total_num_scheduled_tokens == 20 // num_reqs * num_reqs
    for request in work.scheduled_reqs:
        assert request.num_tokens == 20 // num_reqs
        assert request.new_block_ids == [list(range(1, blocks + 1))]
        assert request.new is not None
        assert len(request.new.token_ids) == request.new.num_prompt_tokens == 20 // num_reqs
        assert request.new.num_computed_tokens == 0
        assert request.new.sampling_params.logprobs is not None
        assert request.new.sampling_params.logit_bias is not None


@pytest.mark.parametrize("settings", [{"enforce_eager": True}, {"attention_backend": "reference"}])
def test_nothing_is_planned_for_captured_steps_that_there_are_not(
    gpu: None, tmp_path: Path, settings: dict[str, object]
) -> None:
    setup = make_setup(tmp_path, **settings)
    memory = CUDAPlatform().measure_memory(setup, torch.device("cuda"), lambda: 7, 0, 0)
    assert memory.nbytes("activations") == 50 * MIB - 7


def test_what_the_process_had_on_the_card_before_is_not_the_model_s(
    gpu: None, tmp_path: Path
) -> None:
    worker, _ = make_worker(tmp_path)
    worker._allocated_before = 5 * MIB
    memory = worker.measure_memory()
    assert memory.nbytes("weights") == 15 * MIB
    assert memory.nbytes("runtime") == (100 - 30 + 5) * MIB


def test_adapters_are_planned(gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their slots are allocated with the model, and steps with them are captured, too."""
    allocated: list[tuple[int, int]] = []
    allocate = CPUPlatform.allocate_cache

    def noted(platform: CPUPlatform, count: int, nbytes: int, ops: Any) -> Any:
        allocated.append((count, nbytes))
        return allocate(platform, count, nbytes, ops)

    monkeypatch.setattr(CPUPlatform, "allocate_cache", noted)
    settings = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 5, "max_lora_rank": 8}
    worker, setup = make_worker(tmp_path, **settings)
    count, nbytes = allocated[-1]
    linear = [weight for weight in setup.spec.weights() if weight.kind == "linear"]
    assert count == 5
    assert nbytes > 4 * 8 * sum(sum(weight.shape) for weight in linear[:-1])
    memory = worker.measure_memory()
    assert memory.nbytes("adapters") == 5 * nbytes
    assert memory.nbytes("weights") == 20 * MIB - 5 * nbytes
    plain = make_worker(tmp_path)[0].measure_memory()
    more = memory.nbytes("activations") - plain.nbytes("activations")
    assert more == 3 * cuda._GRAPH_NBYTES


def test_memory_that_runs_out_names_what_to_lower(
    gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, _ = make_worker(tmp_path)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    for name in ("run_largest_step", "initialize_kv_cache"):
        monkeypatch.setattr(worker.runner, name, fail)
    with pytest.raises(ConfigError, match=r"running the largest step.*max_num_batched_tokens"):
        worker.measure_memory()
    with pytest.raises(ConfigError, match=r"KV cache.*Lower gpu_memory_utilization"):
        worker.initialize_kv_cache(None)  # type: ignore[arg-type]


def test_threads_and_node_are_set_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool's threads and the weights' memory inherit them."""
    calls: list[tuple[str, object]] = []

    class Runner:
        adapters = None

        def __init__(
            self, setup: WorkerSetup, platform: object, device: str, make_proposer: object
        ) -> None:
            calls.append(("load", device))

    for name in ("bind_to_numa_node", "set_num_threads"):
        monkeypatch.setattr(cpu, name, lambda value, name=name: calls.append((name, value)))
    monkeypatch.setattr(under_test, "ModelRunner", Runner)
    Worker(make_setup(tmp_path, num_threads=1, numa_node=0), CPUPlatform())
    assert calls == [("bind_to_numa_node", 0), ("set_num_threads", 1), ("load", "cpu")]
    calls.clear()
    Worker(make_setup(tmp_path), CPUPlatform())
    assert calls == [("set_num_threads", None), ("load", "cpu")]


def test_a_gpu_that_answers_no_more_ends_the_engine(
    gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, _ = make_worker(tmp_path)
    error = ValueError("broken")
    assert worker.cause(error) is error, "the card is well: only this step failed"

    def fail(*_: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    cause = worker.cause(error)
    assert isinstance(cause, EngineDeadError)
    assert "illegal memory access" in str(cause)
