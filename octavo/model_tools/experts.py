"""`octavo experts`: how often each expert of a model is chosen, as a heat map."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from octavo.config.arguments import add_engine_settings
from octavo.errors import ConfigError, reason_of
from octavo.llm import LLM
from octavo.model_tools.opened import MODEL_HELP, model_kwargs
from octavo.model_tools.quality import STORIES
from octavo.sampling_params import SamplingParams

_SHADES = " .:-=+*#%@"
"""From an expert that is never chosen to one that is chosen twice as often as the mean, or more."""
_NUM_STORIES = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, the flags of the run, and those of the engine."""
    parser.add_argument("model_arg", nargs="?", metavar="MODEL", help=MODEL_HELP)
    add = parser.add_argument_group("experts").add_argument
    add(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="Prompt; may be given several times. Default: little stories in simple English.",
    )
    add("--text", metavar="FILE", help="Text in UTF-8; its paragraphs are the prompts.")
    add("--tokens", type=int, default=16, metavar="N", help="Tokens of each answer [16].")
    add("--json", action="store_true", help="Print the numbers as JSON.")
    add_engine_settings(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Count the choices, and print them.

    Returns:
        See `measure`.

    Raises:
        ConfigError, ModelError, HubError: a flag, a setting or the model is unusable.
    """
    result = measure(model_kwargs(args), _read_prompts(args), tokens=args.tokens)
    if args.json:
        sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
    else:
        print("\n".join(draw(result)))
    return result


def _read_prompts(args: argparse.Namespace) -> list[str]:
    if args.prompt is not None and args.text is not None:
        raise ConfigError("--prompt and --text are both given; give one of them.")
    if args.prompt is not None:
        return list(args.prompt)
    path = STORIES if args.text is None else Path(args.text)
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path}: {reason_of(error)}") from error
    prompts = [part.strip() for part in text.split("\n\n") if part.strip()]
    if not prompts:
        raise ConfigError(f"--text {path} has no text.")
    return prompts[:_NUM_STORIES] if args.text is None else prompts


def measure(kwargs: Mapping[str, Any], prompts: Sequence[str], *, tokens: int) -> dict[str, Any]:
    """Answer prompts, and return how many tokens chose each expert.

    Args:
        kwargs: settings of the model, as `LLM` takes them.
        prompts: the prompts.
        tokens: tokens of each answer.

    Returns:
        model, num_prompts; layers: index, the counts of all experts, share of the most chosen one,
        and balancedness, the mean count over the largest.

    Raises:
        ConfigError: the model has no experts, or the device does not count.
    """
    if tokens < 1:
        raise ConfigError(f"--tokens {tokens} is too small; give 1 or more.")
    with LLM(**kwargs) as llm:
        params = SamplingParams(max_tokens=tokens, temperature=0.0)
        llm.generate(list(prompts), params, use_tqdm=False)
        ranks: list[list[tuple[int, list[int]]]] = llm.collective_rpc("expert_loads")
    found = [pair for rank in ranks for pair in rank]
    if not found:
        raise ConfigError(
            f"{kwargs['model']} has no experts, or runs on a device that does not count their "
            "tokens; choose a mixture of experts, and device=cpu."
        )
    layers = [
        {
            "layer": layer,
            "counts": counts,
            "max_share": max(counts) / sum(counts),
            "balancedness": sum(counts) / len(counts) / max(counts),
        }
        for layer, counts in sorted(found)
    ]
    return {"model": kwargs["model"], "num_prompts": len(prompts), "layers": layers}


def draw(result: Mapping[str, Any]) -> list[str]:
    """Return the lines of the heat map: a row for each layer, a character for each expert."""
    layers = result["layers"]
    experts = max(len(layer["counts"]) for layer in layers)
    choices = sum(layers[0]["counts"])
    lines = [
        f"{result['model']}: {choices:,} choices in each layer, {result['num_prompts']} prompts",
        f"Each character is an expert, from 0 on: ' ' is never chosen, '{_SHADES[5]}' as often as "
        f"the mean, '{_SHADES[-1]}' twice as often or more.",
        "",
        f"layer  {'experts':<{experts + 2}}  most  balance",
    ]
    for layer in layers:
        counts = layer["counts"]
        mean = sum(counts) / len(counts)
        row = "".join(map(_shade, (count / mean for count in counts)))
        lines.append(
            f"{layer['layer']:>5}  {'|' + row + '|':<{max(experts, 5) + 2}}  "
            f"{layer['max_share']:>4.0%}  {layer['balancedness']:7.2f}"
        )
    return lines


def _shade(load: float) -> str:
    """Return the character of a load, in means."""
    if load == 0:
        return _SHADES[0]
    return _SHADES[min(len(_SHADES) - 1, 1 + int(load * (len(_SHADES) - 2) / 2))]
