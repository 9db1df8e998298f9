"""Options of a request that its prompt and its parameters contain: the salt, and the transfer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from octavo.errors import RequestError
from octavo.frontend.core_params import KV_TRANSFER_PARAMS
from octavo.frontend.prompts import Prompt, check_unicode
from octavo.messages import RequestOptions
from octavo.sampling_params import MAX_CACHE_SALT_LENGTH, SamplingParams


def complete_options(
    options: RequestOptions, prompt: Prompt, params: SamplingParams, priority: int
) -> RequestOptions:
    """Return the envelope with the priority, the salt and the transfer parameters of a request.

    The salt of prompt or parameters divides the envelope's existing scope.

    Raises:
        RequestError: the salt or the transfer parameters are bad.
    """
    salt, scope = _read_salt(prompt) or params.cache_salt, options.cache_salt
    if salt and params.cache_salt and salt != params.cache_salt:
        raise RequestError(
            "cache_salt of the prompt and cache_salt of the parameters differ; set only one.",
            "cache_salt",
        )
    _check_salts([scope or "", salt or ""])
    return msgspec.structs.replace(
        options,
        priority=priority,
        cache_salt=_join_salts(scope, salt),
        kv_transfer_params=_transfer_params(params),
    )


def _check_salts(salts: list[str]) -> None:
    check_unicode("cache_salt", salts)
    if (length := max(map(len, salts))) > MAX_CACHE_SALT_LENGTH:
        raise RequestError(
            f"cache_salt has {length} characters; at most {MAX_CACHE_SALT_LENGTH} are allowed.",
            "cache_salt",
        )


def _read_salt(prompt: Prompt) -> str | None:
    """Return the salt in a prompt's dict, or None."""
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    if salt is not None and not isinstance(salt, str):
        raise RequestError(f"cache_salt is a {type(salt).__name__}; give a text.", "cache_salt")
    return salt


def _join_salts(scope: str | None, salt: str | None) -> str | None:
    """Join two salts into one, so that different pairs have different results."""
    if not scope and not salt:
        return None
    scope = scope or ""
    return f"{len(scope)}:{scope}{salt or ''}"


def _transfer_params(params: SamplingParams) -> dict[str, Any] | None:
    """Return the request's parameters for the KV connector, or None.

    Raises:
        RequestError: they are not a dict, or the request has several answers.
    """
    found = (params.extra_args or {}).get(KV_TRANSFER_PARAMS)
    if found is None:
        return None
    if not isinstance(found, dict):
        raise RequestError("kv_transfer_params does not map names to values.", KV_TRANSFER_PARAMS)
    if params.n != 1:
        raise RequestError(
            f"kv_transfer_params supports only one answer, but n={params.n}; leave n out.",
            "n",
        )
    return found
