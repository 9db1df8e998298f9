"""Answers of the routes that control the engine."""

from __future__ import annotations

from typing import Literal

from octavo.server.answers import Answer


class CacheReset(Answer):
    """POST /reset_prefix_cache, /reset_encoder_cache and /reset_mm_cache."""

    success: bool


class Scaled(Answer):
    """POST /scale_elastic_ep."""

    message: str


class IsScaling(Answer):
    """POST /is_scaling_elastic_ep."""

    is_scaling_elastic_ep: bool


class FellAsleep(Answer):
    """POST /sleep."""

    status: Literal["sleeping"]
    level: int


class WokeUp(Answer):
    """POST /wake_up."""

    status: Literal["awake", "sleeping"]
    tags: list[str] | None


class IsSleeping(Answer):
    """GET /is_sleeping."""

    is_sleeping: bool


class Paused(Answer):
    """POST /pause."""

    status: Literal["paused"]


class Resumed(Answer):
    """POST /resume."""

    status: Literal["resumed"]


class IsPaused(Answer):
    """GET /is_paused."""

    is_paused: bool


class ProfileStarted(Answer):
    """POST /start_profile."""

    status: Literal["recording"]


class ProfileStopped(Answer):
    """POST /stop_profile."""

    path: str
