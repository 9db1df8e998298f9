"""Small random hybrid models with an MTP layer, and the layer's drafts in torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.models.cases import CASES
from tests.models.harness import make_hf

SIZES = {"vocab_size": 272, "max_position_embeddings": 512}
FIELDS = {"qwen3.5": {"mtp_num_hidden_layers": 1}, "qwen3-next": {}}
"""Fields of config.json by model; configs of Qwen3-Next do not mention the layer."""


class MTPLayer(nn.Module):
    """MTP layer as vLLM's Qwen3_5MultiTokenPredictor and Qwen3NextMultiTokenPredictor compute it.

    Its decoder layer is that of transformers. Its names are those of the checkpoint, after `mtp.`.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        config = model.config
        size, full = config.hidden_size, config.layer_types.index("full_attention")
        norm = type(model.model.norm)
        self.pre_fc_norm_embedding = norm(size, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = norm(size, eps=config.rms_norm_eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([type(model.model.layers[full])(config, full)])
        self.norm = norm(size, eps=config.rms_norm_eps)
        for name, weight in self.named_parameters():
            weight.data.normal_(std=0.2 if "norm" in name else 0.25)
        self.layers[0].self_attn.config._attn_implementation = "eager"
        self._rotary = [model.model.rotary_emb]

    def forward(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """Return the normed outputs [1, T, size].

        Args:
            embedding: [1, T, size] of the tokens at positions 1 to T.
            hidden: [1, T, size], hidden states of the positions 0 to T - 1.
        """
        parts = self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)
        x, tokens = self.fc(torch.cat(parts, -1)), embedding.shape[1]
        mask = torch.full((tokens, tokens), -torch.inf).triu(1)[None, None]
        positions = torch.arange(tokens)[None]
        at = self._rotary[0](x, positions)
        x = self.layers[0](x, position_embeddings=at, attention_mask=mask, position_ids=positions)
        return self.norm(x)


@dataclass
class MTPModel:
    """Saved model with an MTP layer."""

    folder: Path
    hf: Any
    layer: MTPLayer

    @torch.no_grad()
    def guess(self, tokens: list[int]) -> Iterator[Tensor]:
        """Yield the logits of the drafts after some tokens; each draft is the most likely one."""
        ids = torch.tensor([tokens])
        hidden = self.hf.model(ids[:, :-1], use_cache=False).last_hidden_state
        while True:
            out = self.layer(self.hf.model.embed_tokens(ids[:, 1:]), hidden)
            logits = self.hf.lm_head(out[0, -1])
            yield logits
            ids = torch.cat((ids, logits.argmax().view(1, 1)), 1)
            hidden = torch.cat((hidden, out[:, -1:]), 1)


def make(case: str, folder: Path) -> MTPModel:
    """Save a model of `CASES` with an MTP layer that is sometimes right."""
    architecture, config = CASES[case]
    hf = make_hf(architecture, **config | SIZES)
    layer, size = MTPLayer(hf), hf.config.hidden_size
    with torch.no_grad():
        # The next token depends mostly on the last one, in the model and in the layer.
        hf.model.embed_tokens.weight *= 5
        for name, weight in [*hf.named_parameters(), *layer.named_parameters()]:
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                weight *= 0.1
        layer.fc.weight *= 0.4
        layer.fc.weight[:, :size] += torch.eye(size)
    hf.save_pretrained(folder)
    save_file({f"mtp.{n}": x for n, x in layer.state_dict().items()}, folder / "mtp.safetensors")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | FIELDS[case]))
    return MTPModel(folder, hf, layer)
