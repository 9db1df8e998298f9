"""Heads for the built-in model, and their drafts in an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from octavo import LLM, SamplingParams
from octavo.config import BUILTIN_MODEL
from octavo.models.hub import resolve_model
from octavo.scheduler.speculation import DraftLengths
from octavo.worker.spec_decode.base import Proposer
from training.checkpoint import load_model
from training.heads import EagleHead, MedusaHeads, export_head
from training.model import Llama

TEXTS = ["Lily had a red ball. She put the red ball in", "Tom", "The dog saw a cat. " * 12]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, seed=3, n=2, max_tokens=20, ignore_eos=True)
SETTINGS = [
    {},
    {"async_scheduling": False, "enforce_eager": True},
    {"max_num_batched_tokens": 16, "max_num_seqs": 8},
    {"num_gpu_blocks_override": 14, "max_num_seqs": 8},
]
"""Prompts in chunks, and preempted requests, among others."""


def base_model() -> Llama:
    """Return the built-in model in torch, float32."""
    return load_model(resolve_model(BUILTIN_MODEL))


def save(head: EagleHead | MedusaHeads, folder: Path, std: float = 0.03) -> None:
    """Make a head's weights a little random, save it, and read the rounded weights back."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(std * torch.randn(weight.shape, generator=generator))
    export_head(head, folder)
    head.load_state_dict({k: v.float() for k, v in load_file(folder / "model.safetensors").items()})
    assert isinstance(head, nn.Module)


def answers(llm: LLM) -> list[tuple[int, ...]]:
    """Return greedy and sampled answers to `TEXTS`, twice: then prefixes are known."""
    params = [GREEDY] * len(TEXTS) + [SAMPLED] * len(TEXTS)
    outputs = [llm.generate(TEXTS * 2, params, use_tqdm=False) for _ in range(2)]
    return [tuple(a.token_ids) for output in outputs for o in output for a in o.outputs]


def record_proposals(
    monkeypatch: pytest.MonkeyPatch, proposer: type[Proposer]
) -> list[tuple[list[int], Sequence[int]]]:
    """Return a list that collects the tokens of a request and its drafts, from now on.

    The maximum number of drafts is made, even if they do not pay.
    """
    made: list[tuple[list[int], Sequence[int]]] = []
    propose = proposer.propose

    def spy(self, rows, counts):
        batch, proposal = self.target.batch, propose(self, rows, counts)
        for row, drafts in zip(rows.tolist(), proposal.token_ids, strict=True):
            made.append((batch.token_ids[row, : batch.num_tokens[row]].tolist(), list(drafts)))
        return proposal

    monkeypatch.setattr(proposer, "propose", spy)
    monkeypatch.setattr(DraftLengths, "choose", lambda self, num_reqs: self.most)
    return made
