"""The list of a model's weights: shapes in memory, and where each comes from in a checkpoint.

The loader and the memory plan both go by it, so what is planned is what is loaded. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from octavo.errors import ModelError
from octavo.models.config_json import ConfigJson
from octavo.models.registry import FAMILIES, Family
from octavo.models.spec import ModelSpec

_MOST_NAMES = 6  # listed in an error message


@dataclass(frozen=True)
class Source:
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    transform: Literal["none", "transpose", "by_head", "skip_rows"] = "none"
    """How to come to the rows wanted: transpose (Conv1D); from q, k, v of each head in turn to
    all q, all k, all v (BLOOM); leave out the first rows (OPT's positions)."""


@dataclass(frozen=True)
class Weight:
    """One tensor of the loaded model."""

    name: str
    """The decoder's name, e.g. layers.0.qkv_proj.weight."""
    kind: Literal["linear", "embedding", "vector", "norm"]
    """linear: packed for the matrix product; the others are plain tensors. A norm's weight is
    near 1 rather than near 0 in a model with random weights."""
    shape: tuple[int, ...]
    sources: tuple[Source, ...]
    """To be stacked along the first dimension."""


def model_weights(spec: ModelSpec, *, quantized: bool = False) -> list[Weight]:
    """All weights of a model, in the order in which the forward pass uses them.

    Args:
        spec: the model.
        quantized: the LM head will be, so that it cannot serve as embedding table, too.
    """
    return list(_Weights(spec, FAMILIES[spec.architecture], quantized).all())


class _Weights:
    def __init__(self, spec: ModelSpec, family: Family, quantized: bool) -> None:
        self.spec = spec
        self.family = family
        self.quantized = quantized

    def all(self) -> Iterator[Weight]:
        spec = self.spec
        hidden, embed = spec.hidden_size, spec.embed_size
        embed_name = str(self.family.names["embed_tokens"]) + ".weight"
        embed_source = Source(embed_name, (spec.vocab_size, embed))
        if not spec.tie_word_embeddings or self.quantized:  # else the LM head serves as the table
            yield Weight("embed_tokens.weight", "embedding", embed_source.shape, (embed_source,))
        if spec.positions == "learned":
            rows, offset = spec.num_learned_positions, spec.learned_position_offset
            source = Source(
                str(self.family.names["embed_positions"]) + ".weight",
                (rows + offset, hidden),
                "skip_rows" if offset else "none",
            )
            yield Weight("embed_positions.weight", "embedding", (rows, hidden), (source,))
        if spec.embed_norm:
            yield from self.norm("embed_norm", hidden)
        if embed != hidden:
            yield from self.linear("project_in", (hidden,), embed, bias=False)
        for i in range(spec.num_layers):
            yield from self.layer(f"layers.{i}.", str(self.family.names["layer"]).format(i) + ".")
        if spec.final_norm:
            yield from self.norm("norm", hidden)
        if embed != hidden:
            yield from self.linear("project_out", (embed,), hidden, bias=False)
        if spec.tie_word_embeddings:
            yield Weight("lm_head.weight", "linear", embed_source.shape, (embed_source,))
        else:
            # Never a Conv1D, not even for GPT-2.
            head = Source(str(self.family.names["lm_head"]) + ".weight", embed_source.shape)
            yield Weight("lm_head.weight", "linear", head.shape, (head,))

    def layer(self, to: str, at: str) -> Iterator[Weight]:
        spec = self.spec
        hidden, inner, head = spec.hidden_size, spec.intermediate_size, spec.head_size
        query, key = spec.num_attention_heads * head, spec.num_key_value_heads * head
        sandwich = spec.norm_placement == "sandwich"
        yield from self.norm("input_norm", hidden, to, at)
        yield from self.linear("qkv_proj", (query, key, key), hidden, spec.qkv_bias, to, at)
        if spec.qk_norm:
            yield from self.norm("q_norm", head, to, at)
            yield from self.norm("k_norm", head, to, at)
        yield from self.linear("o_proj", (hidden,), query, spec.o_bias, to, at)
        if sandwich:
            yield from self.norm("post_attn_norm", hidden, to, at)
        yield from self.norm("mlp_norm", hidden, to, at)
        if spec.gated_mlp:
            yield from self.linear("gate_up_proj", (inner, inner), hidden, spec.mlp_bias, to, at)
        else:
            yield from self.linear("up_proj", (inner,), hidden, spec.mlp_bias, to, at)
        yield from self.linear("down_proj", (hidden,), inner, spec.mlp_bias, to, at)
        if sandwich:
            yield from self.norm("post_mlp_norm", hidden, to, at)

    def norm(self, module: str, size: int, to: str = "", at: str = "") -> Iterator[Weight]:
        name = at + str(self.family.names[module])
        yield Weight(f"{to}{module}.weight", "norm", (size,), (Source(f"{name}.weight", (size,)),))
        if self.spec.norm_bias:
            source = Source(f"{name}.bias", (size,))
            yield Weight(f"{to}{module}.bias", "vector", (size,), (source,))

    def linear(
        self,
        module: str,
        rows: tuple[int, ...],
        columns: int,
        bias: bool,
        to: str = "",
        at: str = "",
    ) -> Iterator[Weight]:
        names = self.family.names[module]
        if isinstance(names, str):
            names, rows = (names,), (sum(rows),)
        conv1d = self.family.linear == "conv1d"
        by_head = module == "qkv_proj" and self.family.qkv == "by_head"
        weights, biases = [], []
        for name, n in zip(names, rows, strict=True):
            weights.append(
                Source(f"{at}{name}.weight", (columns, n), "transpose")
                if conv1d
                else Source(f"{at}{name}.weight", (n, columns), "by_head" if by_head else "none")
            )
            biases.append(Source(f"{at}{name}.bias", (n,), "by_head" if by_head else "none"))
        shape = (sum(rows), columns)
        yield Weight(f"{to}{module}.weight", "linear", shape, tuple(weights))
        if bias:
            yield Weight(f"{to}{module}.bias", "vector", shape[:1], tuple(biases))


def weight_files(folder: Path, load_format: str) -> list[Path]:
    """The files of a folder that hold the weights: `load_format` as in `LoadConfig`; dummy: none.

    Raises:
        ModelError: for an index that is damaged, or names files elsewhere or that are not there.
    """
    match load_format:
        case "dummy":
            return []
        case "pt":
            return _list_files(folder, "pytorch_model.bin.index.json", "pytorch_model*.bin")
    return _list_files(folder, "model.safetensors.index.json", "*.safetensors")


def _list_files(folder: Path, index: str, pattern: str) -> list[Path]:
    """The weight files that the index names, or without one all that fit the pattern."""
    if not (folder / index).exists():
        return [
            file
            for file in sorted(folder.glob(pattern))
            if not file.name.startswith(("consolidated", "adapter_"))
        ]
    weight_map = ConfigJson.load(folder / index).section("weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    outside = [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]
    if outside:
        raise ModelError(
            f"{folder / index} names files outside the folder: {shorten_names(outside)}."
        )
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"{folder / index} names files that are not there: {shorten_names(missing)}. "
            "Fetch the model again."
        )
    return [folder / name for name in names]


def shorten_names(names: list[str]) -> str:
    """The first of some names, for an error message, and how many there are besides."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
