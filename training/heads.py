"""Speculative heads on the frozen main model: one EAGLE layer, or Medusa heads.

Both are saved as folders of ``config.json`` and ``model.safetensors`` with the tensor names that
vLLM reads (``EagleLlamaForCausalLM``, ``MedusaModel``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.checkpoint import write_json, write_tensors
from training.data import IGNORE, Document
from training.loop import Batch
from training.model import DecoderLayer, Llama, ModelConfig, rope_tables

# Number of successive draft tokens that the EAGLE head is trained on.
STEPS = 3


class EagleHead(nn.Module):
    """EAGLE (Li et al. 2024, section 3): predicts the next hidden state of the main model.

    The input at position t is the embedding of token t+1, concatenated with the main model's hidden
    state of token t (after its final norm). The output approximates the hidden state of token t+1,
    which the main model's LM head turns into logits of token t+2. The layer has no norm on its
    input.
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
        # The layer adds nothing at first; see fit_linear.
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
        self._tables = rope_tables(config, config.max_position_embeddings)

    def step(self, embedding: Tensor, hidden: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Draft one more token from every position at once.

        A draft from position t sees the main model's states up to t and the earlier drafts from t,
        as in the head's use.

        Args:
            embedding: of the token after position t + n, ``[batch, length, hidden]``, where n is
                the number of steps so far.
            hidden: the state of position t + n: the main model's, then this head's guess.
            past: keys and values of the steps so far; those of this step are added.

        Returns: the guessed state of position t + n + 1, ``[batch, length, hidden]``.
        """
        layer, n, length = self.layers[0], len(past), hidden.shape[1]
        x = self.fc(torch.cat((embedding.to(hidden.dtype), hidden), dim=-1))
        cos, sin = (t[n : n + length].to(x.dtype) for t in self._tables)
        q, k, v = layer.self_attn.project(x, cos, sin)
        past.append((k, v))
        first_k, first_v = past[0]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = (q @ first_k.transpose(-1, -2)).masked_fill(future, float("-inf"))
        own = [(q * own_k).sum(-1, keepdim=True) for own_k, _ in past[1:]]
        shares = (torch.cat((scores, *own), dim=-1) * self.config.head_dim**-0.5).softmax(-1)
        seen = shares[..., :length] @ first_v
        for i, (_, own_v) in enumerate(past[1:]):
            seen = seen + shares[..., length + i, None] * own_v
        x = x + layer.self_attn.finish(seen)
        return x + layer.mlp(layer.post_attention_layernorm(x))

    def draft(self, embedding: Tensor, hidden: Tensor, steps: int) -> list[Tensor]:
        """Return the guessed states in ``steps`` steps from each position, if every draft is right.

        ``embedding`` and ``hidden`` are the main model's, ``[batch, length, hidden]``; the result
        of step k is ``[batch, length - steps, hidden]`` and is for the positions k + 1 later.
        """
        past: list[tuple[Tensor, Tensor]] = []
        count = hidden.shape[1] - steps
        guesses = [hidden[:, :count]]
        for k in range(steps):
            guesses.append(self.step(embedding[:, k + 1 : k + 1 + count], guesses[-1], past))
        return guesses[1:]

    def to_json(self) -> dict[str, Any]:
        fields = self.config.to_json()
        return {**fields, "architectures": ["EagleLlamaForCausalLM"], "num_hidden_layers": 1}


class ResidualBlock(nn.Module):
    """Block ``x + silu(W x)`` for each layer (Cai et al. 2024, section 2.1.1)."""

    def __init__(self, size: int):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(size, size, bias=False)])
        nn.init.zeros_(self.layers[0].weight)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaHeads(nn.Module):
    """Medusa heads: head k predicts, from the hidden state of token t, token t+2+k.

    Most of a head's size is its LM head, so the number of heads is small: 2 MB in bfloat16 each for
    the built-in model, whose vocabulary is small.
    """

    def __init__(self, base: Llama, num_heads: int = 3):
        super().__init__()
        size, vocab = base.config.hidden_size, base.config.vocab_size
        self.blocks = nn.ModuleList(ResidualBlock(size) for _ in range(num_heads))
        self.lm_heads = nn.ModuleList(nn.Linear(size, vocab, bias=False) for _ in range(num_heads))
        with torch.no_grad():
            for head in self.lm_heads:
                head.weight.copy_(base.head_weight)

    def forward(self, hidden: Tensor) -> list[Tensor]:
        return [head(block(hidden)) for block, head in zip(self.blocks, self.lm_heads, strict=True)]

    def to_json(self) -> dict[str, Any]:
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": self.lm_heads[0].in_features,
            "vocab_size": self.lm_heads[0].out_features,
            "truncated_vocab_size": self.lm_heads[0].out_features,
            "num_heads": len(self.blocks),
            "num_hidden_layers": 1,
            "max_paths": 64,
            "topk": 10,
            "original_lm_head": False,
            "medusa_fc_bias": False,
            "torch_dtype": "bfloat16",
        }


def fit_linear(head: EagleHead, base: Llama, texts: Sequence[Document]) -> None:
    """Begin with the best linear guess of the next state: ridge regression over ``texts``.

    Embeddings are small compared with hidden states, so the weights from embeddings to hidden
    states are large: training alone would need thousands of steps to reach them.
    """
    seen, wanted = [], []
    with torch.no_grad():
        for text in texts:
            tokens = torch.tensor(text.ids)
            hidden = base.hidden(tokens[None])[0]
            seen.append(torch.cat((base.model.embed_tokens(tokens[1:]), hidden[:-1]), dim=1))
            wanted.append(hidden[1:])
        x, y = torch.cat(seen).double(), torch.cat(wanted).double()
        scale = x.square().mean(0).sqrt().clamp_min(1e-6)
        x = x / scale
        ridge = 1e-3 * len(x) * torch.eye(x.shape[1], dtype=x.dtype)
        solved = torch.linalg.solve(x.T @ x + ridge, x.T @ y) / scale[:, None]
        head.fc.weight.copy_(solved.T)


def _probabilities(logits: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return logits.softmax(-1)


class _SoftLoss(torch.autograd.Function):
    """Mean cross-entropy of logits with a distribution, both ``[n, vocab]``.

    Everything stays in the given dtype: in bfloat16 this needs a third of the time of torch's
    function, and most of the training time is spent here.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, wanted: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            ctx.save_for_backward((logits.softmax(-1) - wanted) / len(logits))
            losses = torch.linalg.vecdot(logits.log_softmax(-1), wanted)
        return -losses.float().mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (saved,) = ctx.saved_tensors
        return saved * gradient.to(saved.dtype), None


def eagle_loss(head: EagleHead, base: Llama) -> Callable[[Batch], Tensor]:
    """Return a loss: regression of the hidden state, and cross-entropy with the main model.

    The head is trained on its own guesses, as in its use (Zhang et al. 2024, "Learning harmonized
    representations for speculative sampling", section 3.2); step k weighs 0.8^k.
    """

    def loss(batch: Batch) -> Tensor:
        tokens, targets = batch
        with torch.no_grad():
            hidden = base.hidden(tokens)
            embedding = base.model.embed_tokens(tokens)
            wanted = _probabilities(base.logits(hidden))
        guesses = head.draft(embedding, hidden, STEPS)
        total = hidden.new_zeros((), dtype=torch.float32)
        for k, guess in enumerate(guesses):
            at = slice(k + 1, k + 1 + guess.shape[1])
            keep = targets[:, at] != IGNORE
            regression = F.smooth_l1_loss(guess[keep].float(), hidden[:, at][keep].float())
            agreed = _SoftLoss.apply(base.logits(guess[keep]), wanted[:, at][keep])
            total = total + 0.8**k * (regression + agreed)
        return total

    return loss


def medusa_loss(heads: MedusaHeads, base: Llama) -> Callable[[Batch], Tensor]:
    """Return the cross-entropy with the main model; head k weighs 0.8^k (their section 2.2)."""

    def loss(batch: Batch) -> Tensor:
        tokens, targets = batch
        with torch.no_grad():
            hidden = base.hidden(tokens)
            wanted = _probabilities(base.logits(hidden))
        total = hidden.new_zeros((), dtype=torch.float32)
        for k, (block, lm_head) in enumerate(zip(heads.blocks, heads.lm_heads, strict=True)):
            keep = targets[:, k + 1 :] != IGNORE
            logits = lm_head(block(hidden[:, : -(k + 1)][keep]))
            total = total + 0.8**k * _SoftLoss.apply(logits, wanted[:, k + 1 :][keep])
        return total

    return loss


def acceptance(
    head: EagleHead | MedusaHeads | Llama, base: Llama, texts: Sequence[Document], steps: int
) -> tuple[list[float], list[float]]:
    """Return the quality of drafts from every token that the main model wrote in ``texts``.

    ``head`` drafts: heads of ``base``, or a separate draft model.

    Returns: the share of k-th draft tokens, the head's first choice, that are the model's tokens if
        those before are; and the average number of accepted drafts of the first k.
    """
    right = []
    with torch.no_grad():
        for text in texts:
            tokens = torch.tensor(text.ids)
            hidden = base.hidden(tokens[None])
            count = len(tokens) - 1 - steps
            first = max(text.counts.index(True) - 1, 0)  # it gave the first counted token
            if count <= first:
                continue
            if isinstance(head, EagleHead):
                embedding = base.model.embed_tokens(tokens[None])
                guesses = [base.logits(g)[0] for g in head.draft(embedding, hidden, steps)]
            elif isinstance(head, Llama):
                own = head(tokens[None])[0]
                guesses = [own[k + 1 :] for k in range(steps)]
            else:
                guesses = [g[0] for g in head(hidden[:, :count])]
            drafts = [g[first:count].argmax(-1) for g in guesses]
            said = [tokens[k + 2 + first : k + 2 + count] for k in range(steps)]
            right.append(torch.stack([d == s for d, s in zip(drafts, said, strict=True)]))
    hits = torch.cat(right, dim=1).double()
    kept = hits.cumprod(dim=0)
    reached = torch.cat((torch.ones_like(kept[:1]), kept[:-1])).sum(1).clamp_min(1)
    return (kept.sum(1) / reached).tolist(), kept.mean(1).cumsum(0).tolist()


def export_head(head: EagleHead | MedusaHeads, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", head.to_json())
    write_tensors(folder / "model.safetensors", head.state_dict())
