"""Planned memory of steps, equal to the used memory in all ways to run them."""

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from octavo import _native
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.kernels import native
from octavo.kernels.memory import Arena
from octavo.kernels.native import NativeOps
from octavo.models.cache import AttentionCache
from octavo.models.spec import ModelSpec
from octavo.plan.memory import Scratch
from octavo.plan.setup import FORCED_DRAFTS, WorkerSetup
from octavo.platforms.cpu import CPUPlatform
from octavo.system.device import resident_memory
from octavo.system.distributed import Rank
from octavo.system.tensor import HostTensor, from_numpy
from octavo.worker.scratch import measure_scratch
from tests.models.cases import CASES
from tests.models.harness import Runner, load, save_config, spec_of


class PeakMemory(TorchDispatchMode):
    """Peak of the bytes of tensors that are made while it is active and alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.users: dict[int, int] = {}
        self.sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (list, tuple)) else [out]:
            if not isinstance(tensor, torch.Tensor):
                continue
            address = tensor.untyped_storage().data_ptr()
            if address not in self.users:
                if tensor._base is not None or func._schema.name.startswith("aten::view"):
                    continue  # part of an older tensor
                self.users[address] = 0
                self.sizes[address] = tensor.untyped_storage().nbytes()
            self.users[address] += 1
            weakref.finalize(tensor, self.release, address)
        self.peak = max(self.peak, sum(self.sizes.values()))
        return out

    def release(self, address: int) -> None:
        self.users[address] -= 1
        if not self.users[address]:
            del self.users[address], self.sizes[address]


def measure(spec: ModelSpec, dtype: str, tokens: int, requests: int, **settings: Any) -> Scratch:
    setup = WorkerSetup(
        config=EngineConfig.from_kwargs(max_num_seqs=requests, **settings),
        spec=spec,
        model_path=Path("nowhere"),
        dtype=dtype,
        max_model_len=128,
        max_num_batched_tokens=tokens,
    )
    return measure_scratch(setup, CPUPlatform().make_attention_backend(setup, "cpu"))


# Attention of every kind, once by the plain torch backend.
BY_REFERENCE = ("llama", "llama-mqa-tied-bias", "gemma2", "gemma3n", "gemma4", "bloom", "mpt")
BY_REFERENCE += ("qwen3.5", "lfm2-convolutions", "falcon-h1")


@pytest.mark.parametrize(
    ("case", "backend"),
    [*((case, "cpu") for case in CASES), *((case, "reference") for case in BY_REFERENCE)],
)
def test_layer_by_layer_a_step_takes_no_more(case: str, backend: str, tmp_path: Path) -> None:
    architecture, config = CASES[case]
    tables = config.keys() & {"vocab_size_per_layer_input"} | {"vocab_size"}
    sizes = dict.fromkeys(tables, 3000)
    spec = save_config(tmp_path, architecture, config | sizes)
    ops = NativeOps()
    runner = Runner(load(tmp_path, load_format="dummy", ops=ops), 1, 128, backend)
    head, tokens = runner.model.head, list(range(100))
    scratch = measure(spec, "float32", 100, 100, attention_backend=backend)
    inputs = 8192  # the harness's own small tensors
    hidden: list[HostTensor] = []
    runner.model.head = lambda x: hidden.append(x) or x  # type: ignore[method-assign, func-returns-value]
    ops._recording.arena = forward = Arena(scratch.activations)
    with PeakMemory() as attention:
        runner.step({0: tokens})
    assert scratch.activations / 3 < forward.peak <= scratch.activations
    has_attention = any(isinstance(cache, AttentionCache) for cache in spec.caches)
    if backend == "reference" and has_attention:  # its intermediate results are torch's
        assert scratch.kernels / 3 < attention.peak < scratch.kernels + inputs
    ops._recording.arena = logits = Arena(scratch.logits)
    head(hidden[0], from_numpy(np.arange(100)))
    assert 0.9 * scratch.logits < logits.peak <= scratch.logits


def test_logits_are_planned_with_the_rows_that_they_are_made_from(tmp_path: Path) -> None:
    sizes = {"hidden_size": 768, "intermediate_size": 40, "vocab_size": 333}
    spec = save_config(tmp_path, "LlamaForCausalLM", CASES["llama"][1] | sizes)
    assert measure(spec, "float32", 3, 3).logits == 3 * 768 * 4 + 64 * -(-3 * 333 * 4 // 64)


def test_it_takes_no_memory_and_grows_with_the_step(tmp_path: Path) -> None:
    spec = save_config(tmp_path, *CASES["gemma2"])
    small = measure(spec, "bfloat16", 64, 64)
    before = resident_memory()
    large = measure(spec, "bfloat16", 64 * 2**20, 4096)
    assert resident_memory() < before + 8 * 2**20
    assert large.activations == 2**20 * small.activations
    rows = 4096 + FORCED_DRAFTS
    assert large.logits == rows * small.logits / 64
    assert measure(spec, "float32", 64, 64).activations == 2 * small.activations


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_quantized_weights_change_nothing(quantization: str | None, tmp_path: Path) -> None:
    spec = save_config(tmp_path, *CASES["llama-mqa-tied-bias"])
    quantized = spec_of(tmp_path, quantization=quantization)
    assert measure(quantized, "float32", 9, 3) == measure(spec, "float32", 9, 3)


def test_heads_that_attention_cannot_do_are_refused_before_loading(tmp_path: Path) -> None:
    config = CASES["llama"][1] | {"head_dim": 600}
    spec = save_config(tmp_path, "LlamaForCausalLM", config)
    with pytest.raises(ConfigError, match="head_size=600"):
        measure(spec, "float32", 8, 2)
    assert measure(spec, "float32", 8, 2, attention_backend="reference").activations > 0


def test_the_kernels_own_memory_grows_with_threads_and_context(tmp_path: Path) -> None:
    spec = save_config(tmp_path, *CASES["llama"])

    def kernels(threads: int) -> int:
        """Return the memory without that of products: none if they are not made on tiles."""
        products = _native.linear_scratch(8, CASES["llama"][1]["intermediate_size"], threads)
        assert (products > 0) == native.isa().startswith("amx")
        return measure(spec, "float32", 8, 2, num_threads=threads).kernels - products

    assert kernels(2) == 2 * kernels(1)
    assert kernels(1) >= 14 * spec.vocab_size


def test_a_rank_with_smaller_buffers_may_leave_larger_gaps(tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    sizes |= {"hidden_size": 576, "intermediate_size": 720}
    spec = save_config(tmp_path, "LlamaForCausalLM", CASES["llama"][1] | sizes)
    config = EngineConfig.from_kwargs(tensor_parallel_size=2, tensor_parallel_mode="reduce")
    setup = WorkerSetup(config, spec, tmp_path, "float32", 512, 512, rank=Rank.of(0, config.device))
    platform = CPUPlatform()
    backend = platform.make_attention_backend(setup, "cpu")
    first, second = (measure_scratch(rank, backend) for rank in setup.peers)
    assert first.activations < second.activations
    budget = platform.estimate_memory(setup)
    assert budget is not None
    assert budget.scratches == (Scratch.most([first, second]),)
