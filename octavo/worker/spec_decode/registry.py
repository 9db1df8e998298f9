"""Registry of drafting methods."""

from __future__ import annotations

from octavo.worker.spec_decode.base import Proposer, Target
from octavo.worker.spec_decode.draft_model import DraftModelProposer
from octavo.worker.spec_decode.eagle import EagleProposer
from octavo.worker.spec_decode.medusa import MedusaProposer
from octavo.worker.spec_decode.ngram import NgramProposer
from octavo.worker.spec_decode.suffix import SuffixProposer

_METHODS: dict[str, type[Proposer]] = {
    "ngram": NgramProposer,
    "suffix": SuffixProposer,
    "draft_model": DraftModelProposer,
    "medusa": MedusaProposer,
    "eagle": EagleProposer,
    "mtp": EagleProposer,
}


def make_proposer(target: Target) -> Proposer | None:
    """Return the configured proposer, or None."""
    config = target.setup.config.speculation.speculative_config
    if config is None:
        return None
    assert config.method is not None
    return _METHODS[config.method](target)
