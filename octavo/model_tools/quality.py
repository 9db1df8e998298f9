"""`octavo quality`: perplexity of a model, and its distance from another one, on a text.

The text is cut into chunks, which are computed one by one, each from its own beginning. Every token
of a chunk except the first counts. Nothing is random.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.bench import plots, results
from octavo.config import EngineConfig
from octavo.config.arguments import add_engine_settings
from octavo.config.engine_settings import engine_settings
from octavo.errors import ConfigError, reason_of
from octavo.model_tools.chunk_runner import ChunkRunner, log_softmax_
from octavo.model_tools.intervals import CONFIDENCE, Mean, mean_over_chunks
from octavo.model_tools.opened import MODEL_HELP, OpenedModel, model_kwargs
from octavo.plan.memory_plan import MIB, resolve_dtype, resolve_max_model_len
from octavo.system.device import cpu_memory
from octavo.system.tensor import Tensor
from octavo.text.tokenizer import Tokenizer

STORIES = Path(__file__).parent / "stories.txt"
"""Default text: stories of the grammar in `training/own_stories.py`."""
DEQUANTIZED = "dequantized"
"""Base of a quantized model: the same numbers, as float32."""
_TOKENS = 8192
_ONLY_MODEL = ("quantization", "dequantize", "model", "tokenizer", "revision", "hf_overrides")
"""Settings of the model that do not apply to the base."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, the flags of the measurement, and those of the engine."""
    parser.add_argument("model_arg", nargs="?", metavar="MODEL", help=MODEL_HELP)
    add = parser.add_argument_group("quality").add_argument
    add(
        "--base",
        metavar="MODEL",
        help="Model to compare with, such as the same model before its quantization. The flags of "
        "the engine apply to it, too, except --quantization. dequantized: the model itself, with "
        "its weights as numbers of float32.",
    )
    add("--text", metavar="FILE", help="Text in UTF-8; default: little stories in simple English.")
    add("--chunk", type=int, default=512, metavar="N", help="Tokens of a chunk [512].")
    add(
        "--tokens",
        type=int,
        default=_TOKENS,
        metavar="N",
        help=f"Tokens of the text to use, from its beginning [{_TOKENS}].",
    )
    add("--json", action="store_true", help="Print the result as JSON.")
    add("--picture", metavar="FILE", help="Draw the result as FILE.png or FILE.svg.")
    add_engine_settings(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the model, print the figures, and draw them on request.

    Returns:
        See `measure`.

    Raises:
        ConfigError, ModelError, HubError: a flag, a setting or a model is unusable.
        BenchError: the picture cannot be drawn or written.
    """
    if args.picture is not None:
        plots.check(args.picture, "--picture")
        results.check_writable(args.picture)
    result = measure(
        model_kwargs(args), base=args.base, text=args.text, chunk=args.chunk, tokens=args.tokens
    )
    if args.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(result), indent=2).decode() + "\n")
    else:
        _print(result)
    if args.picture is not None:
        plots.quality(result, args.picture)
    return result


def measure(
    kwargs: Mapping[str, Any],
    *,
    base: str | None = None,
    text: str | None = None,
    chunk: int = 512,
    tokens: int = _TOKENS,
) -> dict[str, Any]:
    """Measure a model.

    Args:
        kwargs: settings of the model, as `LLM` takes them.
        base: model to compare with, or `DEQUANTIZED`.
        text: file of the text; None: `STORIES`.
        chunk: tokens of a chunk.
        tokens: tokens of the text to use.

    Returns:
        model, base, text, dtype, num_tokens (those that count), num_chunks, confidence;
        `perplexity`, a `Mean`. With a base also `base_perplexity`; `ratio` of the two, whose
        interval is that of paired chunks; `kl_divergence` of the model from the base in nats per
        token; `same_top_token`, the share of tokens for which both have the same most probable
        token; `layers` or `layers_problem`, see `_Layers`.

    Raises:
        ConfigError, ModelError, HubError: a setting, the text or a model is unusable.
    """
    if chunk < 2:
        raise ConfigError(f"--chunk {chunk}: must be at least 2.")
    if tokens < 2:
        raise ConfigError(f"--tokens {tokens}: must be at least 2.")
    model = _open(kwargs, chunk)
    other = None
    if base is not None:
        if base == DEQUANTIZED:
            settings = {**kwargs, "dequantize": True, "dtype": "float32"}
        else:
            settings = {name: value for name, value in kwargs.items() if name not in _ONLY_MODEL}
            settings["model"] = base
        other = _open(settings, chunk)
        if other.spec.vocab_size != model.spec.vocab_size:
            raise ConfigError(
                f"--base {base} has {other.spec.vocab_size} tokens in its vocabulary, and "
                f"{model.config.model.model} has {model.spec.vocab_size}; name a model with the "
                "same tokenizer."
            )
    chunks = _read_chunks(model, Path(text) if text else STORIES, chunk, tokens)
    _check_memory([opened for opened in (model, other) if opened is not None])
    runner = ChunkRunner(model)
    result: dict[str, Any] = {
        "model": model.config.model.model,
        "base": base,
        "text": text,
        "dtype": runner.setup.dtype,
        "chunk": chunk,
        "num_tokens": sum(len(ids) - 1 for ids in chunks),
        "num_chunks": len(chunks),
        "confidence": CONFIDENCE,
    }
    with results.progress(total=len(chunks), desc="chunks") as bar:
        if other is None:
            losses = []
            for ids in chunks:
                losses.append(_losses(runner, ids))
                bar.update()
            return result | {"perplexity": asdict(_mean(losses).map(math.exp))}
        compared = _Comparison(runner, ChunkRunner(other))
        for ids in chunks:
            compared.add(ids)
            bar.update()
    return result | compared.result()


def _open(kwargs: Mapping[str, Any], chunk: int) -> OpenedModel:
    """Describe a model with the settings of one request of a chunk's length.

    Raises:
        ConfigError: the settings need more than one process, or the chunk is too long.
    """
    config = EngineConfig.from_kwargs(**engine_settings(kwargs))
    device = config.device
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if (size := getattr(device, name)) > 1:
            raise ConfigError(f"{name}={size}: the model is measured in one process; leave it out.")
    if config.speculation.speculative_config is not None:
        raise ConfigError("speculative_config does not change probabilities; leave it out.")
    kwargs = {**kwargs, "language_model_only": True}
    described = OpenedModel.of(dict(kwargs))
    longest = resolve_max_model_len(config, described.spec)
    if chunk > longest:
        raise ConfigError(
            f"--chunk {chunk} is more than the context of {longest} tokens of "
            f"{config.model.model}; lower it."
        )
    step = {"max_model_len": chunk, "max_num_seqs": 1, "max_num_batched_tokens": chunk}
    return OpenedModel.of(dict(kwargs) | step)


def _read_chunks(model: OpenedModel, file: Path, chunk: int, tokens: int) -> list[list[int]]:
    """Return the chunks of a text; each begins with the tokenizer's first token, if it has one.

    Raises:
        ConfigError: the file cannot be read, or has too little text.
    """
    try:
        text = file.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--text {file} cannot be read: {reason_of(error)}.") from None
    tokenizer = Tokenizer.from_folder(model.tokenizer_path, model.config.model.tokenizer_mode)
    first = tokenizer.encode("")[:1]
    ids = tokenizer.encode(text, add_special_tokens=False)[:tokens]
    step = chunk - len(first)
    chunks = [first + ids[at : at + step] for at in range(0, len(ids), step)]
    chunks = [ids for ids in chunks if len(ids) > 1]
    if not chunks:
        raise ConfigError(f"--text {file} has {len(ids)} tokens; at least 2 are needed.")
    too_large = max(max(ids) for ids in chunks)
    if too_large >= model.spec.vocab_size:
        raise ConfigError(
            f"The tokenizer makes the token {too_large}, and the model has "
            f"{model.spec.vocab_size}; name the model's own with --tokenizer."
        )
    return chunks


def _check_memory(models: Sequence[OpenedModel]) -> None:
    """Check that all models fit into the memory together.

    Raises:
        ConfigError: they do not fit.
    """
    needed = sum(
        model.spec.weight_nbytes(resolve_dtype(model.config, model.spec)) for model in models
    )
    free = cpu_memory(models[0].config.device.numa_node)[1]
    if needed > free:
        raise ConfigError(
            f"The weights need {needed / MIB:,.0f} MiB, and {free / MIB:,.0f} MiB are free; use a "
            "smaller model or dtype."
        )


def _losses(runner: ChunkRunner, ids: list[int]) -> NDArray[np.float64]:
    """Return the negative log-likelihood of each token of a chunk but the first."""
    targets, at, losses = np.asarray(ids[1:]), 0, []
    for logits in runner.logits(runner.hidden_states(ids)[: len(targets)]):
        rows = np.arange(len(logits))
        losses.append(-log_softmax_(logits)[rows, targets[at + rows]])
        at += len(logits)
    return np.concatenate(losses).astype(np.float64)


def _mean(chunks: Sequence[NDArray[np.float64]]) -> Mean:
    """Return the mean of the numbers of all tokens, given for each chunk."""
    sums = np.array([numbers.sum() for numbers in chunks])
    return mean_over_chunks(sums, np.array([len(numbers) for numbers in chunks]))


class _Comparison:
    """Comparison of a model with a base, chunk by chunk."""

    def __init__(self, model: ChunkRunner, base: ChunkRunner) -> None:
        self._model, self._base = model, base
        self._figures: dict[str, list[NDArray[np.float64]]] = {
            name: [] for name in ("loss", "base_loss", "difference", "kl", "same")
        }
        self._layers, self._layers_problem = None, _not_comparable(model, base)
        if self._layers_problem is None:
            self._layers = _Layers(model, base)

    def add(self, ids: list[int]) -> None:
        """Compare the models on a chunk."""
        count = len(ids) - 1
        if self._layers is None:
            hidden, base_hidden = self._model.hidden_states(ids), self._base.hidden_states(ids)
        else:
            hidden, base_hidden = self._layers.run(ids)
        targets, at = np.asarray(ids[1:]), 0
        found: list[list[NDArray[Any]]] = [[], [], [], []]
        for logits, base_logits in zip(
            self._model.logits(hidden[:count]), self._base.logits(base_hidden[:count]), strict=True
        ):
            rows = np.arange(len(logits))
            same = logits.argmax(axis=1) == base_logits.argmax(axis=1)
            log_p, log_q = log_softmax_(base_logits), log_softmax_(logits)
            own = targets[at + rows]
            with np.errstate(invalid="ignore"):  # tokens that both exclude
                terms = np.exp(log_p) * (log_p - log_q)
            kl = np.where(log_p == -np.inf, np.float32(0), terms).sum(axis=1, dtype=np.float64)
            for into, values in zip(
                found, (-log_q[rows, own], -log_p[rows, own], kl, same), strict=True
            ):
                into.append(values)
            at += len(logits)
        loss, base_loss, kl, same = (np.concatenate(parts).astype(np.float64) for parts in found)
        chunk = {"loss": loss, "base_loss": base_loss, "difference": loss - base_loss}
        for name, values in (chunk | {"kl": kl, "same": same}).items():
            self._figures[name].append(values)

    def result(self) -> dict[str, Any]:
        """Return the figures; see `measure`."""
        means = {name: _mean(chunks) for name, chunks in self._figures.items()}
        return {
            "perplexity": asdict(means["loss"].map(math.exp)),
            "base_perplexity": asdict(means["base_loss"].map(math.exp)),
            "ratio": asdict(means["difference"].map(math.exp)),
            "kl_divergence": asdict(means["kl"].limited(0.0, math.inf)),
            "same_top_token": asdict(means["same"].limited(0.0, 1.0)),
            "layers": [] if self._layers is None else self._layers.result(),
            "layers_problem": self._layers_problem,
        }


def _not_comparable(model: ChunkRunner, base: ChunkRunner) -> str | None:
    """Return the reason why the layers of two models have no common meaning; None: they do."""
    sizes = [(len(r.setup.spec.layers), r.setup.spec.hidden_size) for r in (model, base)]
    if sizes[0] != sizes[1]:
        return "the base has other sizes: {} layers of {}, and the model {} of {}".format(
            *sizes[1], *sizes[0]
        )
    if model.setup.dtype != base.setup.dtype:
        return f"the model computes in {model.setup.dtype}, and the base in {base.setup.dtype}"
    return None


class _Layers:
    """Errors of single layers.

    Each layer of the model computes the base's residual stream before this layer, so that its own
    error is seen apart from those before it: |own result - base's result| / |base's result| over
    all tokens. The share of a layer is its part of the sum of the squares of these errors.
    Accumulated is the same relative difference of the two models' streams after the layer.
    """

    def __init__(self, model: ChunkRunner, base: ChunkRunner) -> None:
        self._model, self._base = model, base
        # Squares of: own errors, accumulated errors, the base's stream.
        self._squares = np.zeros((len(model.model.layers) + 1, 3))

    def run(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        """Compute a chunk; return the hidden states of the model and of the base."""
        model, base = self._model, self._base
        _, single_step = model.begin(ids, single=True)
        x, step = model.begin(ids)
        base_x, base_step = base.begin(ids)
        residual: Tensor | None = None
        base_residual: Tensor | None = None
        self._add(0, (x, None), (x, None), (base_x, None))
        for i, (layer, base_layer) in enumerate(
            zip(model.model.layers, base.model.layers, strict=True), 1
        ):
            own = layer(base_x, base_residual, single_step)
            base_x, base_residual = base_layer(base_x, base_residual, base_step)
            x, residual = layer(x, residual, step)
            self._add(i, own, (x, residual), (base_x, base_residual))
        return model.model.finish(x, residual), base.model.finish(base_x, base_residual)

    def _add(
        self,
        i: int,
        own: tuple[Tensor, Tensor | None],
        accumulated: tuple[Tensor, Tensor | None],
        base: tuple[Tensor, Tensor | None],
    ) -> None:
        truth = self._base.stream(*base)
        for kind, found in enumerate((own, accumulated)):
            error = self._model.stream(*found) - truth
            self._squares[i, kind] += np.square(error, dtype=np.float64).sum()
        self._squares[i, 2] += np.square(truth, dtype=np.float64).sum()

    def result(self) -> list[dict[str, Any]]:
        """Return name, error, share and accumulated of the embedding and of each layer."""
        whole = np.maximum(self._squares[:, 2], np.finfo(np.float64).tiny)
        squares = self._squares[:, :2] / whole[:, None]
        total = max(float(squares[:, 0].sum()), np.finfo(np.float64).tiny)
        return [
            {
                "name": "embedding" if i == 0 else f"layer {i - 1}",
                "error": math.sqrt(own),
                "share": own / total,
                "accumulated": math.sqrt(accumulated),
            }
            for i, (own, accumulated) in enumerate(squares.tolist())
        ]


def _print(result: Mapping[str, Any]) -> None:
    """Print the figures."""
    percent = f"{result['confidence']:.0%}"
    source = result["text"] or "the built-in stories"
    print(
        f"{result['model']} on {result['num_tokens']:,} tokens of {source}, in "
        f"{results.counted(result['num_chunks'], 'chunk')} of {result['chunk']} tokens"
    )
    if result["num_chunks"] < 2:
        print("One chunk has no confidence interval; use a longer text or a shorter --chunk.")
    names = {
        "perplexity": "perplexity",
        "base_perplexity": "perplexity of the base",
        "ratio": "ratio of the perplexities (paired)",
        "kl_divergence": "KL divergence, nats per token",
        "same_top_token": "same most probable token",
    }
    rows = [
        (
            title,
            *(
                "" if result[name][key] is None else f"{result[name][key]:.5g}"
                for key in ("value", "low", "high")
            ),
        )
        for name, title in names.items()
        if name in result
    ]
    results.print_table("", ("", "value", f"{percent} from", "to"), rows)
    if result.get("layers"):
        layers = [
            (row["name"], f"{row['error']:.3e}", f"{row['share']:.1%}", f"{row['accumulated']:.3e}")
            for row in result["layers"]
        ]
        columns = ("", "own error", "share", "accumulated")
        results.print_table("relative errors of the layers", columns, layers)
    elif result.get("layers_problem"):
        print(f"No figures of layers: {result['layers_problem']}.")
