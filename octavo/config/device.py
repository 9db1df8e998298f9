"""Settings of the device, and of the workers that share a model."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from octavo.config.section import PositiveInt, Section


class DeviceConfig(Section, frozen=True):
    """Where and how the model computes."""

    device: Annotated[
        str,
        Meta(description="cpu, cuda, or a plug-in's device; auto: a GPU if there is one."),
    ] = "auto"
    attention_backend: Annotated[
        Literal["auto", "cpu", "triton", "flashinfer", "reference"],
        Meta(
            description="Attention kernels; auto: cpu on a CPU, triton on CUDA; flashinfer needs"
            " that package; reference: plain torch, slow."
        ),
    ] = "auto"
    batch_invariant: Annotated[
        bool,
        Meta(
            description="CUDA: a request gets the same result, bit for bit, whatever else is in "
            "its batch; this costs some speed. On a CPU it is always so."
        ),
    ] = False
    tensor_parallel_size: Annotated[
        int,
        Meta(
            description="Processes that compute the model together, each with a part of its"
            " weights and heads; on one machine's CPU.",
            ge=1,
        ),
    ] = 1
    tensor_parallel_mode: Annotated[
        Literal["exact", "reduce"],
        Meta(
            description="exact: every number is summed by one process, and the answers are those of"
            " one process, bit for bit; reduce: the results of output projections are summed over"
            " the processes in their order, which meet half as often."
        ),
    ] = "exact"
    enable_sequence_parallel: Annotated[
        bool,
        Meta(
            description="Has each of tensor_parallel_size processes compute the norms of a part of"
            " a step's tokens only; they meet once more for each."
        ),
    ] = False
    pipeline_parallel_size: Annotated[
        int,
        Meta(
            description="Stages into which the layers are divided; each is computed by"
            " tensor_parallel_size processes, while the others compute other steps.",
            ge=1,
        ),
    ] = 1
    pipeline_layers: Annotated[
        Annotated[str, Meta(pattern=r"^[1-9]\d*(,[1-9]\d*)*$")] | None,
        Meta(
            description="Layers of each stage, such as 8,8,6; default: so that each reads about as"
            " many weights."
        ),
    ] = None
    num_threads: Annotated[
        PositiveInt | None,
        Meta(
            description="Threads of the CPU kernels, of each process that computes; default: one"
            " per core that may be used, shared among these."
        ),
    ] = None
    numa_node: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="Run on this NUMA node's cores and in its memory; default: no binding."),
    ] = None
