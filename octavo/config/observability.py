"""Settings of profiles."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from octavo.config.section import Section


class ObservabilityConfig(Section, frozen=True):
    """Profiles and statistics of the running engine."""

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
