"""Compact Llama in torch, laid out for training speed.

The parameter names are those of Hugging Face's ``LlamaForCausalLM`` so that export is a plain
copy. The arithmetic (RMSNorm, rotate-half RoPE, grouped-query attention, SwiGLU) is the same,
which ``tests/training/test_train.py`` compares with transformers.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a Llama; the field names are those of its ``config.json``."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 704
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True

    def to_json(self, **special: int | list[int]) -> dict[str, Any]:
        """Return the ``config.json`` of the exported folder."""
        fields = asdict(self)
        theta = fields.pop("rope_theta")
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **fields,
            "rope_theta": theta,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "initializer_range": 0.02,
            "use_cache": True,
            "torch_dtype": "bfloat16",
            **special,
        }


MAIN = ModelConfig()
DRAFT = ModelConfig(
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
)


def rope_tables(config: ModelConfig, length: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the rotary embedding, each ``[length, head_dim]`` float32."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32), config.rope_theta**-half)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to ``x [batch, heads, length, head_dim]``."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def causal_attention(q: Tensor, k: Tensor, v: Tensor, block: int = 256) -> Tensor:
    """Return causal attention; all tensors are ``[batch, heads, length, head_dim]``.

    Each block of queries uses the keys up to its end. On a CPU and with rows this short, that needs
    half the time of torch's function.
    """
    length, parts = q.shape[2], []
    q = q * q.shape[-1] ** -0.5
    for begin in range(0, length, block):
        end = min(begin + block, length)
        scores = q[:, :, begin:end] @ k[:, :, :end].transpose(-1, -2)
        future = torch.full((end - begin, end), float("-inf"), dtype=q.dtype).triu(begin + 1)
        shares = (scores + future).softmax(-1, dtype=q.dtype)
        parts.append(shares @ v[:, :, :end])
    return torch.cat(parts, dim=2)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        size, dim = config.hidden_size, config.head_dim
        self.heads, self.kv_heads, self.dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            dim,
        )
        self.q_proj = nn.Linear(size, self.heads * dim, bias=False)
        self.k_proj = nn.Linear(size, self.kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(size, self.kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(self.heads * dim, size, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, each ``[batch, heads, length, head_dim]``."""
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.heads, self.dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, self.kv_heads, self.dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.dim).transpose(1, 2)
        group = self.heads // self.kv_heads
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)

    def finish(self, out: Tensor) -> Tensor:
        """Return the output projection of ``[batch, heads, length, head_dim]``."""
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.project(x, cos, sin)
        return self.finish(causal_attention(q, k, v))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Llama(nn.Module):
    """Decoder-only Llama; ``state_dict`` names equal Hugging Face's."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._tables: tuple[Tensor, Tensor] = rope_tables(config, config.max_position_embeddings)
        self.apply(self._init)
        for name, weight in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * config.num_hidden_layers))

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def tables(self, length: int) -> tuple[Tensor, Tensor]:
        cos, sin = self._tables
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else cos.dtype
        return cos[:length].to(dtype), sin[:length].to(dtype)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Return the last layer's output after the final norm: ``[batch, length, hidden]``."""
        x = self.model.embed_tokens(tokens)
        if torch.is_autocast_enabled("cpu"):
            x = x.to(torch.get_autocast_dtype("cpu"))
        cos, sin = self.tables(tokens.shape[1])
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return self.model.norm(x)

    @property
    def head_weight(self) -> Tensor:
        """Return the weight that turns hidden states into logits: ``[vocab, hidden]``."""
        tied = self.config.tie_word_embeddings
        return self.model.embed_tokens.weight if tied else self.lm_head.weight

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.head_weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits ``[batch, length, vocab]`` of ``tokens [batch, length]`` int64."""
        return self.logits(self.hidden(tokens))


def num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def num_trainable(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad)
