"""Settings of the device and of the workers that share a model."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from octavo.config.section import PositiveInt, Section


class EplbConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Balancing of the experts' loads among processes. Names are vLLM's."""

    window_size: PositiveInt = 1000
    """Number of the last steps whose loads count."""
    step_interval: PositiveInt = 3000
    """Number of steps from one rebalancing to the next."""
    num_redundant_experts: Annotated[int, Meta(ge=0)] = 0
    """Number of copies of a layer's experts in all processes together, besides the experts."""
    log_balancedness: bool = False
    """Log the mean load of a process over the largest."""
    log_balancedness_interval: PositiveInt = 1
    """Number of steps from one line of the log to the next."""


class DeviceConfig(Section, frozen=True):
    """Device, attention kernels and division of the model among processes."""

    device: Annotated[
        str,
        Meta(description="cpu, cuda, or a plug-in's device; auto: a GPU if available."),
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
            description="Compute the same result for a request, bit for bit, regardless of the "
            "rest of its batch, at some cost in speed. For CUDA; a CPU always does so."
        ),
    ] = False
    tensor_parallel_size: Annotated[
        int,
        Meta(
            description="Number of processes that compute the model together, each with a part of"
            " its weights and heads; on one machine's CPU.",
            ge=1,
        ),
    ] = 1
    tensor_parallel_mode: Annotated[
        Literal["exact", "reduce"],
        Meta(
            description="exact: one process computes each sum, so answers equal those of a single"
            " process, bit for bit; reduce: results of output projections are summed over the"
            " processes in rank order, with half as many synchronizations."
        ),
    ] = "exact"
    enable_sequence_parallel: Annotated[
        bool,
        Meta(
            description="Divide the tokens of each norm among the tensor_parallel_size processes;"
            " costs one more synchronization for each norm."
        ),
    ] = False
    enable_expert_parallel: Annotated[
        bool,
        Meta(
            description="Divide the experts of each layer among the tensor_parallel_size processes,"
            " instead of the columns of each expert, or among the processes of all"
            " data_parallel_size engines; the bits stay the same."
        ),
    ] = False
    enable_eplb: Annotated[
        bool,
        Meta(
            description="Move experts between the processes or engines of enable_expert_parallel"
            " while they serve, so that all have about the same load; the bits stay the same."
        ),
    ] = False
    eplb_config: Annotated[
        EplbConfig | None,
        Meta(
            description='Settings of enable_eplb, as JSON: {"window_size": 1000, "step_interval":'
            ' 3000, "num_redundant_experts": 0, "log_balancedness": false}; these are the defaults.'
        ),
    ] = None
    pipeline_parallel_size: Annotated[
        int,
        Meta(
            description="Number of stages into which the layers are divided;"
            " tensor_parallel_size processes compute each, while other stages compute other steps.",
            ge=1,
        ),
    ] = 1
    pipeline_layers: Annotated[
        Annotated[str, Meta(pattern=r"^[1-9]\d*(,[1-9]\d*)*$")] | None,
        Meta(
            description="Layers of each stage, such as 8,8,6; default: about the same amount of"
            " weights for each stage."
        ),
    ] = None
    num_threads: Annotated[
        PositiveInt | None,
        Meta(
            description="Number of CPU kernel threads in each computing process; default: one for"
            " each usable core, divided among the processes."
        ),
    ] = None
    numa_node: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="Use only the cores and the memory of this NUMA node; default: no binding."
        ),
    ] = None

    @property
    def eplb(self) -> EplbConfig | None:
        """Settings of the balancing of experts; None: they stay where they are."""
        return (self.eplb_config or EplbConfig()) if self.enable_eplb else None

    @property
    def redundant_experts(self) -> int:
        """Number of copies of a layer's experts in addition to the experts."""
        return 0 if self.eplb is None else self.eplb.num_redundant_experts
