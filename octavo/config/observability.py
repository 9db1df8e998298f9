"""Settings of profiles."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from octavo.config.section import Section


class ObservabilityConfig(Section, frozen=True):
    """What can be seen of the engine at work."""

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
            description="Do not log the statistics of a server every log_stats_interval seconds;"
            " in LLM(...), where it is on unless given: collect no metrics."
        ),
    ] = False
