"""All settings of an engine."""

from __future__ import annotations

import importlib.util
import typing
from functools import cache
from typing import Any

import msgspec

from octavo.config.cache import CacheConfig
from octavo.config.device import DeviceConfig
from octavo.config.lora import LoRAConfig
from octavo.config.model import LoadConfig, ModelConfig, read_hub_address
from octavo.config.observability import ObservabilityConfig
from octavo.config.parallel import ParallelConfig
from octavo.config.scheduler import SchedulerConfig
from octavo.config.section import ConfigField, Section, _unknown, build_section, section_fields
from octavo.config.speculation import SpeculationConfig
from octavo.errors import GRAMMAR_PACKAGES, ConfigError


class EngineConfig(Section, frozen=True):
    """All settings of an engine, for offline use and for a server."""

    model: ModelConfig = ModelConfig()
    load: LoadConfig = LoadConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    device: DeviceConfig = DeviceConfig()
    parallel: ParallelConfig = ParallelConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    lora: LoRAConfig = LoRAConfig()
    observability: ObservabilityConfig = ObservabilityConfig()

    @property
    def world_size(self) -> int:
        """Number of workers of an engine."""
        return self.device.tensor_parallel_size * self.device.pipeline_parallel_size

    @property
    def executor_backend(self) -> str:
        """Executor of the workers: the setting, or its default for the number of workers."""
        if (backend := self.parallel.distributed_executor_backend) is not None:
            return backend
        return "uni" if self.world_size == 1 else "mp"

    @property
    def num_worker_processes(self) -> int:
        """Number of worker processes, in addition to the engine's process."""
        return 0 if self.executor_backend == "uni" else self.world_size

    @property
    def num_spare_workers(self) -> int:
        """Number of worker processes that can start before their setup is known."""
        return self.world_size if self.executor_backend == "mp" else 0

    def __repr__(self) -> str:
        """Return the sections that differ from their defaults."""
        default = EngineConfig()
        shown = (
            f"{name}={getattr(self, name)!r}"
            for name in self.__struct_fields__
            if getattr(self, name) != getattr(default, name)
        )
        return f"EngineConfig({', '.join(shown)})"

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> EngineConfig:
        """Build the config from flat names, as `LLM(...)` and the command line pass them.

        Raises:
            ConfigError: a name is unknown, a value is wrong, or settings contradict each other.
        """
        settings = dict(kwargs)
        if isinstance(settings.get("model"), str):
            model, revision = read_hub_address(settings["model"])
            if revision is not None and settings.get("revision") not in (None, revision):
                raise ConfigError(
                    f"model={settings['model']!r} and revision={settings['revision']!r} name two "
                    "revisions; give one."
                )
            settings["model"] = model
            settings |= {} if revision is None else {"revision": revision}
        sections = build_sections(cls, settings)
        config = cls(**sections)
        config.check()
        return config

    def check(self) -> None:
        """Raise ConfigError if settings contradict each other."""
        sched, model = self.scheduler, self.model
        budget = sched.max_num_batched_tokens
        if model.max_model_len == 0:
            raise ConfigError("max_model_len=0 leaves no room; give -1 or more than 0.")
        backend = model.guided_decoding_backend
        if backend != "auto" and importlib.util.find_spec(backend) is None:
            raise ConfigError(
                f"guided_decoding_backend={backend!r} needs the package {backend}, which is not "
                f"installed: install it (`{GRAMMAR_PACKAGES[backend]}`), or leave "
                "guided_decoding_backend out."
            )
        if budget is not None and budget < sched.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={budget} is less than max_num_seqs={sched.max_num_seqs}: "
                "a step could not serve every running request. Raise the first or lower the second."
            )
        if (
            budget is not None
            and not sched.enable_chunked_prefill
            and model.max_model_len is not None
            and budget < model.max_model_len
        ):
            raise ConfigError(
                f"max_num_batched_tokens={budget} is less than max_model_len="
                f"{model.max_model_len}, so a long prompt would never be scheduled. Raise it, "
                "lower max_model_len, or leave enable_chunked_prefill on."
            )
        if self.cache.kv_cache_memory_bytes and self.cache.num_gpu_blocks_override:
            raise ConfigError(
                "kv_cache_memory_bytes and num_gpu_blocks_override both set the size of the KV "
                "cache; give one of them."
            )
        if model.skip_tokenizer_init and model.tokenizer is not None:
            raise ConfigError(
                "skip_tokenizer_init and tokenizer contradict each other; give one of them."
            )
        if model.pooler_config is not None:
            model.pooler_config.check()
        if self.speculation.speculative_config is not None:
            self.speculation.speculative_config.check()
        self.lora.check(model.served_model_name or [model.model])
        _ = self.observability.traces_url  # reject a bad URL
        self._check_executor()

    @property
    def adapts_experts(self) -> bool:
        """True if adapters may change experts: they must be on one machine."""
        parallel = self.parallel
        is_here = parallel.num_local_engines >= parallel.data_parallel_size
        return is_here or not self.divides_experts

    @property
    def divides_experts(self) -> bool:
        """True if several engines divide the experts of a model."""
        return self.device.enable_expert_parallel and self.parallel.data_parallel_size > 1

    @property
    def scales_experts(self) -> bool:
        """True if the number of engines that divide the experts of a model may change."""
        divides = self.device.enable_expert_parallel and self.device.tensor_parallel_size == 1
        return divides and self.parallel.enable_elastic_ep

    def resized(self, size: int) -> EngineConfig:
        """Return the settings for `size` engines that divide the experts; one engine has all."""
        replace = msgspec.structs.replace
        parallel = replace(self.parallel, data_parallel_size=size, data_parallel_size_local=None)
        device = self.device
        if size == 1:
            device = replace(
                device, enable_expert_parallel=False, enable_eplb=False, eplb_config=None
            )
        return replace(self, parallel=parallel, device=device)

    def _check_expert_parallel(self) -> None:
        size, engines = self.device.tensor_parallel_size, self.parallel.data_parallel_size
        is_elastic = self.parallel.enable_elastic_ep
        if size == 1 and engines == 1 and not is_elastic:
            raise ConfigError(
                "enable_expert_parallel divides experts among the processes of "
                "tensor_parallel_size or among the engines of data_parallel_size, and both are 1; "
                "set one to 2 or more, or leave the other out."
            )
        if engines == 1 and size > 1:
            return
        which = f"enable_expert_parallel with data_parallel_size={engines}"
        backend, parallel = self.executor_backend, self.parallel
        events = self.cache.kv_events_config
        several = parallel.num_local_engines < engines
        local = f"data_parallel_size_local={parallel.data_parallel_size_local}"
        for is_wrong, setting in (
            (is_elastic and size > 1, f"tensor_parallel_size={size} and enable_elastic_ep"),
            (
                is_elastic and self.device.pipeline_parallel_size > 1,
                f"pipeline_parallel_size={self.device.pipeline_parallel_size} and "
                "enable_elastic_ep",
            ),
            (backend not in ("uni", "mp"), f"distributed_executor_backend={backend}"),
            (parallel.external, "an external load balancer (data_parallel_rank)"),
            (parallel.data_parallel_hybrid_lb, "data_parallel_hybrid_lb"),
            (several and self.device.enable_eplb, f"{local} and enable_eplb"),
            (
                several and self.device.pipeline_parallel_size > 1,
                f"{local} and pipeline_parallel_size={self.device.pipeline_parallel_size}",
            ),
            (self.device.attention_backend == "triton", "attention_backend=triton"),
            (self.load.expert_cache is not None, "expert_cache"),
            (
                is_elastic and events is not None and events.enable_kv_cache_events,
                "kv_events_config and enable_elastic_ep",
            ),
        ):
            if is_wrong:
                raise ConfigError(
                    f"{which} divides the experts among engines of one server on CPUs, and is not "
                    f"supported with {setting}; leave out one of them."
                )

    def _check_eplb(self) -> None:
        device = self.device
        if not device.enable_eplb:
            if device.eplb_config is not None:
                raise ConfigError(
                    "eplb_config has no effect without enable_eplb; add enable_eplb, or leave "
                    "eplb_config out."
                )
            return
        if not device.enable_expert_parallel:
            raise ConfigError(
                "enable_eplb moves experts between the processes of enable_expert_parallel; add "
                "enable_expert_parallel, or leave enable_eplb out."
            )
        if self.load.expert_cache is not None:
            raise ConfigError(
                "enable_eplb is not supported with expert_cache, which keeps each process's "
                "experts in a file of its own; leave out one of them."
            )

    def _check_executor(self) -> None:
        backend = self.executor_backend
        if backend == "uni" and self.world_size > 1:
            raise ConfigError(
                "distributed_executor_backend=uni has one worker, and tensor_parallel_size times "
                f"pipeline_parallel_size is {self.world_size}; set "
                "distributed_executor_backend=mp."
            )
        if self.device.enable_sequence_parallel and self.device.tensor_parallel_size == 1:
            raise ConfigError(
                "enable_sequence_parallel divides norms among the processes of "
                "tensor_parallel_size, and that is 1; set it to 2 or more, or leave the other out."
            )
        if self.device.enable_expert_parallel:
            self._check_expert_parallel()
        self._check_eplb()
        layers, stages = self.device.pipeline_layers, self.device.pipeline_parallel_size
        if layers is not None and layers.count(",") + 1 != stages:
            raise ConfigError(
                f"pipeline_layers={layers!r} is for {layers.count(',') + 1} stages, and "
                f"pipeline_parallel_size={stages}; give a number of layers for each."
            )
        if backend not in ("uni", "mp", "ray") and "." not in backend.strip("."):
            raise ConfigError(
                f"distributed_executor_backend={backend!r} is unknown; choose uni, mp or ray, or "
                "give the dotted path of a custom Executor class (module.Class)."
            )
        directory = self.observability.profiler_dir
        if backend in ("mp", "ray") and directory is not None:
            raise ConfigError(
                f"profiler_dir={directory!r} records one process, and with "
                f"distributed_executor_backend={backend} the workers are in others; leave one of "
                "them out."
            )


def section_doc(section: str) -> str:
    """Return the first docstring line of a section of `EngineConfig`."""
    doc = _sections(EngineConfig)[section].__doc__
    return str(doc).partition("\n")[0]


def config_fields(config: type[EngineConfig] = EngineConfig) -> list[ConfigField]:
    """Return the settings of all sections of `config`."""
    return [f for name, section in _sections(config).items() for f in section_fields(section, name)]


def build_sections(config: type[EngineConfig], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Build the sections of `config` from flat settings; check each."""
    fields = {f.name: f for f in config_fields(config)}
    by_section: dict[str, dict[str, Any]] = {}
    for name, value in kwargs.items():
        if name not in fields:
            raise ConfigError(_unknown(name, list(fields)))
        by_section.setdefault(fields[name].section, {})[name] = value
    sections = _sections(config)
    return {name: build_section(sections[name], values) for name, values in by_section.items()}


@cache
def _sections(config: type[EngineConfig]) -> dict[str, type[Section]]:
    """Return the sections of `config` by name."""
    return typing.get_type_hints(config)
