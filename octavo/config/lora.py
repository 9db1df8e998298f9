"""Settings of LoRA adapters."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from octavo.config.section import PositiveInt, Section
from octavo.errors import ConfigError

MODULES_TO_SAVE = ("embed_tokens", "lm_head")
"""Values of `lora_modules_to_save`."""
BUILTIN_ADAPTERS = ("octavo/stories-letters", "octavo/stories-llama-calls")
"""Adapters of the built-in model; their names are accepted as paths."""


_PART = r"\w[\w.-]{0,95}"  # of a hub id: no "." and no ".."
_HUB_ID = re.compile(f"{_PART}/{_PART}", re.ASCII)
_HUB_REPO = re.compile(f"{_PART}/({_PART}|\\*)", re.ASCII)


class LoRAModule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Adapter that a server offers from its start."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    """Value of `model` in requests for the adapter."""
    path: Annotated[str, Meta(min_length=1)]
    """Folder of the adapter."""
    base_model_name: str | None = None
    """Name of the adapter's model in /v1/models; None: the served model's."""
    draft_path: Annotated[str, Meta(min_length=1)] | None = None
    """Folder of the adapter of the draft model; None: it drafts without one."""


class LoRAConfig(Section, frozen=True):
    """LoRA adapters: small changes of the model's weights that requests choose."""

    enable_lora: Annotated[
        bool, Meta(description="Serve LoRA adapters of the model; see docs/lora.md.")
    ] = False
    max_loras: Annotated[
        int, Meta(description="Maximum number of different adapters in a step.", ge=1)
    ] = 1
    max_lora_rank: Annotated[
        int,
        Meta(
            description="Maximum rank of an adapter; memory is planned for this rank.",
            ge=1,
            le=512,
        ),
    ] = 16
    max_cpu_loras: Annotated[
        PositiveInt | None,
        Meta(
            description="Maximum number of adapters in memory, at least max_loras; default:"
            " max_loras. Others are read again when a request needs them."
        ),
    ] = None
    lora_modules_to_save: Annotated[
        list[str],
        Meta(
            description="Large modules that adapters may replace (PEFT's modules_to_save):"
            " embed_tokens, lm_head. Memory is planned for them in each adapter. Heads of"
            " classifiers need no setting."
        ),
    ] = []
    lora_target_modules: Annotated[
        list[str],
        Meta(
            description="Ends of the names of the modules that adapters may change, such as q_proj,"
            " down_proj, or experts for all of these. Memory is planned for them only, and adapters"
            " of others are refused; default: all that adapters can change."
        ),
    ] = []
    lora_modules: Annotated[
        list[str],
        Meta(
            description="Adapters that a server offers from its start: name=path, or JSON such as"
            ' {"name": "a", "path": "/adapters/a"}.'
        ),
    ] = []
    default_mm_loras: Annotated[
        dict[Literal["image", "audio", "video"], Annotated[str, Meta(min_length=1)]],
        Meta(
            description="Adapters of prompts with media that name no adapter, by kind of media:"
            ' {"audio": "/adapters/speech"}. A prompt with several kinds whose adapters differ has'
            " none."
        ),
    ] = {}
    lora_merge: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="Adapter that is merged into the model's weights when they are loaded: a"
            " folder, a hub id or a built-in adapter. It needs no enable_lora."
        ),
    ] = None
    lora_root: Annotated[
        str | None,
        Meta(
            description="Folder of the adapters that /v1/load_lora_adapter may load; default: it"
            " may load none."
        ),
    ] = None
    lora_hub_repos: Annotated[
        list[str],
        Meta(
            description="Hub ids of adapters that clients may load (org/name, or org/* for all of"
            " an owner); default: none."
        ),
    ] = []
    lora_resolvers: Annotated[
        list[str],
        Meta(
            description="Resolvers that find an adapter which a request names as its model and the"
            " server does not know: folder (folders in lora_root), hub (lora_hub_repos), or the"
            " name of an installed one; default: none."
        ),
    ] = []

    @property
    def num_in_memory(self) -> int:
        """Most adapters in memory; 0 if adapters are off."""
        if not self.enable_lora:
            return 0
        return self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras

    @property
    def can_change(self) -> bool:
        """True if the adapters of a running server may change."""
        return self.enable_lora and bool(
            self.lora_root is not None or self.lora_hub_repos or self.lora_resolvers
        )

    @property
    def modules(self) -> list[LoRAModule]:
        """The parsed `lora_modules`.

        Raises:
            ConfigError: one of them has another form.
        """
        return [_parse(text) for text in self.lora_modules]

    def check(self, model_names: list[str]) -> None:
        """Raise ConfigError if the settings contradict each other, or the names of the model."""
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"max_cpu_loras={self.max_cpu_loras} is less than max_loras={self.max_loras}: the "
                "adapters of a step must be in memory. Raise the first or lower the second."
            )
        others = set(self.lora_modules_to_save).difference(MODULES_TO_SAVE)
        if others:
            raise ConfigError(
                f"lora_modules_to_save={self.lora_modules_to_save}: choose from "
                f"{', '.join(MODULES_TO_SAVE)}; heads of classifiers need no setting, and other "
                "modules cannot be replaced."
            )
        names = [module.name for module in self.modules]
        double = next((name for name in names if names.count(name) > 1), None)
        if double is not None:
            raise ConfigError(f"lora_modules names {double!r} twice; give each another name.")
        same = next((name for name in names if name in model_names), None)
        if same is not None:
            raise ConfigError(
                f"lora_modules: {same!r} is the name of the model; give the adapter another name."
            )
        for name in (
            "default_mm_loras",
            "lora_modules",
            "lora_modules_to_save",
            "lora_target_modules",
            "lora_root",
            "lora_hub_repos",
            "lora_resolvers",
        ):
            value = getattr(self, name)
            if value and not self.enable_lora:
                raise ConfigError(
                    f"{name}={value!r} needs adapters; add enable_lora, or leave {name} out."
                )
        for repo in self.lora_hub_repos:
            if not _HUB_REPO.fullmatch(repo):
                raise ConfigError(
                    f"lora_hub_repos={repo!r} is not allowed; write org/name, or org/*."
                )
        for resolver, needed in (("folder", "lora_root"), ("hub", "lora_hub_repos")):
            if resolver in self.lora_resolvers and not getattr(self, needed):
                raise ConfigError(
                    f"lora_resolvers: {resolver} needs {needed}; add it, or leave {resolver} out."
                )

    def allows_from_hub(self, name: str) -> bool:
        """Return True if clients may load the adapter with a hub id, which is no local path."""
        owner = name.partition("/")[0]
        allowed = name in self.lora_hub_repos or f"{owner}/*" in self.lora_hub_repos
        return allowed and _HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def _parse(text: str) -> LoRAModule:
    if re.search("[\ud800-\udfff]", text):
        raise ConfigError(
            f"lora_modules={text!r} is not allowed: its bytes are not UTF-8; rename the folder."
        )
    try:
        if text.lstrip().startswith("{"):
            return msgspec.json.decode(text, type=LoRAModule)
        name, sign, path = text.partition("=")
        if sign:
            return msgspec.convert({"name": name, "path": path}, LoRAModule)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"lora_modules={text!r} is not allowed: {error}.") from None
    raise ConfigError(
        f'lora_modules={text!r} is not allowed; write name=path, or {{"name": "...", "path": '
        '"..."}.'
    )
