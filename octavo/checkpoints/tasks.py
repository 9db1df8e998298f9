"""Names of the tasks for which a model's checkpoint has adapters; see `task_adapters.py`."""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson

TASKS = "lora_adaptations"
"""Field of config.json with the names of the tasks; in a path, the folder of their adapters."""
FACTORS = r".*\.parametrizations\.weight\.0\.lora_[AB]"
"""Pattern of the names of their tensors."""


def read_tasks(config: ConfigJson) -> tuple[str, ...]:
    """Return the names of the tasks of a model; none if it has no adapters.

    Raises:
        ModelError: the field is damaged.
    """
    tasks = config.get(TASKS) or []
    valid = isinstance(tasks, list) and all(isinstance(it, str) and it for it in tasks)
    if not valid or len(set(tasks)) < len(tasks):
        raise config.error(TASKS, "it must be a list of different names")
    return tuple(tasks)
