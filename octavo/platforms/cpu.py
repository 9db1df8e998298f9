"""CPU platform: native kernels, memory computed before loading, steps captured as plans."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any, cast

from octavo.config import cache_folder
from octavo.errors import ConfigError
from octavo.layers.step_table import StepLayout, input_batch_nbytes
from octavo.models.forms import without_forms
from octavo.plan.draft_sizes import suffix_nbytes
from octavo.plan.memory import MemoryBudget, MemoryItem, Scratch
from octavo.plan.setup import WorkerSetup
from octavo.sampling.sizes import state_nbytes, workspace_nbytes
from octavo.system.device import (
    bind_to_numa_node,
    check_isa,
    check_num_threads,
    cpu_memory,
    cpu_model,
    num_cpus,
    numa_cpus,
    set_num_threads,
)
from octavo.system.distributed import Rank
from octavo.system.dtypes import DTYPE_NBYTES
from octavo.worker.platform import Platform, require_package

if TYPE_CHECKING:
    from octavo.attention.base import AttentionBackend
    from octavo.config import DeviceConfig
    from octavo.kernels.base import Ops
    from octavo.system.tensor import Tensor
    from octavo.worker.graphs import EagerSteps, StepRunner
    from octavo.worker.input_batch import InputBatch

# Maximum default size of the KV cache: the machine has other users than the engine.
DEFAULT_KV_NBYTES = 4 * 2**30
# A `LoraWeight` and its tensors, without their numbers.
_ADAPTER_OBJECT = 1280
# Interpreter and libraries (62 MiB after import), messages.
RUNTIME_NBYTES = 72 * 2**20
# The same without the front end's libraries (48 MiB after import).
WORKER_RUNTIME_NBYTES = 64 * 2**20


class CPUPlatform(Platform):
    """Platform of processors. With attention_backend=triton Triton's kernels run interpreted."""

    name = "cpu"
    # Small, since streams wait while other prompts are computed. The speed is the same: matrix
    # products with some hundred rows are as efficient.
    server_batched_tokens = 512
    records_kernels = True
    shared = True

    def is_available(self) -> bool:
        """Return True."""
        return True

    def check_available(self) -> None:
        """Implement `Platform`."""

    def check_settings(self, config: DeviceConfig) -> None:
        """Check the instruction set, the number of threads, and the NUMA node."""
        check_isa()
        check_num_threads(config.num_threads)
        if config.numa_node is not None:
            numa_cpus(config.numa_node)

    def is_native(self, config: DeviceConfig) -> bool:
        """Return False for Triton; all other attention backends use Octavo's own kernels."""
        return config.attention_backend != "triton"

    def estimate_memory(self, setup: WorkerSetup) -> MemoryBudget | None:
        """Return the exact memory of all parts, computed without loading."""
        from octavo.worker.scratch import measure_scratch

        backend = self.make_attention_backend(setup, self.name)
        if setup.config.device.attention_backend == "triton":
            from octavo.kernels.torch_tensors import ForHost

            backend = cast("AttentionBackend", ForHost(backend))
        draft = setup.draft
        scratches = tuple(
            Scratch.most(
                [measure_scratch(rank, backend, rank.expert_slots) for rank in stage.peers]
            )
            for stage in setup.stages
        )
        draft_scratch = None
        if draft is not None:  # heads without layers are not recorded
            layers = bool(draft.spec.layers)
            draft_scratch = measure_scratch(draft, backend) if layers else Scratch(0, 0, 0)
        return memory_budget(setup, scratches, draft_scratch)

    def open_device(self, setup: WorkerSetup) -> str:
        """Implement `Platform`."""
        config = setup.config.device
        # Before the pool starts and weights are read: both inherit the binding from this thread.
        if config.numa_node is not None:
            bind_to_numa_node(config.numa_node)
        threads = config.num_threads
        if threads is None and setup.rank.world_size > 1:
            cores = num_cpus() if config.numa_node is None else len(numa_cpus(config.numa_node))
            threads = max(1, cores // setup.rank.world_size)
        self.open_threads(threads)
        if not self.is_native(config) or config.attention_backend == "reference":
            import torch

            torch.set_num_threads(1)  # no second pool competes for the cores
        return "cpu"

    @staticmethod
    def open_threads(threads: int | None) -> None:
        """Set the number of kernel threads of this process, and tune the kernels for them."""
        from octavo.kernels.tuning import tune

        set_num_threads(threads)
        cache = cache_folder()
        tune(None if cache is None else cache / "tuning", cpu_model())

    def make_ops(self, config: DeviceConfig, device: Any) -> Ops:
        """Return the native operations, or Triton's with attention_backend=triton."""
        if config.attention_backend == "triton":
            _require_interpreter()
            from octavo.kernels.triton.ops import TritonOps

            return cast("Ops", TritonOps(batch_invariant=config.batch_invariant, upcast=True))
        from octavo.kernels.native import NativeOps

        return NativeOps()

    def make_attention_backend(self, setup: WorkerSetup, device: Any) -> AttentionBackend:
        """Return the attention backend of the settings; auto selects the native one."""
        config = setup.config.device
        match config.attention_backend:
            case "auto" | "cpu":
                from octavo.attention.cpu import CPUAttention

                return CPUAttention()
            case "triton":
                _require_interpreter()
                import torch

                from octavo.attention.triton import TritonAttention

                attention = TritonAttention(
                    torch.device("cpu"),
                    setup.longest_sequence,
                    batch_invariant=config.batch_invariant,
                )
                return cast("AttentionBackend", attention)
            case "reference":
                require_package("attention_backend=reference", "torch", "'octavo[torch]'")
                from octavo.attention.reference import ReferenceAttention
                from octavo.kernels.torch_tensors import ForHost

                return cast("AttentionBackend", ForHost(ReferenceAttention()))
        raise ConfigError(
            f"attention_backend={config.attention_backend} does not work on device={self.name}; "
            "use auto, cpu or reference."
        )

    def allocate_cache(self, num_blocks: int, block_nbytes: int, ops: Ops) -> Tensor:
        """Implement `Platform`; the system allocates pages when they are first written."""
        from octavo.kernels.memory import map_memory

        memory = map_memory(num_blocks * block_nbytes)
        return ops.to_device(memory.view(num_blocks, block_nbytes))

    def make_steps(
        self,
        setup: WorkerSetup,
        ops: Ops,
        eager: EagerSteps,
        batch: InputBatch,
        *,
        capture: bool,
    ) -> StepRunner:
        """Return a runner that captures steps as plans of native calls."""
        config = setup.config
        if config.device.attention_backend == "triton":
            from octavo.kernels.triton.ops import TritonOps
            from octavo.worker.device_steps import DeviceSteps

            assert isinstance(ops, TritonOps)
            return DeviceSteps(
                eager,
                ops,
                batch,
                largest=setup.largest_step,
                max_model_len=setup.max_model_len,
            )
        native = config.device.attention_backend in ("auto", "cpu")
        if not capture or config.model.enforce_eager or not native:
            return eager
        from octavo.kernels.memory import Arena
        from octavo.kernels.native import NativeOps
        from octavo.worker.graphs import CapturedSteps

        assert isinstance(ops, NativeOps)
        assert setup.scratch is not None
        return CapturedSteps(
            eager,
            ops,
            activations=Arena(setup.scratch.activations),
            logits=Arena(setup.scratch.logits),
            prompt_embeds=setup.has_embeds,
        )


def memory_budget(
    setup: WorkerSetup, scratches: tuple[Scratch, ...], draft_scratch: Scratch | None = None
) -> MemoryBudget:
    """Return the available and the required memory on a CPU, given each stage's scratch memory."""
    config, ranks = setup.config, setup.rank.size
    max_num_seqs, vocab_size = config.scheduler.max_num_seqs, setup.spec.vocab_size
    rows = input_batch_nbytes(
        setup.largest_step,
        setup.max_model_len,
        config.cache.block_size,
        len(setup.kv_cache_groups),
        setup.step_arrays,
        setup.max_encoder_len,
    )
    rows *= setup.rank.world_size
    rows += state_nbytes(max_num_seqs, vocab_size)
    speculative = config.speculation.speculative_config
    if speculative is not None and speculative.method == "suffix":
        rows += suffix_nbytes()
    draft = draft_loading = 0
    if setup.draft is not None:
        assert draft_scratch is not None
        draft = _draft_nbytes(setup, setup.draft, draft_scratch)
        draft_loading = setup.draft.spec.loading_nbytes(setup.dtype)
        # Both models share the kernels' scratch memory.
        (scratch,) = scratches
        kernels = max(scratch.kernels, draft_scratch.kernels)
        scratches = (dataclasses.replace(scratch, kernels=kernels),)
    sampling = workspace_nbytes(setup.largest_step.samples, vocab_size)
    logits = 0
    if ranks > 1:  # a copy for the rank that samples: the logits are in the shared memory
        logits += setup.largest_step.samples * vocab_size * DTYPE_NBYTES["float32"]
    weights = loading = activations = 0
    experts, note = _plan_experts(setup)
    for stage, scratch in zip(setup.stages, scratches, strict=True):  # the largest ranks
        spec = stage.part
        if experts:
            weights -= ranks * stage.expert_sizes.nbytes
        weights += ranks * spec.weight_nbytes(setup.dtype, setup.max_model_len)
        # Random weights are made whole, others are read in parts.
        made = config.load.load_format == "dummy"
        loads = setup.spec if made else spec
        loading += ranks * loads.loading_nbytes(setup.dtype, made=made)
        activations += ranks * (scratch.activations + scratch.kernels)
        if (layout := stage.balance_layout) is not None and config.device.eplb is not None:
            rows += ranks * layout.rank_nbytes(config.device.eplb)
        # Logits, and the same size again: for those of prompt tokens, of which fewer are in a step,
        # or for a copy before changes, if logprobs are requested.
        logits += ranks * 2 * scratch.logits
        if not stage.rank.is_first:
            activations += ranks * setup.group_layout.slot_nbytes  # the received hidden states
    if setup.rank.world_size > 1:
        activations += dataclasses.replace(setup, scratches=scratches).group_nbytes
    lora, adapter = config.lora, ranks * sum(scratch.adapter for scratch in scratches)
    norms, beside = ranks * sum(scratch.norms for scratch in scratches), _beside_adapters(setup)
    if setup.draft is not None and draft_scratch is not None:
        adapter += draft_scratch.adapter
        norms += draft_scratch.norms
        beside += _beside_adapters(setup.draft)
    encoders = ranks * sum(scratch.encoder_arena + scratch.encoders for scratch in scratches)
    exchanged = sum(scratch.exchanged for scratch in scratches)
    activations += exchanged // config.parallel.num_local_engines
    return MemoryBudget(
        source="what is free",
        available=cpu_memory(config.device.numa_node)[1],
        most_kv_cache=DEFAULT_KV_NBYTES,
        items=(
            MemoryItem(
                "runtime", RUNTIME_NBYTES + WORKER_RUNTIME_NBYTES * config.num_worker_processes
            ),
            MemoryItem("weights", weights),
            MemoryItem("experts", experts, note=note),
            MemoryItem(
                "adapters",
                lora.num_in_memory * adapter + beside + norms,
                note=f" for {lora.num_in_memory} of rank {lora.max_lora_rank}, and to read them",
            ),
            MemoryItem("activations", activations, "step"),
            MemoryItem("encoders", encoders, "step", ", to run them"),
            MemoryItem("logits", logits, "step"),
            MemoryItem("sampling", sampling, "sampling", ", freed after each step"),
            MemoryItem(
                "loading", max(loading, draft_loading), "loading", ", freed before the first step"
            ),
            MemoryItem("rows", rows),
            MemoryItem("draft model", draft, note=", plus a part of the KV cache"),
        ),
        scratches=scratches,
        draft_scratch=draft_scratch,
    )


def _beside_adapters(setup: WorkerSetup) -> int:
    """Return the bytes of objects of adapters, and those that reading needs.

    The front end and all ranks read an adapter each at the same time: a piece of its file, in which
    a number has at most 8 bytes, and a copy in the model's type and in the order of the layers.
    """
    lora = setup.config.lora
    if not lora.enable_lora:
        return 0
    from octavo.models.adaptable_model import targeted_layers
    from octavo.models.adapters import PIECE_NBYTES
    from octavo.models.blocks.base import is_adaptable

    layers = targeted_layers(setup.spec, lora)
    weights = [
        it
        for it in without_forms(setup.spec).weights()
        if is_adaptable(it.name) and (layers is None or it.name.removesuffix("weight") in layers)
    ]
    largest = max(
        (sum(it.shape) * (1 if it.expert is None else it.expert.count) for it in weights), default=0
    )
    piece = max(PIECE_NBYTES, 8 * lora.max_lora_rank * largest)
    if lora.lora_modules_to_save:
        piece = max(piece, 8 * setup.spec.vocab_size * setup.spec.hidden_size)
    num_objects = lora.num_in_memory * sum(len(it.sources) for it in weights)
    processes = setup.rank.world_size
    return processes * num_objects * _ADAPTER_OBJECT + (processes + 1) * 2 * piece


def _plan_experts(setup: WorkerSetup) -> tuple[int, str]:
    """Return the bytes of an expert cache, and what to expect from it; 0 without one."""
    config, device = setup.config, setup.config.device
    if config.load.expert_cache is None:
        return 0, ""
    from octavo.models.expert_cache import describe_speed, find_file
    from octavo.models.open_model import open_model

    ranks = [
        dataclasses.replace(setup, rank=Rank.of(i, device)) for i in range(setup.rank.world_size)
    ]
    sizes = [rank.expert_sizes for rank in ranks]
    nbytes = sum(rank.expert_slots * size.largest for rank, size in zip(ranks, sizes, strict=True))
    total, slots = sum(size.count for size in sizes), sum(rank.expert_slots for rank in ranks)
    note = f" = {slots:,} of {total:,} experts"
    checkpoint = open_model(config, setup.model_path)
    file = find_file(config, setup.part, checkpoint, setup.dtype)
    if file is not None:
        others = sum(rank.part.weight_nbytes(setup.dtype) for rank in ranks)
        others -= sum(size.nbytes for size in sizes)
        per_token = sum(size.per_token for size in sizes)
        threads = device.num_threads or num_cpus()
        note += describe_speed(per_token, others, file, threads)
    return nbytes, note


def _draft_nbytes(setup: WorkerSetup, draft: WorkerSetup, scratch: Scratch) -> int:
    """Return the memory of the draft model except its KV cache, in bytes."""
    from octavo.models.heads import HeadsSpec, read_lm_head  # few engines have a draft model

    config, spec = setup.config, draft.spec
    speculative = config.speculation.speculative_config
    assert speculative is not None
    total = spec.weight_nbytes(draft.dtype, draft.max_model_len)
    total += scratch.activations + scratch.logits
    lm_head = read_lm_head(setup.spec, spec, setup.rank)
    if lm_head is not None:
        total += lm_head.weight_nbytes(draft.dtype)
    blocks = -(-setup.max_model_len // config.cache.block_size)
    total += StepLayout(draft.largest_step, blocks, 1, draft.adapter_arrays).nbytes
    if isinstance(spec, HeadsSpec):
        requests = config.scheduler.max_num_seqs
        total += spec.buffers_nbytes(draft.max_num_batched_tokens, requests, draft.dtype)
    if speculative.acceptance == "rejection":  # the distributions of the drafts
        total += 2 * setup.max_num_drafts * spec.vocab_size * DTYPE_NBYTES["float32"]
    return total


def _require_interpreter() -> None:
    """Raise ConfigError if Triton's kernels cannot run on this processor."""
    require_package("attention_backend=triton", "triton", "'octavo[cuda]'")
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            "attention_backend=triton needs a CUDA device. On a CPU use attention_backend=cpu; "
            "for tests TRITON_INTERPRET=1 runs the kernels in Triton's interpreter, very slowly."
        )
