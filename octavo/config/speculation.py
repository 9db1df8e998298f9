"""Settings of speculative decoding."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from octavo.config.section import Section
from octavo.errors import ConfigError


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Drafting and verification of tokens. Names are vLLM's."""

    method: Literal["ngram", "suffix", "draft_model", "eagle", "medusa", "mtp"] | None = None
    """Method: ngram, suffix, draft_model, eagle, medusa or mtp; default: the kind of `model`."""
    model: Annotated[str, Meta(min_length=1)] | None = None
    """Folder or hub id of the draft model or of the heads."""
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=32)] | None = None
    """Maximum number of drafts per request and step; default: 5, or the number of Medusa heads."""
    prompt_lookup_max: Annotated[int, Meta(ge=1, le=64)] | None = None
    """Maximum number of last tokens to look for; default: `prompt_lookup_min`, or 5."""
    prompt_lookup_min: Annotated[int, Meta(ge=1, le=64)] | None = None
    """Minimum number of last tokens to look for; default: `prompt_lookup_max`, or 5."""
    acceptance: Literal["exact", "rejection", "typical"] = "exact"
    """Verification. exact: drafts do not change the answer; rejection and typical: see
    docs/speculative_decoding.md."""

    @property
    def num_drafts(self) -> int:
        """Maximum number of drafts of a request in a step."""
        return self.num_speculative_tokens or 5

    @property
    def has_weights(self) -> bool:
        """True if a draft model, heads or an MTP layer draft."""
        return self.model is not None or self.method == "mtp"

    @property
    def lookup_lengths(self) -> tuple[int, int]:
        """Minimum and maximum length of the sequences to look for."""
        longest = self.prompt_lookup_max or self.prompt_lookup_min or 5
        return self.prompt_lookup_min or longest, longest

    def check(self) -> None:
        """Raise ConfigError if the settings contradict each other."""
        shortest, longest = self.lookup_lengths
        if shortest > longest:
            raise ConfigError(
                f"speculative_config: prompt_lookup_min={shortest} is more than "
                f"prompt_lookup_max={longest}."
            )
        if self.method is None and self.model is None:
            raise ConfigError(
                "speculative_config has neither a method nor a model; give "
                '{"method": "ngram"}, or {"model": "..."} for a draft model.'
            )
        if self.method in ("ngram", "suffix", "mtp") and self.model is not None:
            raise ConfigError(
                f"speculative_config: method={self.method} drafts without another model; leave out "
                f"model={self.model!r}."
            )
        if self.method in ("draft_model", "eagle", "medusa") and self.model is None:
            raise ConfigError(
                f"speculative_config: method={self.method} needs a model; name its folder or hub "
                'id: {"method": "' + self.method + '", "model": "..."}.'
            )
        if self.has_weights and (self.prompt_lookup_max or self.prompt_lookup_min):
            drafter = "method=mtp" if self.model is None else f"model={self.model!r}"
            raise ConfigError(
                f"speculative_config: with {drafter} nothing is looked up in prompts; "
                "leave out prompt_lookup_max and prompt_lookup_min."
            )


class SpeculationConfig(Section, frozen=True):
    """Speculative decoding: draft several tokens and verify them in one step."""

    speculative_config: Annotated[
        SpeculativeConfig | None,
        Meta(
            description='Method that drafts tokens, as JSON: {"method": "ngram",'
            ' "num_speculative_tokens": 5, "prompt_lookup_max": 5, "prompt_lookup_min": 3}, or'
            ' {"model": "..."} with a draft model, EAGLE or Medusa heads, or {"method": "mtp"} with'
            " the model's own MTP layer."
        ),
    ] = None
