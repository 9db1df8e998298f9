"""Settings of several engines, on one machine or more."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from octavo.config.section import Section
from octavo.errors import ConfigError


class ParallelConfig(Section, frozen=True):
    """Over how many engines and devices the work is spread."""

    data_parallel_size: Annotated[
        int,
        Meta(
            description="Engines, each with the whole model, among which requests are divided. They"
            " share memory and cores; what is set of these (KV cache, threads) each of them has."
            " device=cpu only.",
            ge=1,
        ),
    ] = 1
    enable_elastic_ep: Annotated[
        bool,
        Meta(
            description="Let the number of engines be changed while the server runs (POST"
            " /scale_elastic_ep, octavo scale)."
        ),
    ] = False
    distributed_executor_backend: Annotated[
        str | None,
        Meta(
            description="Where an engine's workers compute. uni: in its own process; mp: each in a"
            " process of its own, on this machine (Linux); ray: each in an actor of a Ray cluster"
            " (pip install ray); or module and name, with a dot between, of an Executor"
            " of one's own. Default: uni for one worker, mp for more."
        ),
    ] = None
    data_parallel_size_local: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="How many of these engines are on this machine; default: all. The others"
            " are on nodes that join (--headless)."
        ),
    ] = None
    data_parallel_start_rank: Annotated[
        int,
        Meta(
            description="On a node, or with data_parallel_hybrid_lb: number of its first engine;"
            " the head has 0.",
            ge=0,
        ),
    ] = 0
    data_parallel_rank: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="Number of the one engine of this server, which is one of"
            " data_parallel_size servers behind a load balancer of one's own; means"
            " data_parallel_external_lb."
        ),
    ] = None
    data_parallel_external_lb: Annotated[
        bool,
        Meta(
            description="Each engine has a server of its own, and a load balancer divides the"
            " requests; needs data_parallel_rank. The servers do not talk to each other."
        ),
    ] = False
    data_parallel_hybrid_lb: Annotated[
        bool,
        Meta(
            description="Each machine has a server of its own, for data_parallel_size_local engines"
            " from data_parallel_start_rank on; a load balancer divides the requests among the"
            " machines. The servers do not talk to each other."
        ),
    ] = False
    data_parallel_address: Annotated[
        str | None,
        Meta(
            description="With engines on several machines: name or address of the head node, where"
            " it listens for the others. Not used behind a load balancer of one's own."
        ),
    ] = None
    data_parallel_rpc_port: Annotated[
        int, Meta(description="The head node's port for nodes and their engines.", ge=0, le=65535)
    ] = 29550
    cluster_key_file: Annotated[
        str | None,
        Meta(
            description="File with the secret that all machines of a cluster have in common; all"
            " that passes between them is encrypted under it."
        ),
    ] = None

    @property
    def num_local_engines(self) -> int:
        """Engines on this machine."""
        return self.data_parallel_size_local or self.data_parallel_size

    @property
    def external(self) -> bool:
        """Whether this server has one of all engines, behind a load balancer."""
        return self.data_parallel_external_lb or self.data_parallel_rank is not None

    @property
    def first_engine(self) -> int:
        """Number of this server's first engine among those of all; after `of_server`."""
        return self.data_parallel_rank or 0

    @property
    def numbered(self) -> bool:
        """Whether it has to be said which engine something is about; after `of_server`."""
        several = self.data_parallel_size > 1 or self.enable_elastic_ep
        return several or self.data_parallel_rank is not None

    def of_server(self) -> ParallelConfig:
        """As if there were no engines but this server's: to it, those of others are nothing.

        Only `data_parallel_rank`, the number of the first one, tells that there are.
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
        """Whether the settings of a cluster go together.

        Args:
            headless: this machine is a node.

        Raises:
            ConfigError: they do not.
        """
        size, local = self.data_parallel_size, self.num_local_engines
        if self.external or self.data_parallel_hybrid_lb:
            self._check_balanced(headless)
            return
        if self.enable_elastic_ep and (headless or local < size):
            raise ConfigError(
                "enable_elastic_ep is for engines on one machine: those of nodes come and go with "
                "their nodes; leave it out."
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
        """See `check`: this server is one of several behind a load balancer."""
        size, start = self.data_parallel_size, self.data_parallel_start_rank
        rank, local = self.data_parallel_rank, self.data_parallel_size_local
        lb = "data_parallel_external_lb" if self.external else "data_parallel_hybrid_lb"
        if self.external and self.data_parallel_hybrid_lb:
            raise ConfigError(
                "data_parallel_external_lb (or data_parallel_rank) is for one engine a server, "
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
