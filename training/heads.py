"""Speculative heads on the frozen main model: one EAGLE layer, or Medusa heads.

Both are saved as folders of ``config.json`` and ``model.safetensors`` with the tensor names that
vLLM reads (``EagleLlamaForCausalLM``, ``MedusaModel``).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.checkpoint import write_json, write_tensors
from training.data import IGNORE
from training.loop import Batch
from training.model import DecoderLayer, Llama, ModelConfig, rope_tables
from training.tokenizer import EOS_TOKEN_IDS, PAD_TOKEN_ID


class EagleHead(nn.Module):
    """EAGLE (Li et al. 2024, section 3): predicts the next hidden state of the main model.

    The input at position t is the embedding of token t+1 beside the main model's hidden state of
    token t (after its final norm); the output stands for the hidden state of token t+1, which the
    main model's LM head turns into logits of token t+2. The layer has no norm on its input.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        layer = DecoderLayer(config)
        layer.input_layernorm = nn.Identity()
        self.layers = nn.ModuleList([layer])
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02)
        with torch.no_grad():
            # Begin with "the hidden state stays".
            self.fc.weight[:, config.hidden_size :] += torch.eye(config.hidden_size)
        self._tables = rope_tables(config, config.max_position_embeddings)

    def forward(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """``embedding`` and ``hidden`` are ``[batch, length, hidden]``, and so is the result."""
        x = self.fc(torch.cat((embedding.to(hidden.dtype), hidden), dim=-1))
        cos, sin = (t[: x.shape[1]].to(x.dtype) for t in self._tables)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x

    def to_json(self) -> dict[str, Any]:
        special = {"bos_token_id": 0, "eos_token_id": EOS_TOKEN_IDS, "pad_token_id": PAD_TOKEN_ID}
        fields = self.config.to_json(**special)
        return {**fields, "architectures": ["EagleLlamaForCausalLM"], "num_hidden_layers": 1}


class ResidualBlock(nn.Module):
    """``x + silu(W x)`` for each layer (Cai et al. 2024, section 2.1.1)."""

    def __init__(self, size: int):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(size, size, bias=False)])
        nn.init.zeros_(self.layers[0].weight)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaHeads(nn.Module):
    """Head k predicts, from the hidden state of token t, token t+2+k."""

    def __init__(self, base: Llama, num_heads: int = 3):
        super().__init__()
        size, vocab = base.config.hidden_size, base.config.vocab_size
        self.blocks = nn.ModuleList(ResidualBlock(size) for _ in range(num_heads))
        self.lm_heads = nn.ModuleList(nn.Linear(size, vocab, bias=False) for _ in range(num_heads))
        with torch.no_grad():
            for head in self.lm_heads:
                head.weight.copy_(base.model.embed_tokens.weight)

    def forward(self, hidden: Tensor) -> list[Tensor]:
        return [head(block(hidden)) for block, head in zip(self.blocks, self.lm_heads, strict=True)]

    def to_json(self) -> dict[str, Any]:
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": self.lm_heads[0].in_features,
            "vocab_size": self.lm_heads[0].out_features,
            "truncated_vocab_size": self.lm_heads[0].out_features,
            "num_heads": len(self.lm_heads),
            "num_hidden_layers": 1,
            "max_paths": 64,
            "topk": 10,
            "original_lm_head": False,
            "medusa_fc_bias": False,
            "torch_dtype": "bfloat16",
        }


def _teach(base: Llama, batch: Batch) -> tuple[Tensor, Tensor]:
    """The main model's hidden states, and where the next token counts; ``[batch, length, ...]``."""
    tokens, targets = batch
    with torch.no_grad():
        hidden = base.hidden(tokens)
    return hidden, targets != IGNORE


def _soft_loss(base: Llama, guessed: Tensor, wanted: Tensor) -> Tensor:
    """Cross-entropy of ``guessed`` logits with the main model's distribution at ``wanted``."""
    with torch.no_grad():
        target = base.logits(wanted).float().softmax(-1)
    return F.cross_entropy(guessed.float(), target)


def eagle_loss(head: EagleHead, base: Llama) -> Callable[[Batch], Tensor]:
    """Regression of the hidden state plus cross-entropy with the main model's distribution.

    A third of the hidden states that the head sees are its own guesses, as they are from the
    second drafted token on.
    """

    def loss(batch: Batch) -> Tensor:
        hidden, counts = _teach(base, batch)
        embedding = base.model.embed_tokens(batch[0][:, 1:])
        seen, wanted, keep = hidden[:, :-1], hidden[:, 1:], counts[:, 1:]
        with torch.no_grad():
            guess = head(embedding, seen)
            own = torch.rand(seen.shape[:2]) < 1 / 3
            own[:, 0] = False
            guess = torch.cat((seen[:, :1], guess[:, :-1]), dim=1)
            seen = torch.where(own[..., None], guess.to(seen.dtype), seen)
        out = head(embedding, seen)[keep]
        regression = F.smooth_l1_loss(out.float(), wanted[keep].float())
        return regression + _soft_loss(base, base.logits(out), wanted[keep])

    return loss


def medusa_loss(heads: MedusaHeads, base: Llama) -> Callable[[Batch], Tensor]:
    """Cross-entropy with the main model's distribution; head k weighs 0.8^k (their section 2.2)."""

    def loss(batch: Batch) -> Tensor:
        hidden, counts = _teach(base, batch)
        total = hidden.new_zeros((), dtype=torch.float32)
        for k, (block, lm_head) in enumerate(zip(heads.blocks, heads.lm_heads, strict=True)):
            keep = counts[:, k + 1 :]
            logits = lm_head(block(hidden[:, : -(k + 1)][keep]))
            total = total + 0.8**k * _soft_loss(base, logits, hidden[:, k + 1 :][keep])
        return total

    return loss


def agreement(head: EagleHead | MedusaHeads, base: Llama, rows: list[Tensor]) -> list[float]:
    """How often each drafted token is the main model's own first choice, over ``rows``.

    For EAGLE there is one number (the first drafted token), for Medusa one for each head.
    """
    hits, count = [0.0] * 8, 0
    with torch.no_grad():
        for row in rows:
            hidden = base.hidden(row[None, :-1])
            choice = base.logits(hidden)[0].argmax(-1)
            if isinstance(head, EagleHead):
                guessed = head(base.model.embed_tokens(row[None, 1:-1]), hidden[:, :-1])
                guesses = [base.logits(guessed)[0]]
            else:
                guesses = [g[0] for g in head(hidden)]
            count += len(choice)
            for k, logits in enumerate(guesses):
                n = len(choice) - k - 1
                hits[k] += (logits[:n].argmax(-1) == choice[k + 1 :]).sum().item()
    return [h / count for h in hits[: len(guesses)]]


def export_head(head: EagleHead | MedusaHeads, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", head.to_json())
    write_tensors(folder / "model.safetensors", head.state_dict())
