"""Registry of drafting methods."""

from __future__ import annotations

from importlib import import_module

from octavo.worker.spec_decode.base import Proposer, Target

_METHODS = {
    "ngram": ("ngram", "NgramProposer"),
    "suffix": ("suffix", "SuffixProposer"),
    "draft_model": ("draft_model", "DraftModelProposer"),
    "medusa": ("medusa", "MedusaProposer"),
    "eagle": ("eagle", "EagleProposer"),
    "mtp": ("eagle", "EagleProposer"),
}
"""File and class of each method; only the configured one is imported."""


def make_proposer(target: Target) -> Proposer | None:
    """Return the configured proposer, or None."""
    config = target.setup.config.speculation.speculative_config
    if config is None:
        return None
    assert config.method is not None
    file, name = _METHODS[config.method]
    kind: type[Proposer] = getattr(import_module(f"octavo.worker.spec_decode.{file}"), name)
    return kind(target)
