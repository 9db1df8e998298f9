"""Settings of profiles and traces."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta

from octavo.config.section import HIDDEN, Section
from octavo.errors import ConfigError


class ObservabilityConfig(Section, frozen=True):
    """Profiles, traces and statistics of the running engine."""

    profiler_dir: Annotated[
        str | None,
        Meta(
            description="Folder for the profiles (Chrome traces) that start_profile and"
            " stop_profile record."
        ),
    ] = None
    disable_log_stats: Annotated[
        bool,
        Meta(
            description="Do not log a server's statistics every log_stats_interval seconds. In"
            " LLM(...), collect no metrics; there the default is on."
        ),
    ] = False
    otlp_traces_endpoint: Annotated[
        str | None,
        Meta(
            description="URL of an OpenTelemetry collector that receives a span for each request,"
            " by OTLP over HTTP: http://host:4318, or with another path than /v1/traces."
        ),
    ] = None

    @property
    def traces_url(self) -> str | None:
        """URL to which spans are sent; None: there are none.

        Raises:
            ConfigError: `otlp_traces_endpoint` is not the URL of a server of OTLP over HTTP.
        """
        endpoint = self.otlp_traces_endpoint
        if endpoint is None:
            return None
        try:
            parts = urlsplit(endpoint)
            has_address = bool(parts.hostname) and parts.port != 0
        except ValueError:  # the port is not a number
            has_address = False
        if "@" in endpoint:
            raise ConfigError(
                f"otlp_traces_endpoint={HIDDEN} has a password, which logs would show; set the "
                "environment variable OTEL_EXPORTER_OTLP_HEADERS=authorization=... instead."
            )
        if not has_address or parts.scheme not in ("http", "https"):
            raise ConfigError(
                f"otlp_traces_endpoint={endpoint!r} is not allowed: spans are sent by OTLP over "
                "HTTP, not gRPC; give the URL of the collector's port for HTTP, such as "
                "http://host:4318."
            )
        return parts._replace(path="/v1/traces").geturl() if parts.path in ("", "/") else endpoint
