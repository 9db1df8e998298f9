"""The router's settings, beside those that it shares with servers."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from msgspec import Meta

from octavo.config import Section, ServerConfig, section_fields
from octavo.errors import ConfigError

SHARED = frozenset(
    [
        "host",
        "port",
        "uds",
        "root_path",
        "api_key",
        "api_key_file",
        "allowed_hosts",
        "allowed_origins",
        "ssl_keyfile",
        "ssl_certfile",
        "max_num_queued_reqs",
        "max_request_bytes",
        "max_connections_per_client",
        "shutdown_timeout",
        "log_level",
        "log_format",
        "disable_uvicorn_access_log",
        "disable_access_log_for_endpoints",
        "disable_fastapi_docs",
        "uvicorn_log_level",
        "middleware",
    ]
)
"""Settings of `ServerConfig` that say how the router itself serves."""
PASSED_ON = frozenset(
    [
        "max_request_bytes",
        "shutdown_timeout",
        "log_level",
        "log_format",
        "disable_uvicorn_access_log",
        "disable_access_log_for_endpoints",
        "uvicorn_log_level",
    ]
)
"""Those of them that its own servers get, too."""
REFUSED = {
    "headless": "a router has no engine; start nodes with octavo serve --headless",
    "record": "each server would write the same file; record at a server",
    "record_prompts": "it goes with record",
    "record_max_bytes": "it goes with record",
    "resume_grace": "behind a router nobody can come back to a stream",
    "admin_key": "a router passes nothing on to the addresses of servers that need it",
    "enable_admin": "a router passes nothing on to the addresses of servers that need it",
}
"""Settings of `ServerConfig` that have no meaning here, and why."""


class RouterConfig(Section, frozen=True):
    """The router: which servers it has, and how it treats them."""

    servers: Annotated[
        list[str], Meta(description="Addresses of servers, such as http://host:8000.")
    ] = []
    prefill_servers: Annotated[
        list[str],
        Meta(description="Those of servers that compute prompts, for --decode-servers to go on."),
    ] = []
    decode_servers: Annotated[
        list[str], Meta(description="Those of servers that answer, see --prefill-servers.")
    ] = []
    replicas: Annotated[
        int,
        Meta(description="Number of servers that the router starts itself.", ge=0, le=1024),
    ] = 0
    prefill: Annotated[
        int,
        Meta(description="Number of prefill servers that the router starts itself.", ge=0, le=1024),
    ] = 0
    decode: Annotated[
        int,
        Meta(description="Number of decode servers that the router starts itself.", ge=0, le=1024),
    ] = 0
    backend: Annotated[
        Literal["local", "ray"],
        Meta(
            description="Where the router's own servers are: on this machine, or on nodes of a Ray"
            " cluster, each with --num-threads CPUs."
        ),
    ] = "local"
    min_replicas: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None,
        Meta(description="With --max-replicas: fewest servers of its own, of each kind."),
    ] = None
    max_replicas: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None,
        Meta(
            description="Most servers of its own, of each kind: the router starts and ends them"
            " with the load."
        ),
    ] = None
    target_load: Annotated[
        int,
        Meta(
            description="Requests in flight for which there is to be one more server; at a prefill"
            " server each 8 KiB of prompt count as eight.",
            ge=1,
        ),
    ] = 16
    server_api_key: Annotated[
        str | None,
        Meta(
            description="API key that --servers and the like ask for; default: the one in"
            " OCTAVO_SERVER_API_KEY, else the client's is passed on.",
            extra={"secret": True},
        ),
    ] = None
    health_check_interval: Annotated[
        float, Meta(description="Seconds between two probes of a server.", gt=0)
    ] = 2.0
    health_check_timeout: Annotated[
        float,
        Meta(description="Seconds that a probe may take; after two such a server is lost.", gt=0),
    ] = 5.0
    failover_timeout: Annotated[
        float,
        Meta(description="Seconds that a request waits while no server can take it.", ge=0),
    ] = 30.0

    @property
    def num_own(self) -> int:
        """Servers that the router starts at first."""
        return self.replicas + self.prefill + self.decode

    @property
    def most_own(self) -> int:
        """Servers that it may have started at one time."""
        counts = [count for count in (self.replicas, self.prefill, self.decode) if count]
        return sum(self.max_replicas or count for count in counts)

    @property
    def urls(self) -> list[str]:
        """All servers that others have started."""
        return self.servers + self.prefill_servers + self.decode_servers

    def check(self) -> None:
        """Refuses settings that contradict one another.

        Raises:
            ConfigError: naming them.
        """
        plain = bool(self.servers or self.replicas)
        split = {
            "prefill": bool(self.prefill_servers or self.prefill),
            "decode": bool(self.decode_servers or self.decode),
        }
        if plain and any(split.values()):
            raise ConfigError(
                "servers and replicas do all of a request, prefill and decode servers share it: "
                "give --servers or --replicas, or else --prefill(-servers) with --decode(-servers)."
            )
        if not plain and not any(split.values()):
            raise ConfigError(
                "There is no server: give --servers URL ..., or --replicas N to start some."
            )
        if not plain and not all(split.values()):
            missing = "decode" if split["prefill"] else "prefill"
            raise ConfigError(
                f"There is no {missing} server: give --{missing}-servers URL ... or --{missing} N."
            )
        if self.backend != "local" and not self.num_own:
            raise ConfigError(
                f"backend={self.backend!r} is for servers that the router starts, and it starts "
                "none; give --replicas N, or leave it out."
            )
        for url in self.urls:
            _check_url(url)
        if len({url.rstrip("/") for url in self.urls}) < len(self.urls):
            raise ConfigError("A server is named twice; name each once.")
        self._check_limits()

    def _check_limits(self) -> None:
        least, most = self.min_replicas, self.max_replicas
        if least is None and most is None:
            return
        if least is None or most is None:
            raise ConfigError("min_replicas and max_replicas go together; give both or neither.")
        counts = [count for count in (self.replicas, self.prefill, self.decode) if count]
        if not counts:
            raise ConfigError(
                "min_replicas and max_replicas are for servers that --replicas N starts."
            )
        if not all(least <= count <= most for count in counts):
            raise ConfigError(
                f"The router starts with {', '.join(map(str, counts))} servers, which is not "
                f"between min_replicas={least} and max_replicas={most}."
            )


def own_server_settings(given: dict[str, object]) -> dict[str, object]:
    """What of the given settings of `ServerConfig` the router's own servers get.

    Raises:
        ConfigError: one has no meaning here.
    """
    for name in REFUSED.keys() & given.keys():
        raise ConfigError(f"{name} cannot be given to a router: {REFUSED[name]}.")
    passed_on = {f.name for f in section_fields(ServerConfig)} - SHARED | PASSED_ON
    return {name: value for name, value in given.items() if name in passed_on}


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname)
        good = good and not (parts.query or parts.fragment or parts.username)
        good = good and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise ConfigError(
            f"{url!r} is not the address of a server; give one such as http://host:8000."
        )
    if parts.path.rstrip("/"):
        raise ConfigError(f"{url!r} has a path; give the server's address without /v1.")
