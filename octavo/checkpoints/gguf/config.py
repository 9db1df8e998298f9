"""Conversion of a GGUF file's metadata to a Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from octavo.checkpoints.gguf.tokenizer import NO_TOKEN
from octavo.errors import ModelError

_NAMES = {
    "model.embed_tokens": "token_embd",
    "lm_head": "output",
    "model.norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""Modules of Llama, and their names in GGUF; those of layers without their prefixes."""
_HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_SANDWICH = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


@dataclass(frozen=True)
class Architecture:
    """An architecture of GGUF, and the Hugging Face architecture that computes it."""

    name: str
    names: Mapping[str, str] = field(default_factory=lambda: _NAMES)
    """Names of modules in GGUF, see `_NAMES`."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Fields of the config, and the keys of their values, without the architecture's prefix."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the config with one value."""
    windowed: bool = False
    """True if the model has sliding windows, where the file names their size."""
    permuted: bool = False
    """True if the converter has reordered the rows of queries and keys for rotations of
    neighbors."""
    norm_shift: float = 0.0
    """Number that the converter has added to the weights of norms."""


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", permuted=True),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM", _NAMES | _HEAD_NORMS),
    "gemma": Architecture("GemmaForCausalLM", norm_shift=1.0),
    "gemma2": Architecture(
        "Gemma2ForCausalLM",
        _NAMES | _SANDWICH,
        {
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        windowed=True,
        norm_shift=1.0,
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        _NAMES | _SANDWICH | _HEAD_NORMS,
        {"final_logit_softcapping": "final_logit_softcapping"},
        {"rope_local_base_freq": 10000.0},
        windowed=True,
        norm_shift=1.0,
    ),
    "granite": Architecture(
        "GraniteForCausalLM",
        fields={
            "attention_multiplier": "attention.scale",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
        permuted=True,
    ),
    "smollm3": Architecture("SmolLM3ForCausalLM", permuted=True),
    "olmo2": Architecture("Olmo2ForCausalLM", _NAMES | _SANDWICH | _HEAD_NORMS),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        _NAMES | {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
        windowed=True,
    ),
}
"""Architectures by `general.architecture`."""

_FIELDS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
_YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_context_length",
    "attention_factor": "yarn_attn_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}
"""Fields of YaRN's description, and their keys in rope.scaling."""
_NEUTRAL = ("attn_factor", "yarn_ext_factor", "yarn_log_multiplier")
"""Keys in rope.scaling that may only have values without effect."""
_MOST = 1e30
_LARGE_GEMMAS: dict[tuple[str, Any], float] = {("gemma2", 46): 144.0, ("gemma3", 62): 168.0}
"""Scalars of queries of the 27B models, by architecture and layers; others use the head's size."""


class Description:
    """Metadata of a model, with errors that name the file.

    Args:
        file: the file.
        metadata: its metadata.
    """

    def __init__(self, file: Path, metadata: Mapping[str, Any]) -> None:
        self.file, self.metadata = file, metadata
        self.kind = metadata.get("general.architecture")
        found = ARCHITECTURES.get(self.kind) if isinstance(self.kind, str) else None
        if found is None:
            raise self.error(
                f"general.architecture={self.kind!r} is not supported; supported: "
                + ", ".join(ARCHITECTURES)
            )
        self.architecture = found

    def error(self, problem: str) -> ModelError:
        """Return an error that names the file."""
        return ModelError(f"{self.file}: {problem}.")

    def number(self, key: str) -> int | float | None:
        """Return the value of a key of the architecture, or None.

        Raises:
            ModelError: the value is not a finite number, or differs between layers.
        """
        value = self.metadata.get(f"{self.kind}.{key}")
        if isinstance(value, np.ndarray):  # one value for each layer
            same = np.unique(value)
            if len(same) != 1:
                raise self.error(
                    f"{self.kind}.{key} differs between layers, which is not supported"
                )
            value = same[0].item()
        if value is None:
            return None
        if type(value) not in (int, float) or not abs(value) < _MOST:
            raise self.error(f"{self.kind}.{key}={str(value)[:100]!r} is not a finite number")
        # The file has float32 numbers: 1e-06 is the one that was meant.
        return float(str(np.float32(value))) if type(value) is float else value

    def config(self, vocab_size: int, tied: bool, biases: set[str]) -> dict[str, Any]:
        """Return the config.

        Args:
            vocab_size: number of rows of the embedding.
            tied: True if the file has no LM head of its own.
            biases: names of the first layer's tensors that are biases.
        """
        fields = _FIELDS | dict(self.architecture.fields)
        config: dict[str, Any] = {
            name: value for name, key in fields.items() if (value := self.number(key)) is not None
        }
        config |= self.architecture.fixed
        config |= {
            "architectures": [self.architecture.name],
            "vocab_size": vocab_size,
            "tie_word_embeddings": tied,
            "attention_bias": "attn_q.bias" in biases,
            "mlp_bias": "ffn_up.bias" in biases,
        }
        window = self.number("attention.sliding_window")
        if window:  # 0: none
            if not self.architecture.windowed:
                raise self.error(f"{self.kind}.attention.sliding_window is not supported")
            config["sliding_window"] = window
        config |= self._rope(config)
        for name in ("bos", "eos", "pad"):
            if (token := self._token(name)) is not None:
                config[f"{name}_token_id"] = token
        if self.kind in ("gemma2", "gemma3"):
            default = config.get("head_dim", 256)
            layers = config.get("num_hidden_layers")
            config["query_pre_attn_scalar"] = _LARGE_GEMMAS.get((self.kind, layers), default)
        key_size, value_size = (self.number(f"attention.{k}_length") for k in ("key", "value"))
        if key_size is not None and value_size not in (None, key_size):
            raise self.error(
                f"attention.value_length={value_size} differs from key_length={key_size}, which is "
                "not supported"
            )
        return config

    def _rope(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of rotary positions.

        Args:
            config: the other fields.
        """
        fields: dict[str, Any] = {}
        kind = self.metadata.get(f"{self.kind}.rope.scaling.type")
        if kind is not None and str(kind) not in ("none", "linear", "yarn"):
            raise self.error(
                f"rope.scaling.type={str(kind)[:100]!r} is not supported; known: linear, yarn"
            )
        for key in _NEUTRAL:
            if self.number(f"rope.scaling.{key}") not in (None, 0, 1):
                raise self.error(f"rope.scaling.{key} is not supported")
        if kind in ("linear", "yarn"):
            keys = _YARN if kind == "yarn" else {"factor": "factor"}
            values = {name: self.number(f"rope.scaling.{key}") for name, key in keys.items()}
            known = {name: value for name, value in values.items() if value is not None}
            fields["rope_scaling"] = {"rope_type": kind} | known
        rotated, heads = self.number("rope.dimension_count"), config.get("num_attention_heads")
        if rotated and heads:
            head_dim = config.get("head_dim") or config.get("hidden_size", 0) // heads
            if head_dim and rotated != head_dim:
                fields["partial_rotary_factor"] = rotated / head_dim
        return fields

    def _token(self, name: str) -> int | None:
        """Return the id of a special token; None: the file has none, which -1 can say, too."""
        token = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return token if type(token) is int and 0 <= token < NO_TOKEN else None

    def end_tokens(self) -> list[int]:
        """Return the ids of all tokens that end an answer."""
        ids = (self._token(name) for name in ("eos", "eot", "eom"))
        return list(dict.fromkeys(token for token in ids if token is not None))
