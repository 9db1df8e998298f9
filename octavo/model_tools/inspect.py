"""`octavo inspect`: description of a model and its features, or of an adapter, without its weights.

Every feature is found by the checks that the engine itself runs before it loads a model: the
command repeats them with the feature's setting, and shows their error.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table
from rich.text import Text

from octavo.bench.results import counted
from octavo.config import EngineConfig
from octavo.config.arguments import add_engine_settings
from octavo.config.engine_settings import engine_settings
from octavo.engine.assemble import grammar_backends, set_up_worker
from octavo.errors import ModelError, OctavoError
from octavo.model_tools.adapter import describe_adapter, is_adapter, print_adapter
from octavo.model_tools.opened import MODEL_HELP, OpenedModel, model_kwargs
from octavo.model_tools.tables import make_console, make_table, mib, print_pairs
from octavo.models.blocks.attention import AttentionSpec
from octavo.models.blocks.base import BlockSpec
from octavo.models.blocks.experts import ExpertsSpec
from octavo.models.blocks.gated_delta import GatedDeltaSpec
from octavo.models.blocks.latent_attention import LatentAttentionSpec
from octavo.models.blocks.mamba import MambaSpec
from octavo.models.blocks.mamba2 import Mamba2Spec
from octavo.models.blocks.mlp import MLPSpec
from octavo.models.blocks.rwkv7 import ChannelMixSpec, TimeMixSpec
from octavo.models.blocks.short_conv import ShortConvSpec
from octavo.models.blocks.sum import SumSpec
from octavo.models.forms import quant_method
from octavo.models.hub import builtin_adapter
from octavo.models.loader import check_inputs
from octavo.models.registry import read_spec
from octavo.models.spec import ModelSpec
from octavo.models.weights import Names, Weight
from octavo.plan.memory_plan import MIB, resolve_dtype, resolve_max_model_len
from octavo.platforms.registry import get_platform
from octavo.quantization.plain import PLAIN
from octavo.quantization.projected import ProjectedTable
from octavo.quantization.registry import FORMS
from octavo.terminal.screen import harmless
from octavo.text.tokenizer import Tokenizer
from octavo.worker.platform import Platform
from octavo.worker.scratch import check_caches

_MOST_RANKS = 8
"""Largest number of ranks to try."""
_DRAFTS = 3
"""Number of speculative tokens to try."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, --json and the flags of the engine."""
    parser.add_argument("model_arg", nargs="?", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--json", action="store_true", help="Print the result as JSON.")
    add_engine_settings(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Describe the model or the adapter, and print the description.

    Returns:
        See `inspect` and `describe_adapter`.

    Raises:
        AdapterError, ConfigError, ModelError, HubError: settings, model or adapter are unusable.
    """
    kwargs = model_kwargs(args)
    path = builtin_adapter(kwargs["model"]) or Path(kwargs["model"]).expanduser()
    adapter = is_adapter(path)
    result = describe_adapter(path) if adapter else inspect(kwargs)
    if args.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(result), indent=2).decode() + "\n")
    elif adapter:
        print_adapter(result)
    else:
        _print(result)
    return result


def inspect(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a model.

    Args:
        kwargs: settings, as `LLM` takes them.

    Returns:
        model, path, architecture, left_out, quantization (method or None), dtype (of weights and
        activations), num_layers, layers (kinds of layers), hidden_size, vocab_size, context_length
        (the model's) and max_model_len (the settings'), in tokens; `parameters`; `weights`: for
        each kind of module its parameters, nbytes in memory, bits_per_weight and forms; `files`:
        number, nbytes, bits_per_weight, problem; `tokenizer`; `features`: see `Feature`.

    Raises:
        ConfigError, ModelError, HubError: settings or model are unusable.
    """
    model = OpenedModel.of(dict(kwargs), with_weights=False)
    config, spec = model.config, model.spec
    platform = get_platform(config.device.device)
    dtype = resolve_dtype(config, spec)
    weights = _describe_weights(spec, dtype)
    parameters = sum(kind.parameters for kind in weights.values())
    tokenizer = _describe_tokenizer(model)
    return {
        "model": config.model.model,
        "path": str(model.path),
        "architecture": spec.architecture,
        "left_out": spec.left_out,
        "quantization": quant_method(model.checkpoint.config) or config.model.quantization,
        "dtype": dtype,
        "num_layers": len(spec.layers),
        "layers": _describe_layers(spec),
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "context_length": spec.max_model_len,
        "max_model_len": resolve_max_model_len(config, spec),
        "parameters": parameters,
        "weights": {
            name: asdict(kind) | {"bits_per_weight": kind.bits} for name, kind in weights.items()
        },
        "files": _describe_files(model, parameters),
        "tokenizer": tokenizer,
        "features": [asdict(feature) for feature in _find_features(model, platform, tokenizer)],
    }


# Weights


@dataclass
class WeightKind:
    """Weights of one kind of module."""

    parameters: int = 0
    nbytes: int = 0
    """Bytes in memory."""
    forms: dict[str, int] = field(default_factory=dict)
    """Number of parameters of each form."""

    @property
    def bits(self) -> float:
        """Bits of a weight in memory."""
        return 8 * self.nbytes / max(self.parameters, 1)


def _describe_weights(spec: ModelSpec, dtype: str) -> dict[str, WeightKind]:
    """Return the weights of each kind of module.

    The table of a tied LM head belongs to the embedding, and its parameters count once, even if
    embedding and LM head have it in different forms.
    """
    found: dict[str, WeightKind] = {}
    counted: set[tuple[object, ...]] = set()
    stored: set[str] = set()
    for kind, weight in _weights_by_kind(spec):
        entry = found.setdefault(kind, WeightKind())
        entry.nbytes += weight.nbytes(dtype)
        size = math.prod(weight.shape)
        whole = all(source.parts is None for source in weight.sources)
        if weight.form == PLAIN and whole:  # with rows that are stored and never used (OPT)
            size = sum(math.prod(source.shape) for source in weight.sources)
        elif isinstance(weight.form, ProjectedTable):  # computed from some other weights, too
            own = [source for source in weight.sources if source.name not in stored]
            size = sum(math.prod(source.shape) for source in own)
        stored |= {source.name for source in weight.sources}
        form = weight.dtype or dtype if weight.form == PLAIN else weight.form.name
        entry.forms[form] = entry.forms.get(form, 0) + size
        key = tuple((source.name, source.parts) for source in weight.sources)
        if key not in counted:
            counted.add(key)
            entry.parameters += size
    order = {name: i for i, name in enumerate(("embedding", "attention", "MLP", "head", "norms"))}
    return dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))


