"""Environment variables that a front end reads when it starts."""

from __future__ import annotations

import logging

from octavo.config import settings_from_environment, unknown_variables
from octavo.system.logs import setup_default_logging

logger = logging.getLogger(__name__)
_warned: set[str] = set()


def apply_environment() -> str | None:
    """Set up logging, and warn once of each vLLM variable that has no meaning here.

    Returns:
        The minimum log level that the environment sets.

    Raises:
        ConfigError: a variable's value is wrong.
    """
    level: str | None = settings_from_environment().get("log_level")
    setup_default_logging(level or "info")
    if names := [name for name in unknown_variables() if name not in _warned]:
        _warned.update(names)
        logger.warning("ignored environment variables (see docs/vllm.md): %s", ", ".join(names))
    return level
