"""RWKV 7 in float32, from the equations of the paper (Peng et al., arXiv 2503.14456, section 4).

transformers has no such model. The tensors have the names of flash-linear-attention.
"""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig


class RWKV7Config(PretrainedConfig):
    """Config with the defaults of flash-linear-attention."""

    model_type = "rwkv7"

    def __init__(
        self,
        vocab_size: int = 32000,
        hidden_size: int = 2048,
        num_hidden_layers: int = 24,
        head_dim: int | None = 64,
        num_heads: int | None = None,
        intermediate_size: int | None = None,
        hidden_ratio: float | None = 4.0,
        decay_low_rank_dim: int = 64,
        gate_low_rank_dim: int = 128,
        a_low_rank_dim: int = 64,
        v_low_rank_dim: int = 16,
        norm_eps: float = 1e-5,
        norm_bias: bool = True,
        hidden_act: str = "sqrelu",
        max_position_embeddings: int = 2048,
        tie_word_embeddings: bool = False,
        **fields: Any,
    ) -> None:
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_hidden_layers, self.hidden_act = num_hidden_layers, hidden_act
        self.head_dim = hidden_size // num_heads if head_dim is None and num_heads else head_dim
        self.num_heads = num_heads
        self.intermediate_size, self.hidden_ratio = intermediate_size, hidden_ratio
        self.decay_low_rank_dim, self.gate_low_rank_dim = decay_low_rank_dim, gate_low_rank_dim
        self.a_low_rank_dim, self.v_low_rank_dim = a_low_rank_dim, v_low_rank_dim
        self.norm_eps, self.norm_bias = norm_eps, norm_bias
        self.max_position_embeddings = max_position_embeddings
        self.tie_word_embeddings = tie_word_embeddings
        super().__init__(**fields)


class _LowRank(nn.Module):
    def __init__(self, size: int, rank: int, activation: nn.Module, *, bias: bool = True) -> None:
        super().__init__()
        linears = nn.Linear(size, rank, bias=False), nn.Linear(rank, size, bias=bias)
        self.lora = nn.Sequential(linears[0], activation, linears[1])

    def forward(self, x: Tensor) -> Tensor:
        return self.lora(x)


def _before(x: Tensor) -> Tensor:
    """Return the token before each one of [T, C]; zeros before the first."""
    return torch.cat([torch.zeros_like(x[:1]), x[:-1]])


class _TimeMix(nn.Module):
    def __init__(self, config: RWKV7Config, *, first: bool) -> None:
        super().__init__()
        size, self.head = config.hidden_size, config.head_dim
        for name in "rwkvag":
            self.register_parameter(f"x_{name}", nn.Parameter(torch.zeros(1, 1, size)))
        for name in ("k_k", "k_a"):
            self.register_parameter(name, nn.Parameter(torch.zeros(size)))
        self.r_k = nn.Parameter(torch.zeros(size // self.head, self.head))
        for name in "rkvo":
            self.add_module(f"{name}_proj", nn.Linear(size, size, bias=False))
        self.w_lora = _LowRank(size, config.decay_low_rank_dim, nn.Tanh())
        self.a_lora = _LowRank(size, config.a_low_rank_dim, nn.Identity())
        self.g_lora = _LowRank(size, config.gate_low_rank_dim, nn.Sigmoid(), bias=False)
        if not first:
            self.v_lora = _LowRank(size, config.v_low_rank_dim, nn.Identity())
        heads, eps = size // self.head, self.head * config.norm_eps
        self.g_norm = nn.GroupNorm(heads, size, eps)

    def forward(self, x: Tensor, first_value: Tensor | None) -> tuple[Tensor, Tensor]:
        r, w, k, v, a, g = (torch.lerp(x, _before(x), getattr(self, f"x_{n}")[0]) for n in "rwkvag")
        r, k, value = self.r_proj(r), self.k_proj(k), self.v_proj(v)
        w = torch.exp(-math.exp(-0.5) * torch.sigmoid(self.w_lora(w)))
        a, g = torch.sigmoid(self.a_lora(a)), self.g_lora(g)
        if first_value is None:
            first_value = value
        else:
            value = torch.lerp(value, first_value, torch.sigmoid(self.v_lora(v)))
        heads = (len(x), -1, self.head)
        kappa = F.normalize((k * self.k_k).view(heads), dim=-1)
        k = torch.lerp(k, k * a, self.k_a)
        r, w, k, v, a = (z.view(heads) for z in (r, w, k, value, a))
        state, rows = torch.zeros(v.shape[1], self.head, self.head), []
        for t in range(len(x)):  # equation 17: state = state (diag(w) - kappa^T (a kappa)) + v^T k
            change = torch.diag_embed(w[t]) - kappa[t][:, :, None] * (a[t] * kappa[t])[:, None]
            state = state @ change + v[t][:, :, None] * k[t][:, None]
            rows.append((state @ r[t][:, :, None]).flatten())
        out = self.g_norm(torch.stack(rows))
        out = out + ((r * self.r_k * k).sum(-1, keepdim=True) * v).flatten(1)
        return self.o_proj(out * g), first_value


class _ChannelMix(nn.Module):
    def __init__(self, config: RWKV7Config) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        if inner is None:
            inner = -(-int(size * (config.hidden_ratio or 4)) // 32) * 32
        self.x_k = nn.Parameter(torch.zeros(size))
        self.key = nn.Linear(size, inner, bias=False)
        self.value = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.value(F.relu(self.key(torch.lerp(x, _before(x), self.x_k))) ** 2)


class _Layer(nn.Module):
    def __init__(self, config: RWKV7Config, *, first: bool) -> None:
        super().__init__()
        names = ("pre_norm",) * first + ("attn_norm", "ffn_norm")
        for name in names:
            norm = nn.LayerNorm(config.hidden_size, config.norm_eps, bias=config.norm_bias)
            self.add_module(name, norm)
        self.attn, self.ffn = _TimeMix(config, first=first), _ChannelMix(config)

    def forward(self, x: Tensor, first_value: Tensor | None) -> tuple[Tensor, Tensor]:
        x = self.pre_norm(x) if first_value is None else x
        mixed, first_value = self.attn(self.attn_norm(x), first_value)
        x = x + mixed
        return x + self.ffn(self.ffn_norm(x)), first_value


class RWKV7ForCausalLM(nn.Module):
    """Model with the parts of transformers' interface that the tests use."""

    def __init__(self, config: RWKV7Config) -> None:
        super().__init__()
        self.config, layers = config, range(config.num_hidden_layers)
        self.model = nn.Module()
        self.model.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleList(_Layer(config, first=i == 0) for i in layers)
        self.model.norm = nn.LayerNorm(config.hidden_size, config.norm_eps, bias=config.norm_bias)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def tie_weights(self) -> None:
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embeddings.weight

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.embeddings

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> SimpleNamespace:
        assert not use_cache
        rows = []
        for ids in input_ids:
            x, first_value = self.model.embeddings(ids), None
            for layer in self.model.layers:
                x, first_value = layer(x, first_value)
            rows.append(self.lm_head(self.model.norm(x)))
        return SimpleNamespace(logits=torch.stack(rows))

    def save_pretrained(self, folder: Path) -> None:
        self.config.architectures = ["RWKV7ForCausalLM"]
        self.config.save_pretrained(folder)
        state = dict(self.state_dict())
        if self.config.tie_word_embeddings:
            del state["lm_head.weight"]
        save_file(state, Path(folder) / "model.safetensors")