def _weights_by_kind(spec: ModelSpec) -> Iterator[tuple[str, Weight]]:
    """Yield all weights with the kind of their module."""
    blocks: dict[str, str] = {}
    for i, layer in enumerate(spec.layers):
        for sublayer in layer.sublayers:
            kind = _BLOCK_KINDS.get(type(sublayer.block), "other")
            blocks |= {weight.name: kind for weight in sublayer.weights(Names(f"layers.{i}."))}
    for weight in spec.weights():
        if weight.kind == "vector" and "norm" in weight.name:
            yield "norms", weight
        elif weight.name in blocks:
            yield blocks[weight.name], weight
        elif weight.name.startswith("embed.") or (spec.tied and weight.name == "lm_head.weight"):
            yield "embedding", weight
        elif weight.name.startswith(("lm_head.", "project.")):
            yield "head", weight
        else:
            yield "other", weight


_BLOCK_KINDS: dict[type, str] = {
    AttentionSpec: "attention",
    GatedDeltaSpec: "attention",
    TimeMixSpec: "attention",
    ChannelMixSpec: "MLP",
    LatentAttentionSpec: "attention",
    MLPSpec: "MLP",
    ExpertsSpec: "experts",
}


def _describe_layers(spec: ModelSpec) -> list[str]:
    """Return the kinds of layers, and the number of the layers of each kind."""
    counts: dict[str, int] = {}
    for layer in spec.layers:
        text = " + ".join(_describe_block(block) for block in layer.blocks)
        counts[text] = counts.get(text, 0) + 1
    return [f"{count} x {text}" for text, count in counts.items()]


