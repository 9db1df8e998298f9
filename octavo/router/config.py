"""Settings of the router, in addition to those that it shares with servers."""

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
        "max_media_request_bytes",
        "max_connections_per_client",
        "shutdown_timeout",
        "log_level",
        "log_format",
        "disable_uvicorn_access_log",
        "disable_access_log_for_endpoints",
        "disable_fastapi_docs",
        "ui",
        "uvicorn_log_level",
        "middleware",
    ]
)
"""Settings of `ServerConfig` that apply to the router's own HTTP server."""
PASSED_ON = frozenset(
    [
        "max_request_bytes",
        "max_media_request_bytes",
        "shutdown_timeout",
        "log_level",
        "log_format",
        "disable_uvicorn_access_log",
        "disable_access_log_for_endpoints",
        "ui",
        "uvicorn_log_level",
    ]
)
"""Settings of `SHARED` that the router also passes to the servers that it starts."""
REFUSED = {
    "headless": "a router has no engine; start nodes with octavo serve --headless",
    "record": "each server would write the same file; record at a server",
    "record_prompts": "it belongs to record",
    "record_max_bytes": "it belongs to record",
    "resume_grace": "clients of a router cannot resume a stream",
    "state_dir": "only one server uses a folder, and a router does not forward such requests",
    "admin_key": "a router does not forward requests to the routes that need it",
    "enable_admin": "a router does not forward requests to the routes that need it",
}
"""Settings of `ServerConfig` that a router rejects, with the reason."""


class RouterConfig(Section, frozen=True):
    """Servers of the router, their health checks and their number."""

    servers: Annotated[
        list[str], Meta(description="Addresses of servers, such as http://host:8000.")
    ] = []
    prefill_servers: Annotated[
        list[str],
        Meta(description="Addresses of servers that compute prompts for the --decode-servers."),
    ] = []
    decode_servers: Annotated[
        list[str],
        Meta(description="Addresses of servers that continue prompts of --prefill-servers."),
    ] = []
    replicas: Annotated[
        int,
        Meta(description="Number of servers that the router starts.", ge=0, le=1024),
    ] = 0
    prefill: Annotated[
        int,
        Meta(description="Number of prefill servers that the router starts.", ge=0, le=1024),
    ] = 0
    decode: Annotated[
        int,
        Meta(description="Number of decode servers that the router starts.", ge=0, le=1024),
    ] = 0
    backend: Annotated[
        Literal["local", "ray"],
        Meta(
            description="Place of the servers that the router starts: this machine, or the nodes of"
            " a Ray cluster, with --num-threads CPUs for each server."
        ),
    ] = "local"
    min_replicas: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None,
        Meta(description="Minimum number of started servers of each kind; needs --max-replicas."),
    ] = None
    max_replicas: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None,
        Meta(
            description="Maximum number of started servers of each kind; the router starts and"
            " stops servers according to the load."
        ),
    ] = None
    target_load: Annotated[
        int,
        Meta(
            description="Target number of unfinished requests per server, with --max-replicas; at a"
            " prefill server every 8 KiB of prompt counts as eight requests.",
            ge=1,
        ),
    ] = 16
    server_api_key: Annotated[
        str | None,
        Meta(
            description="API key for --servers, --prefill-servers and --decode-servers; default:"
            " the one in OCTAVO_SERVER_API_KEY, otherwise the client's key.",
            extra={"secret": True},
        ),
    ] = None
    health_check_interval: Annotated[
        float, Meta(description="Seconds between health checks of a server.", gt=0)
    ] = 2.0
    health_check_timeout: Annotated[
        float,
        Meta(
            description="Maximum seconds of a health check; after two timeouts in a row the server"
            " counts as lost.",
            gt=0,
        ),
    ] = 5.0
    failover_timeout: Annotated[
        float,
        Meta(description="Maximum seconds that a request waits for an available server.", ge=0),
    ] = 30.0

    @property
    def num_own(self) -> int:
        """Number of servers that the router starts initially."""
        return self.replicas + self.prefill + self.decode

    @property
    def most_own(self) -> int:
        """Maximum number of concurrent servers that the router starts."""
        counts = [count for count in (self.replicas, self.prefill, self.decode) if count]
        return sum(self.max_replicas or count for count in counts)

    @property
    def urls(self) -> list[str]:
        """Addresses of all servers that the router does not start."""
        return self.servers + self.prefill_servers + self.decode_servers

    def check(self) -> None:
        """Check that the settings fit together.

        Raises:
            ConfigError: settings contradict each other; the message names them.
        """
        plain = bool(self.servers or self.replicas)
        split = {
            "prefill": bool(self.prefill_servers or self.prefill),
            "decode": bool(self.decode_servers or self.decode),
        }
        if plain and any(split.values()):
            raise ConfigError(
                "servers and replicas run whole requests, prefill and decode servers share them; "
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
    """Return the settings of `ServerConfig` that apply to the servers that the router starts.

    Raises:
        ConfigError: the router does not support a setting.
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
