"""Settings of several engines, on one or more machines."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from octavo.config.section import Section
from octavo.errors import ConfigError


class ParallelConfig(Section, frozen=True):
    """Division of requests among engines, machines and worker processes."""

    data_parallel_size: Annotated[
        int,
        Meta(
            description="Number of engines, each with the whole model, among which requests are"
            " divided. The engines share memory and cores; settings of these (KV cache, threads)"
            " apply to each engine. device=cpu only.",
            ge=1,
        ),
    ] = 1
    enable_elastic_ep: Annotated[
        bool,
        Meta(
            description="Allow changes of the number of engines while the server runs (POST"
            " /scale_elastic_ep, octavo scale)."
        ),
    ] = False
    distributed_executor_backend: Annotated[
        str | None,
        Meta(
            description="Executor of an engine's workers. uni: in the engine's process; mp: one"
            " process for each worker, on this machine (Linux); ray: one actor of a Ray cluster for"
            " each worker (pip install ray); or the dotted path of a custom Executor class."
            " Default: uni for one worker, mp for more."
        ),
    ] = None
    data_parallel_size_local: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Number of the data_parallel_size engines on this machine; default: all."
            " The others run on nodes that join (--headless)."
        ),
    ] = None
    data_parallel_start_rank: Annotated[
        int,
        Meta(
            description="Rank of the first engine of this machine, on a node or with"
            " data_parallel_hybrid_lb; 0 on the head node.",
            ge=0,
        ),
    ] = 0
    data_parallel_rank: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="Rank of this server's only engine among data_parallel_size servers"
            " behind an external load balancer; implies data_parallel_external_lb."
        ),
    ] = None
    data_parallel_external_lb: Annotated[
        bool,
        Meta(
            description="Run one engine in this server; an external load balancer divides the"
            " requests among servers that do not communicate. Needs data_parallel_rank."
        ),
    ] = False
    data_parallel_hybrid_lb: Annotated[
        bool,
        Meta(
            description="Run one server on each machine, for data_parallel_size_local engines from"
            " data_parallel_start_rank; an external load balancer divides the requests among the"
            " servers, which do not communicate."
        ),
    ] = False
    data_parallel_address: Annotated[
        str | None,
        Meta(
            description="Name or address at which the head node listens for the other nodes, with"
            " engines on several machines. Not used with an external load balancer."
        ),
    ] = None
    data_parallel_rpc_port: Annotated[
        int,
        Meta(
            description="Port of the head node for nodes and their engines. Engines that divide"
            " experts use the next port, too.",
            ge=0,
            le=65535,
        ),
    ] = 29550
    cluster_key_file: Annotated[
        str | None,
        Meta(
            description="File with the shared secret of all machines of a cluster, which encrypts"
            " all data between them."
        ),
    ] = None

    @property
    def num_local_engines(self) -> int:
        """Number of engines on this machine."""
        return self.data_parallel_size_local or self.data_parallel_size

    @property
    def external(self) -> bool:
        """True if this server has one engine and an external load balancer."""
        return self.data_parallel_external_lb or self.data_parallel_rank is not None

    @property
    def first_engine(self) -> int:
        """Rank of this server's first engine among all engines; valid after `of_server`."""
        return self.data_parallel_rank or 0

    @property
    def numbered(self) -> bool:
        """True if logs and metrics must name the engine; valid after `of_server`."""
        several = self.data_parallel_size > 1 or self.enable_elastic_ep
        return several or self.data_parallel_rank is not None

    def of_server(self) -> ParallelConfig:
        """Return the settings with only this server's engines; it does not know those of others.

        Only `data_parallel_rank`, the rank of the first one, still shows that others exist.
        """
        if self.external:
            first, count = self.data_parallel_rank, 1
        elif self.data_parallel_hybrid_lb:
            first, count = self.data_parallel_start_rank, self.num_local_engines
        else:
            return self
        return msgspec.structs.replace(
            self,
            data_parallel_size=count,
            data_parallel_size_local=None,
            data_parallel_start_rank=0,
            data_parallel_rank=first,
            data_parallel_external_lb=False,
            data_parallel_hybrid_lb=False,
            data_parallel_address=None,
        )

    def check(self, *, headless: bool) -> None:
        """Check that the settings of a cluster fit together.

        Args:
            headless: True if this machine is a node.

        Raises:
            ConfigError: the settings contradict each other.
        """
        size, local = self.data_parallel_size, self.num_local_engines
        if self.external or self.data_parallel_hybrid_lb:
            self._check_balanced(headless)
            return
        if self.enable_elastic_ep and (headless or local < size):
            raise ConfigError(
                "enable_elastic_ep is for engines on one machine: those of nodes start and end "
                "with their nodes; leave it out."
            )
        start, total = self.data_parallel_start_rank, f"data_parallel_size={size}"
        if start + local > size:
            raise ConfigError(
                f"data_parallel_start_rank={start} and data_parallel_size_local={local} are more "
                f"than {total}; {total} counts the engines of all machines."
            )
        if not headless and start:
            raise ConfigError(
                f"data_parallel_start_rank={start} is for nodes; add --headless, or leave it out. "
                "Where each machine has a server, add --data-parallel-hybrid-lb."
            )
        if headless and not start:
            raise ConfigError(
                "headless: data_parallel_start_rank=0 is the head node's first engine; give the "
                "number of this node's first one."
            )
        if not headless and local == size:
            if self.data_parallel_address is not None:  # a key may be a KV connector's
                raise ConfigError(
                    f"data_parallel_address is for engines on several machines, and all of {total} "
                    "are on this one; set data_parallel_size_local, or leave it out."
                )
            return
        for name in ("data_parallel_address", "cluster_key_file"):
            if getattr(self, name) is None:
                raise ConfigError(f"{name} is missing: {total} has engines on other machines.")

    def _check_balanced(self, headless: bool) -> None:
        """Check the settings of one of several servers with an external load balancer."""
        size, start = self.data_parallel_size, self.data_parallel_start_rank
        rank, local = self.data_parallel_rank, self.data_parallel_size_local
        lb = "data_parallel_external_lb" if self.external else "data_parallel_hybrid_lb"
        if self.external and self.data_parallel_hybrid_lb:
            raise ConfigError(
                "data_parallel_external_lb (or data_parallel_rank) is for one engine per server, "
                "data_parallel_hybrid_lb for several; leave out one of them."
            )
        if headless:
            raise ConfigError(
                f"headless: a node has no server, and with {lb} each has one; leave out one of "
                "them."
            )
        if self.enable_elastic_ep:
            raise ConfigError(
                f"enable_elastic_ep is not supported with {lb}: each server has its engines for "
                "itself, and the load balancer knows how many there are; leave out one of them."
            )
        if not self.external:
            if local is None:
                raise ConfigError(
                    f"{lb} needs data_parallel_size_local: how many of data_parallel_size={size} "
                    "engines this machine has."
                )
            if start + local > size:
                raise ConfigError(
                    f"data_parallel_start_rank={start} and data_parallel_size_local={local} are "
                    f"more than data_parallel_size={size}, which counts the engines of all "
                    "machines."
                )
            return
        if rank is None:
            raise ConfigError(f"{lb} needs data_parallel_rank: the number of this server's engine.")
        if rank >= size:
            raise ConfigError(
                f"data_parallel_rank={rank} is not below data_parallel_size={size}, which counts "
                "the engines of all servers."
            )
        if local not in (None, 1):
            raise ConfigError(
                f"data_parallel_size_local={local} is not supported with {lb}, where a server has "
                "one engine; leave it out, or use data_parallel_hybrid_lb."
            )
        if start:
            raise ConfigError(
                f"data_parallel_start_rank={start} is not supported with {lb}, where "
                f"data_parallel_rank={rank} says which engine it is; leave it out."
            )