def _describe_block(block: BlockSpec) -> str:
    if isinstance(block, AttentionSpec):
        seen = "" if block.sliding_window is None else f", window {block.sliding_window:,}"
        if block.chunk_size is not None:
            seen = f", chunks of {block.chunk_size:,}"
        values = "" if block.value_size is None else f" of {block.value_size}"
        return (
            f"attention ({block.num_heads} heads of {block.head_size}, {block.num_kv_heads} of "
            f"keys and values{values}{seen})"
        )
    if isinstance(block, LatentAttentionSpec):
        rotated = f"{block.rope_size} rotated" if block.positions else f"{block.rope_size} shared"
        return (
            f"latent attention ({block.num_heads} heads of {block.key_size} + {rotated} and "
            f"{block.value_size} of values, latents of {block.latent_size})"
        )
    if isinstance(block, ChannelMixSpec):
        return f"channel mix ({block.down.inputs:,} inner columns)"
    if isinstance(block, MLPSpec):
        gated = "gated " if block.gated else ""
        return f"MLP ({gated}{block.activation}, {block.down.inputs:,} inner columns)"
    if isinstance(block, GatedDeltaSpec):
        kind = "gated delta rule" if block.decay is None else "Kimi delta attention"
        return (
            f"{kind} ({block.num_heads} heads of {block.key_size} x {block.value_size}, "
            f"{block.num_key_heads} of queries and keys)"
        )
    if isinstance(block, TimeMixSpec):
        return f"time mix ({block.num_heads} heads of {block.head_size})"
    if isinstance(block, Mamba2Spec):
        return f"Mamba-2 ({block.num_heads} heads of {block.head_size} x {block.state_size})"
    if isinstance(block, MambaSpec):
        return f"Mamba ({block.out_proj.inputs:,} channels of {block.state_size})"
    if isinstance(block, ShortConvSpec):
        return f"short convolution ({block.conv.taps} tokens)"
    if isinstance(block, ExpertsSpec):
        shared = "" if block.shared is None else f", {block.shared.down.inputs:,} shared"
        return (
            f"experts ({block.router.routing.top_k} of {len(block.up)}, {block.inner:,} inner "
            f"columns{shared})"
        )
    if isinstance(block, SumSpec):
        return " beside ".join(_describe_block(term.block) for term in block.terms)
    return type(block).__name__


# Files and tokenizer


def _describe_files(model: OpenedModel, parameters: int) -> dict[str, Any]:
    """Return the size of the weight files, whose tensors are compared with the spec.

    Raises:
        ModelError: a file is damaged, or does not belong to the config.
    """
    files, problem = model.checkpoint.weight_files, None
    try:
        model.checkpoint.open(model.spec.expected)
    except ModelError as error:
        if files:
            raise
        problem = str(error)
    nbytes = sum(file.stat().st_size for file in files)
    bits = 8 * nbytes / parameters if nbytes else None
    return {"number": len(files), "nbytes": nbytes, "bits_per_weight": bits, "problem": problem}


def _describe_tokenizer(model: OpenedModel) -> dict[str, Any]:
    """Return the size of the vocabulary and the names of the chat templates, or the problem."""
    try:
        tokenizer = Tokenizer.from_folder(model.tokenizer_path, model.config.model.tokenizer_mode)
    except ModelError as error:
        return {"problem": str(error), "num_tokens": 0, "chat_templates": []}
    templates = list(tokenizer.chat_templates)
    return {"problem": None, "num_tokens": len(tokenizer), "chat_templates": templates}


# Features


@dataclass(frozen=True)
class Feature:
    """Feature of the engine with this model."""

    name: str
    problem: str | None
    """Error that the engine raises; None: the feature works."""
    note: str = ""


