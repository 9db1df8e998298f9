"""Registry of platforms by a config's `device`."""

from __future__ import annotations

from octavo.errors import ConfigError
from octavo.platforms.cpu import CPUPlatform
from octavo.platforms.cuda import CUDAPlatform
from octavo.worker.platform import Platform

ENTRY_POINTS = "octavo.platforms"
"""Group of entry points: name -> a subclass of `Platform`, for the devices of other packages."""

# In order of preference: "auto" means the first available one.
_PLATFORMS: dict[str, type[Platform]] = {"cuda": CUDAPlatform, "cpu": CPUPlatform}


def get_platform(device: str) -> Platform:
    """Return the platform for a config's `device`; "auto": a GPU if available.

    Raises:
        ConfigError: the device is unknown, a package's platform cannot be imported, or this machine
            has no such device.
    """
    if device == "auto":
        return next(platform for kind in _PLATFORMS.values() if (platform := kind()).is_available())
    platform = (_PLATFORMS.get(device) or _load(device))()
    platform.check_available()
    return platform


def _load(device: str) -> type[Platform]:
    """Return the platform of another package."""
    from importlib.metadata import entry_points  # 20 ms, which most starts avoid

    found = entry_points(group=ENTRY_POINTS)
    if device not in found.names:
        known = ["auto", *sorted({*_PLATFORMS, *found.names})]
        raise ConfigError(
            f"device={device!r} is unknown; choose {', '.join(known)}, or install a package whose "
            f"entry points in the group {ENTRY_POINTS} have it."
        )
    try:
        platform = found[device].load()
    except Exception as error:
        raise ConfigError(
            f"device={device}: its package cannot be imported ({type(error).__name__}: {error}). "
            "Fix or remove it, or choose another device."
        ) from error
    if not (isinstance(platform, type) and issubclass(platform, Platform)):
        raise ConfigError(
            f"device={device}: {found[device].value} is not a subclass of "
            "octavo.worker.platform.Platform."
        )
    return platform
