"""CUDA platform: Triton's kernels, memory measured with the model loaded, steps as CUDA graphs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

from octavo.errors import ConfigError, EngineDeadError
from octavo.plan.memory import MemoryBudget, MemoryItem
from octavo.plan.setup import WorkerSetup
from octavo.system import device as machine
from octavo.worker.platform import Platform, require_package

if TYPE_CHECKING:
    import torch

    from octavo.attention.base import AttentionBackend
    from octavo.config import DeviceConfig
    from octavo.kernels.base import Ops
    from octavo.system.tensor import Tensor
    from octavo.worker.graphs import EagerSteps, StepRunner
    from octavo.worker.input_batch import InputBatch

_GRAPH_NBYTES = 4 * 2**20  # launches of a captured step


class CUDAPlatform(Platform):
    """Platform of NVIDIA GPUs."""

    name = "cuda"
    # Unlike on a CPU, matrix products are less efficient with fewer rows (vLLM's default).
    server_batched_tokens = 2048

    def is_available(self) -> bool:
        """Implement `Platform`."""
        return machine.num_cuda_devices() > 0

    def check_available(self) -> None:
        """Implement `Platform`."""
        if not self.is_available():
            raise ConfigError(
                "device=cuda: the NVIDIA driver shows no GPU to this process (nvidia-smi should "
                "list one, and CUDA_VISIBLE_DEVICES must not hide it). Use device=cpu, or auto."
            )

    def check_settings(self, config: DeviceConfig) -> None:
        """Reject settings that are only for CPUs."""
        for name in ("num_threads", "numa_node"):
            value = getattr(config, name)
            if value is not None:
                raise ConfigError(
                    f"{name}={value} is for device=cpu, and this is device=cuda; leave it out, or "
                    "set device=cpu."
                )

    def open_device(self, setup: WorkerSetup) -> torch.device:
        """Implement `Platform`.

        Raises:
            ConfigError: torch was built without CUDA, the GPU is too old for the kernels or the
                dtype, or the model cannot fit.
        """
        self.check_available()
        require_package("device=cuda", "torch", "'octavo[cuda]'")
        device = _select_device(setup.dtype)
        sys.setswitchinterval(machine.SWITCH_INTERVAL)
        _check_weights(setup, device)
        return device

    def make_ops(self, config: DeviceConfig, device: Any) -> Ops:
        """Return Triton's operations."""
        require_package("device=cuda", "torch", "'octavo[cuda]'")
        require_package("device=cuda", "triton", "'octavo[cuda]'")
        from octavo.kernels.triton.ops import TritonOps

        return cast("Ops", TritonOps(device, batch_invariant=config.batch_invariant))

    def make_attention_backend(self, setup: WorkerSetup, device: torch.device) -> AttentionBackend:
        """Return the attention backend of the settings; auto selects Triton's."""
        config = setup.config.device
        match config.attention_backend:
            case "auto" | "triton":
                require_package("attention_backend=triton", "triton", "'octavo[cuda]'")
                from octavo.attention.triton import TritonAttention

                attention = TritonAttention(
                    device, setup.longest_sequence, batch_invariant=config.batch_invariant
                )
                return cast("AttentionBackend", attention)
            case "flashinfer":
                spec = setup.spec
                other = spec.uses_alibi or spec.sees_all or spec.uses_sinks_or_chunks
                if other or spec.encoders or setup.dtype == "float32":
                    raise ConfigError(
                        "attention_backend=flashinfer supports neither ALiBi biases, nor encoders, "
                        "nor attention sinks, nor chunks, nor values smaller than keys, nor "
                        "float32; use attention_backend=triton."
                    )
                require_package("attention_backend=flashinfer", "flashinfer", "flashinfer-python")
                from octavo.attention.flashinfer import FlashInferAttention

                return cast("AttentionBackend", FlashInferAttention(device))
            case "reference":
                from octavo.attention.reference import ReferenceAttention

                return cast("AttentionBackend", ReferenceAttention())
        raise ConfigError(
            f"attention_backend={config.attention_backend} does not work on device={self.name}; "
            "use auto, triton, flashinfer or reference."
        )

    def allocate_cache(self, num_blocks: int, block_nbytes: int, ops: Ops) -> Tensor:
        """Implement `Platform`."""
        import torch

        from octavo.kernels.triton.ops import TritonOps

        assert isinstance(ops, TritonOps)
        return torch.zeros(num_blocks, block_nbytes, dtype=torch.uint8, device=ops.device)

    def make_steps(
        self,
        setup: WorkerSetup,
        ops: Ops,
        eager: EagerSteps,
        batch: InputBatch,
        *,
        capture: bool,
    ) -> StepRunner:
        """Return a runner that captures decode steps as CUDA graphs."""
        from octavo.kernels.triton.ops import TritonOps
        from octavo.worker.device_steps import DeviceSteps

        assert isinstance(ops, TritonOps)
        steps = DeviceSteps(
            eager,
            ops,
            batch,
            largest=setup.largest_step,
            max_model_len=setup.longest_sequence,
        )
        if capture and (sizes := _captured_sizes(setup)):
            steps.capture(sizes)
        return steps

    @contextlib.contextmanager
    def computing(self, what: str) -> Iterator[None]:
        """Implement `Platform`."""
        import torch

        try:
            with torch.inference_mode():
                yield
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"The GPU's memory ran out while {what}: {error}. Lower gpu_memory_utilization "
                "(other processes need their share), max_num_batched_tokens or max_num_seqs, or "
                "use a smaller model."
            ) from error

    @contextlib.contextmanager
    def beside_steps(self, device: torch.device) -> Iterator[None]:
        """Implement `Platform` by a stream of its own."""
        import torch

        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.inference_mode(), torch.cuda.stream(stream):
                yield
        finally:
            stream.synchronize()

    def allocated_nbytes(self, device: torch.device) -> int:
        """Implement `Platform`."""
        import torch

        return torch.cuda.memory_allocated(device)

    def measure_memory(
        self,
        setup: WorkerSetup,
        device: torch.device,
        run_largest_step: Callable[[], int],
        allocated_before: int,
        adapter_nbytes: int,
    ) -> MemoryBudget:
        """Measure the memory by a step of the largest size."""
        import torch

        loaded = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        kv_nbytes = run_largest_step()
        step = torch.cuda.max_memory_allocated(device) - loaded - kv_nbytes
        if sizes := _captured_sizes(setup):
            # The captured steps hold the activations of the largest one, in addition to those of
            # other steps. A step's activations grow with its tokens; the measured step has the
            # most.
            rows = setup.config.scheduler.max_num_seqs
            step += -(-step * rows // setup.max_num_batched_tokens)
            graphs = len(sizes) * (2 if adapter_nbytes else 1)
            step += graphs * _GRAPH_NBYTES + 4 * rows * setup.spec.vocab_size
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        lora = setup.config.lora
        total, free = machine.cuda_memory(device)
        foreign = total - free - torch.cuda.memory_reserved(device) + allocated_before
        return MemoryBudget(
            source="the GPU",
            available=total,
            most_kv_cache=total,
            items=(
                MemoryItem("runtime", foreign),
                MemoryItem("weights", loaded - allocated_before - adapter_nbytes),
                MemoryItem(
                    "adapters",
                    adapter_nbytes,
                    note=f" for {lora.num_in_memory} of rank {lora.max_lora_rank}",
                ),
                MemoryItem("activations", step, "step"),
            ),
        )

    def cause(self, device: torch.device, error: BaseException) -> BaseException:
        """Implement `Platform`."""
        import torch

        try:
            torch.cuda.synchronize(device)
        except Exception as lost:
            return EngineDeadError(f"The GPU failed, and the engine with it: {lost}")
        return error


def _captured_sizes(setup: WorkerSetup) -> list[int]:
    """Return the numbers of decode rows to capture; only Triton's steps can be captured."""
    from octavo.worker.graphs import graph_sizes

    captured = setup.config.device.attention_backend in ("auto", "triton")
    if setup.config.model.enforce_eager or not captured or not setup.spec.generates:
        return []
    return graph_sizes(setup.config.scheduler.max_num_seqs)


def _select_device(dtype: str) -> torch.device:
    """Return the current GPU, for a model in `dtype`."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            f"device=cuda: torch {torch.__version__} cannot use the GPU; it was built without "
            "CUDA, or for a newer driver. Install a build for CUDA, or use device=cpu."
        )
    device = torch.device("cuda", torch.cuda.current_device())
    major, minor = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    if (major, minor) < (7, 0):
        raise ConfigError(
            f"device=cuda: {name} has compute capability {major}.{minor}, and the kernels need "
            "7.0. Use device=cpu."
        )
    if dtype == "bfloat16" and major < 8:
        raise ConfigError(
            f"dtype=bfloat16: {name} has compute capability {major}.{minor}, and bfloat16 needs "
            "8.0. Use dtype=float16."
        )
    return device


def _check_weights(setup: WorkerSetup, device: torch.device) -> None:
    """Reject a model that cannot fit, before loading it."""
    config = setup.config
    weights = setup.spec.weight_nbytes(setup.dtype, setup.max_model_len)
    total, free = machine.cuda_memory(device)
    if weights > min(free, total * config.cache.gpu_memory_utilization):
        raise ConfigError(
            f"{config.model.model} needs {weights / 2**20:,.0f} MiB in {setup.dtype}, but "
            f"{machine.cuda_name(device)} has {free / 2**20:,.0f} MiB free of "
            f"{total / 2**20:,.0f} MiB. Use a smaller model or dtype, or device=cpu."
        )
