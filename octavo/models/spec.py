"""What a model folder holds, read without torch: architecture, sizes, positions, memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError, safe_open

from octavo.dtypes import DTYPE_NBYTES
from octavo.errors import ModelError
from octavo.layers.rope_spec import RopeSpec
from octavo.models.cache import AttentionCache, CacheSpec
from octavo.models.config_json import MOST_JSON_NBYTES, require_file


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only model, complete: what drives the decoder and what the engine plans with.

    The defaults are Llama's.
    """

    architecture: str
    """Name in config.json's `architectures`, e.g. LlamaForCausalLM."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_size: int
    intermediate_size: int
    layer_windows: tuple[int | None, ...]
    """For each layer how many positions a token sees, itself included; None: all."""
    max_model_len: int
    """Longest context in tokens, rope scaling considered."""
    eos_token_ids: tuple[int, ...]
    """Union of config.json's and generation_config.json's, in that order."""
    bos_token_id: int | None
    dtype: str
    """Type of the checkpoint: "float32", "float16", "bfloat16", or "float64", which no model is
    computed in."""
    generation_config: dict[str, float | int] = field(default_factory=dict)
    """The model's default sampling parameters: temperature, top_p, top_k, min_p,
    repetition_penalty, max_tokens, where generation_config.json has them."""

    embed_size: int = 0
    """Width of the embedding; projected to hidden_size where it differs (OPT-350m)."""
    embed_scale: float | None = None
    """Factor on the embedding (Gemma)."""
    embed_norm: bool = False
    """LayerNorm after the embedding (BLOOM)."""
    tie_word_embeddings: bool = False
    positions: Literal["rope", "learned", "alibi"] = "rope"
    ropes: tuple[RopeSpec, ...] = ()
    layer_ropes: tuple[int, ...] = ()
    """For each layer its index in `ropes`; empty without rotary positions."""
    num_learned_positions: int = 0
    learned_position_offset: int = 0
    """Row of the position table that belongs to position 0 (OPT)."""
    alibi_slopes: tuple[float, ...] = ()
    """One for each head; empty without ALiBi."""

    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-6
    norm_weight_offset: float = 0.0
    """Added to the weights of the RMS norms (Gemma: 1)."""
    norm_bias: bool = False
    norm_placement: Literal["pre", "post", "sandwich"] = "pre"
    """Norm before each block, after the residual is added, or before and after the block."""
    final_norm: bool = True

    layer_scales: tuple[float, ...] = ()
    """Factor on the attention scores of each layer."""
    qkv_bias: bool = False
    qkv_clip: float | None = None
    """Queries, keys and values are cut to [-qkv_clip, qkv_clip] (MPT)."""
    qk_norm: bool = False
    """RMS norm over each head of queries and keys (Qwen3, Gemma 3)."""
    o_bias: bool = False
    attn_logit_softcap: float | None = None
    final_logit_softcap: float | None = None

    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    gated_mlp: bool = True
    mlp_bias: bool = False

    @classmethod
    def from_folder(cls, path: Path | str, *, trust_remote_code: bool = False) -> ModelSpec:
        """Reads config.json and generation_config.json of a Hugging Face model folder.

        Args:
            path: the folder.
            trust_remote_code: accept a config that names code of its own (`auto_map`). The code
                is never run: the model is computed by Octavo's own decoder.

        Raises:
            ModelError: naming file, field, value and what is supported.
        """
        from octavo.models.registry import read_spec

        return read_spec(Path(path), trust_remote_code=trust_remote_code)

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        """What each layer keeps of the tokens that it has seen, in the order of the layers."""
        return tuple(
            AttentionCache(self.num_key_value_heads, self.head_size, window)
            for window in self.layer_windows
        )

    def weight_nbytes(
        self, dtype: str, max_model_len: int | None = None, quantization: str | None = None
    ) -> int:
        """Bytes of the loaded model: packed weights, embeddings, vectors, position tables.

        Args:
            dtype: "float32", "float16" or "bfloat16".
            max_model_len: rows of the rotary tables; default: the model's.
            quantization: form of the linear weights, as in `ModelConfig`.
        """
        from octavo.models.weights import Weight, model_weights
        from octavo.quantization.base import get_quantization, linear_nbytes

        form = get_quantization(quantization)

        def nbytes(weight: Weight) -> int:
            if weight.kind == "linear":
                return linear_nbytes(weight.shape[0], weight.shape[1], dtype, form)
            return math.prod(weight.shape) * DTYPE_NBYTES[dtype]

        tables = sum(4 * (max_model_len or self.max_model_len) * r.rotary_dim for r in self.ropes)
        weights = model_weights(self, quantized=form is not None)
        return sum(nbytes(w) for w in weights) + tables + 4 * len(self.alibi_slopes)

    def loading_nbytes(self, dtype: str) -> int:
        """Upper bound of what loading holds beside the loaded weights.

        Weights are read one at a time: the largest one as float32, or float64 where the checkpoint
        is, and converted, before packing.

        Args:
            dtype: "float32", "float16" or "bfloat16".
        """
        from octavo.models.weights import model_weights

        source = 8 if self.dtype == "float64" else 4
        return (source + DTYPE_NBYTES[dtype]) * max(math.prod(w.shape) for w in model_weights(self))


def checkpoint_dtype(folder: Path) -> str:
    """Type of the weights of a checkpoint whose config names none, from safetensors headers.

    Raises:
        ModelError: for a damaged header, or a type that is not supported.
    """
    names = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    for file in sorted(folder.glob("*.safetensors")):
        for dtype, _ in read_safetensors_header(file).values():
            if dtype in names:
                return names[dtype]
    return "float32"


def read_safetensors_header(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The header of a safetensors file: name -> (type, shape).

    The library checks it: that no tensors overlap, and that the file holds them all.

    Raises:
        ModelError: if the file is cut off or is no safetensors file.
    """
    require_file(file)
    try:
        with file.open("rb") as stream:
            if int.from_bytes(stream.read(8), "little") > MOST_JSON_NBYTES:
                raise ValueError("the header's length is impossible")
        with safe_open(file, framework="numpy") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
            return {name: (s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{file} is damaged or cut off ({error}); fetch the file again.") from None