def _find_features(
    model: OpenedModel, platform: Platform, tokenizer: Mapping[str, Any]
) -> list[Feature]:
    """Return all features, without the warnings of the settings that are tried."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        return _Features(model, platform).all(tokenizer)
    finally:
        logging.disable(before)


class _Features:
    """Checks of the features, each with one more setting than those of the command line."""

    def __init__(self, model: OpenedModel, platform: Platform) -> None:
        self._model, self._platform = model, platform

    def all(self, tokenizer: Mapping[str, Any]) -> list[Feature]:
        """Return all features.

        Args:
            tokenizer: result of `_describe_tokenizer`.
        """
        path = str(self._model.path)
        drafts = {"num_speculative_tokens": _DRAFTS}
        settings: dict[str, dict[str, Any]] = {
            "prefix caching": {"enable_prefix_caching": True},
            "chunked prefill": {"enable_chunked_prefill": True},
            "n-gram and suffix drafts": {"speculative_config": {"method": "ngram"} | drafts},
            "draft model": {"speculative_config": {"model": path} | drafts},
            **{f"{name} KV cache": {"kv_cache_dtype": name} for name in ("int8", "fp8")},
            **{f"--quantization {name}": {"quantization": name} for name in FORMS if name},
            "prompt embeddings": {"enable_prompt_embeds": True},
            "sleep mode": {"enable_sleep_mode": True},
            "LoRA adapters": {"enable_lora": True},
        }
        features = [Feature(name, self._problem(**added)) for name, added in settings.items()]
        features.append(
            Feature("structured output", tokenizer["problem"], " or ".join(grammar_backends()))
        )
        problem = tokenizer["problem"]
        if problem is None and not tokenizer["chat_templates"]:
            problem = "the model has no chat template; name one with --chat-template"
        features.append(Feature("chat", problem))
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            features.append(self._sizes(name))
        return features

    def _problem(self, **added: Any) -> str | None:
        """Return the error of the engine with more settings; None: no error."""
        model = self._model
        try:
            config = EngineConfig.from_kwargs(**engine_settings(model.kwargs | added))
            spec = read_spec(model.checkpoint, config.model)
            check_inputs(spec.weights())
            setup = set_up_worker(
                config, spec, model.path, self._platform, self._platform.server_batched_tokens
            )
            for stage in setup.stages:
                for rank in stage.peers:
                    rank.part.weights()
            if self._platform.is_native(config.device):
                backend = self._platform.make_attention_backend(setup, self._platform.name)
                check_caches(setup, backend)
        except OctavoError as error:
            return str(error)
        return None

    def _sizes(self, setting: str) -> Feature:
        """Return the numbers of ranks with which the model works."""
        problems = {n: self._problem(**{setting: n}) for n in range(2, _MOST_RANKS + 1)}
        works = [str(n) for n, problem in problems.items() if problem is None]
        first = next((problem for problem in problems.values() if problem is not None), None)
        if not works:
            return Feature(setting, first)
        note = f"{', '.join(works)} of 2 to {_MOST_RANKS}" + ("" if first is None else f": {first}")
        return Feature(setting, None, note)


# Output


def _print(result: Mapping[str, Any]) -> None:
    """Print the description."""
    console = make_console()
    files, tokenizer = result["files"], result["tokenizer"]
    context = f"{result['context_length']:,} tokens"
    if result["max_model_len"] != result["context_length"]:
        context += f", {result['max_model_len']:,} with these settings"
    templates = ", ".join(tokenizer["chat_templates"]) or "none"
    found = files["problem"] or "none"
    if files["bits_per_weight"] is not None:
        found = (
            f"{counted(files['number'], 'file')}, {mib(files['nbytes'])}, "
            f"{files['bits_per_weight']:.2f} bits per weight"
        )
    words = tokenizer["problem"] or (
        f"{tokenizer['num_tokens']:,} tokens; chat templates: {templates}"
    )
    total = sum(kind["nbytes"] for kind in result["weights"].values())
    lines = {
        "architecture": result["architecture"],
        "left out": result["left_out"],
        "path": result["path"],
        "parameters": f"{result['parameters']:,}",
        "layers": "\n".join(result["layers"]),
        "hidden size": f"{result['hidden_size']:,}",
        "vocabulary": f"{result['vocab_size']:,} tokens",
        "context": context,
        "computes in": result["dtype"],
        "quantization": result["quantization"] or "none",
        "weight files": found,
        "tokenizer": words,
    }
    print_pairs(console, harmless(result["model"]), {k: v for k, v in lines.items() if v})
    table = make_table("weights in memory", ("", "parameters", "MiB", "bits per weight"), 1)
    table.add_column("forms")
    for name, kind in result["weights"].items():
        figures = (f"{kind['parameters']:,}", f"{kind['nbytes'] / MIB:,.1f}")
        forms = ", ".join(kind["forms"])
        table.add_row(name, *figures, f"{kind['bits_per_weight']:.2f}", Text(harmless(forms)))
    bits = f"{8 * total / result['parameters']:.2f}"
    table.add_row("whole", f"{result['parameters']:,}", f"{total / MIB:,.1f}", bits, style="bold")
    console.print(table)
    table = Table(title="features", title_justify="left", box=None, show_header=False)
    for feature in result["features"]:
        works = feature["problem"] is None
        mark = Text("yes", "green") if works else Text("no", "red")
        reason = feature["note"] if works else feature["problem"]
        table.add_row(f"  {feature['name']}", mark, Text(harmless(reason)))
    console.print(table)
