"""Adapter that a request uses: vLLM's `LoRARequest`."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.errors import RequestError, UnsupportedError

MAX_ADAPTER_NAME = 256
"""Most characters of an adapter's name."""


class LoRARequest(msgspec.Struct, omit_defaults=True, frozen=True):
    """Adapter for a request. Names are vLLM's.

    Raises:
        RequestError: a field is wrong; the message begins with its name.
        UnsupportedError: a field of vLLM is not supported.
    """

    lora_name: str
    """Name of the adapter in errors, explanations and metrics."""
    lora_int_id: int
    """Number of the adapter, at least 1. The engine reads the files of each pair of number and path
    once; give another number, or `load_inplace`, after a change of the files."""
    lora_path: str = ""
    """Folder of the adapter: adapter_config.json and adapter_model.safetensors, as PEFT writes
    them; or octavo/stories-letters or octavo/stories-llama-calls, the built-in model's adapters."""
    base_model_name: str | None = None
    """Name of the model that the adapter was trained for; it is only shown."""
    tensorizer_config_dict: dict[str, Any] | None = None
    """Unsupported."""
    load_inplace: bool = False
    """True to read the files again if the number and the path are known."""
    draft_path: str | None = None
    """Folder of an adapter of the draft model (`speculative_config`), which then drafts with it; it
    changes no answer. None: it drafts without an adapter. Not in vLLM."""

    def __post_init__(self) -> None:
        """Check the fields."""
        if not isinstance(self.lora_name, str) or not 0 < len(self.lora_name) <= MAX_ADAPTER_NAME:
            raise RequestError(
                f"lora_name={self.lora_name!r:.80} is not allowed; give a name of 1 to "
                f"{MAX_ADAPTER_NAME} characters.",
                "lora_name",
            )
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise RequestError(
                f"lora_int_id={self.lora_int_id!r:.80} is not allowed; give an integer from 1.",
                "lora_int_id",
            )
        if not isinstance(self.lora_path, str) or not self.lora_path:
            raise RequestError(
                f"lora_path={self.lora_path!r:.80} is not allowed; give the folder of the adapter.",
                "lora_path",
            )
        if self.draft_path is not None and (
            not isinstance(self.draft_path, str) or not self.draft_path
        ):
            raise RequestError(
                f"draft_path={self.draft_path!r:.80} is not allowed; give the folder of an adapter "
                "of the draft model, or leave it out.",
                "draft_path",
            )
        if self.tensorizer_config_dict is not None:
            raise UnsupportedError(
                "tensorizer_config_dict is not supported; leave it out, and store the adapter as "
                "safetensors.",
                "tensorizer_config_dict",
            )

    @property
    def name(self) -> str:
        """The adapter's name."""
        return self.lora_name

    @property
    def path(self) -> str:
        """The adapter's folder."""
        return self.lora_path

    @property
    def adapter_id(self) -> int:
        """The adapter's number."""
        return self.lora_int_id
