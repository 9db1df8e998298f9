"""`octavo serve` with several models."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.config import EngineConfig, ServerConfig
from octavo.router.run import run_proxy
from octavo.several_models.app import build_app
from octavo.several_models.config import ServedModel, SeveralModelsConfig
from octavo.several_models.state import ModelsState


def run_models(
    config: ServerConfig,
    several: SeveralModelsConfig,
    served: Sequence[ServedModel],
    common: EngineConfig,
) -> int:
    """Serve several models until a signal ends it; return the exit status.

    Args:
        config: settings of the HTTP server: address, keys, limits.
        several: settings of the loading.
        served: the models.
        common: settings of the engine for all models.

    Raises:
        OctavoError: the address is unusable, no model can be loaded, or the models do not fit into
            the memory.
    """
    return run_proxy(config, lambda config: ModelsState(config, several, served, common), build_app)
