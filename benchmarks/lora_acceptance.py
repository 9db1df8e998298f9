"""Ask for many adapters at once in every layout, kill engines and workers, compare each answer.

    python benchmarks/lora_acceptance.py [--layout tp2 ray-tp2] [--requests 200] [--kills 2]

The adapters of the built-in model are of mixed kinds and ranks; `MAKERS` has a function for each
kind. The requests are greedy and sampled, structured, with n = 2, streamed, and with long prompts.
Each must give the tokens, logprobs and text that its adapter gives alone, one request after the
other, in a fresh engine. In float32, the greedy tokens must be those of PEFT's merged model. In
each layout the requests are sent together, repeatedly, until the kills have happened. Exit status
1: an answer differs, or something is left of a server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from chaos import COMPLETIONS, Answer, Killer, Load, Site
from safetensors.numpy import save_file

from octavo import LLM, LoRARequest, SamplingParams
from octavo.checkpoints.registry import open_checkpoint
from octavo.config import BUILTIN_DRAFT_MODEL, EngineConfig
from octavo.models.adaptable_model import AdaptableModel
from octavo.models.hub import resolve_folders
from octavo.models.registry import read_spec
from octavo.sampling_params import StructuredOutputsParams

_DRAFT = json.dumps({"model": BUILTIN_DRAFT_MODEL})
LAYOUTS: dict[str, list[str]] = {
    "one": [],
    "mp": ["--distributed-executor-backend", "mp"],
    "tp2": ["-tp", "2", "--num-threads", "1"],
    "pp2": ["-pp", "2", "--num-threads", "1"],
    "dp2": ["-dp", "2", "--num-threads", "1"],
    "draft": ["--speculative-config", _DRAFT],
    "ngram": ["--speculative-config", '{"method": "ngram"}'],
    "ray-tp2": ["-tp", "2", "--distributed-executor-backend", "ray", "--num-threads", "1"],
}
"""Flags of each layout."""
COMMON = {"dtype": "float32", "max_model_len": 1024, "max_num_batched_tokens": 256}
MAX_RANK = 16
AT_ONCE = 48
"""Requests that run or wait at the same time."""

Adapter = tuple[dict[str, "np.ndarray[Any, Any]"], dict[str, Any]]
"""Tensors of an adapter, and fields of its config."""


def plain(
    model: AdaptableModel, modules: list[str], rng: np.random.Generator, rank: int
) -> Adapter:
    """Return a LoRA of some modules."""
    tensors = {}
    for name in modules:
        shape = model.modules[name]
        a = rng.standard_normal((rank, shape.inputs), np.float32) / shape.inputs**0.5
        b = rng.standard_normal((shape.outputs, rank), np.float32) * 0.3 / rank**0.5
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
    return tensors, {"r": rank, "lora_alpha": 2 * rank, "target_modules": modules}


def stabilized(
    model: AdaptableModel, modules: list[str], rng: np.random.Generator, rank: int
) -> Adapter:
    """Return an rsLoRA of some modules."""
    tensors, fields = plain(model, modules, rng, rank)
    return tensors, fields | {"use_rslora": True, "lora_alpha": 4}


def patterned(
    model: AdaptableModel, modules: list[str], rng: np.random.Generator, rank: int
) -> Adapter:
    """Return a LoRA whose MLPs have another rank, and whose queries have another alpha."""
    mlps = [name for name in modules if ".mlp." in name]
    others = [name for name in modules if name not in mlps]
    other_rank = rank // 2 + 1
    (tensors, fields), (more, _) = (
        plain(model, others, rng, rank),
        plain(model, mlps, rng, other_rank),
    )
    patterns = {"rank_pattern": {r".*\.mlp\..*": other_rank}, "alpha_pattern": {"q_proj": rank}}
    return tensors | more, fields | patterns | {"target_modules": modules}


def of_some_layers(
    model: AdaptableModel, modules: list[str], rng: np.random.Generator, rank: int
) -> Adapter:
    """Return a LoRA of some modules of every second layer."""
    some = [name for name in modules if int(name.split(".layers.")[1].split(".")[0]) % 2]
    return plain(model, [name for name in some if rng.random() < 0.7] or some, rng, rank)


def decomposed(
    model: AdaptableModel, modules: list[str], rng: np.random.Generator, rank: int
) -> Adapter:
    """Return a DoRA of some modules, whose rows get other norms."""
    tensors, fields = plain(model, modules, rng, rank)
    for name in modules:
        norms = 0.5 + rng.random(model.modules[name].outputs, np.float32)
        tensors[f"base_model.model.{name}.lora_magnitude_vector"] = norms
    return tensors, fields | {"use_dora": True}


def biased(
    model: AdaptableModel, modules: list[str], rng: np.random.Generator, rank: int
) -> Adapter:
    """Return a LoRA of some modules with biases of B."""
    tensors, fields = plain(model, modules, rng, rank)
    for name in modules:
        bias = 0.1 * rng.standard_normal(model.modules[name].outputs, np.float32)
        tensors[f"base_model.model.{name}.lora_B.bias"] = bias
    return tensors, fields | {"lora_bias": True}


MAKERS: list[Callable[[AdaptableModel, list[str], np.random.Generator, int], Adapter]]
MAKERS = [plain, stabilized, patterned, of_some_layers, decomposed, biased]
"""Makers of adapters of one kind each, given the names of the linear layers and a rank."""


def write_adapters(folder: Path, count: int) -> list[Path]:
    """Write adapters of the built-in model, of all kinds in turn."""
    model_folder, _ = resolve_folders(EngineConfig())
    model = AdaptableModel(read_spec(open_checkpoint(model_folder, "auto")))
    modules = [name for name in model.modules if ".layers." in name]
    paths = []
    for number in range(count):
        rng = np.random.default_rng(number)
        rank = int(rng.integers(1, MAX_RANK + 1))
        tensors, fields = MAKERS[number % len(MAKERS)](model, modules, rng, rank)
        path = folder / f"adapter-{number}"
        path.mkdir()
        (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **fields}))
        save_file(tensors, path / "adapter_model.safetensors")
        paths.append(path)
    return paths


def make_requests(count: int, names: list[str]) -> list[dict[str, Any]]:
    """Return bodies of mixed requests, each of one of the models `names`."""
    kinds: list[dict[str, Any]] = [
        {},
        {"stream": True},
        {"temperature": 0.9, "top_p": 0.95, "stream": True},
        {"structured_outputs": {"regex": "(cat|dog|sun|[a-z ]){8,30}"}, "temperature": 0.7},
        {"n": 2, "temperature": 1.0},
        {"stream": True, "long": True},
        {"temperature": 1.0, "long": True, "stream": True, "n": 2},
    ]
    rng, made = random.Random(0), []
    for number in range(count):
        fields = {"temperature": 0.0, "top_p": 1.0, **kinds[number % len(kinds)]}
        length = rng.randint(300, 700) if fields.pop("long", False) else rng.randint(4, 60)
        made.append(
            {
                "model": names[number * 7 % len(names)],
                "prompt": [rng.randint(300, 3000) for _ in range(length)],
                "max_tokens": rng.randint(12, 40),
                "ignore_eos": "structured_outputs" not in fields,
                "seed": number,
                "logprobs": 0,
                "return_token_ids": True,
                **fields,
            }
        )
    return made


Bits = list[tuple[list[int], list[float], str]]
"""Tokens, logprobs and text of each answer to a request."""


def ask_alone(path: Path | None, bodies: list[dict[str, Any]]) -> list[Bits]:
    """Return the answers of an adapter, or of the model, alone in an engine of its own."""
    adapter = None if path is None else LoRARequest(path.name, 1, str(path))
    found: list[Bits] = []
    with LLM(**COMMON, enable_lora=path is not None, max_lora_rank=MAX_RANK) as llm:
        for body in bodies:
            fields = ("temperature", "top_p", "seed", "max_tokens", "ignore_eos", "logprobs")
            params = SamplingParams(n=body.get("n", 1), **{name: body[name] for name in fields})
            if "structured_outputs" in body:
                params.structured_outputs = StructuredOutputsParams(**body["structured_outputs"])
            given = {"prompt_token_ids": body["prompt"]}
            (output,) = llm.generate(given, params, lora_request=adapter, use_tqdm=False)
            found.append(
                [
                    (
                        list(it.token_ids),
                        [
                            r[t].logprob
                            for t, r in zip(it.token_ids, it.logprobs or (), strict=True)
                        ],
                        it.text,
                    )
                    for it in output.outputs
                ]
            )
    return found


def compare_with_peft(path: Path | None, bodies: list[dict[str, Any]], found: list[Bits]) -> int:
    """Return the number of greedy answers, all of which are those of PEFT's model.

    It is merged if PEFT can merge the adapter.

    Raises:
        AssertionError: a token is not the most likely one.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder, _ = resolve_folders(EngineConfig())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if path is not None:
        model = PeftModel.from_pretrained(model, path)
        if not model.peft_config["default"].lora_bias:  # PEFT cannot merge biases of B
            model = model.merge_and_unload()
    count = 0
    for body, bits in zip(bodies, found, strict=True):
        if body["temperature"] > 0:
            continue
        ((tokens, _, _),) = bits
        with torch.no_grad():
            logits = model(torch.tensor([body["prompt"] + tokens])).logits[0]
        best = logits[len(body["prompt"]) - 1 : -1].argmax(-1).tolist()
        assert best == tokens, f"{path}: PEFT's greedy tokens are {best}, and Octavo's {tokens}"
        count += 1
    return count


def bits_of(answer: Answer) -> Bits | str:
    """Return what is compared of an answer of a server; its error if it has one."""
    if answer.error is not None:
        return answer.error
    return [
        (choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["text"])
        for _, choice in sorted(answer.choices.items())
    ]


async def storm(
    site: Site, bodies: list[dict[str, Any]], wanted: list[Bits], kills: int
) -> tuple[list[str], int]:
    """Send all requests repeatedly while processes die; return errors and the number of answers."""
    load, wrong, num_answers = Load(site.url), [], 0
    roles = ("core", "worker", "actor")
    killer = Killer(site, load, kills, roles, ("SIGKILL",), at_once=1, pause=1.0, seed=0)
    limit = asyncio.Semaphore(AT_ONCE)

    async def ask(number: int) -> None:
        nonlocal num_answers
        async with limit:
            found = bits_of(await load.ask(COMPLETIONS, bodies[number]))
        num_answers += 1
        if found != wanted[number]:
            body = bodies[number] | {"prompt": f"{len(bodies[number]['prompt'])} tokens"}
            wrong.append(f"{body}\n  is    {found}\n  alone {wanted[number]}")

    killer.start()
    while True:
        is_last = not killer.is_alive()
        await asyncio.gather(*map(ask, range(len(bodies))))
        if is_last or wrong:
            break
    killer.join(120)
    if killer.failure or killer.done.total() < kills:
        wrong.append(f"{killer.done.total()} kills: {killer.failure}")
    await load.close()
    return wrong, num_answers


def run(
    layout: str, paths: list[Path], bodies: list[dict[str, Any]], wanted: list[Bits], kills: int
) -> bool:
    """Compare all answers in a layout; return True if they are right."""
    flags = [*LAYOUTS[layout], "--enable-lora", "--max-loras", "4", "--max-cpu-loras", "8"]
    flags += ["--max-lora-rank", str(MAX_RANK), "--max-num-seqs", "32"]
    flags += [
        word
        for name, value in COMMON.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    flags += ["--progress-timeout", "60"]
    flags += ["--lora-modules", *(f"{path.name}={path}" for path in paths)]
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="la-") as folder:
        with Site(None, "plain", flags, Path(folder)) as site:
            site.at_rest()
            wrong, num_answers = asyncio.run(storm(site, bodies, wanted, kills))
        wrong += [f"left: {what}" for what in site.left]
        if wrong:
            log = [it for it in site.log.read_text().splitlines() if " POST " not in it]
            print(*wrong[:5], *log[-60:], sep="\n")
    seconds = time.monotonic() - started
    print(f"{layout}: {num_answers} answers, {len(wrong)} wrong, in {seconds:.0f} s", flush=True)
    return not wrong


def main() -> int:
    """Compare all answers in all layouts; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--kills", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = write_adapters(Path(folder), args.adapters)
        models: dict[str, Path | None] = {"octavo/stories": None}
        models |= {path.name: path for path in paths}
        bodies = make_requests(args.requests, list(models))
        wanted: list[Bits] = [[]] * len(bodies)
        greedy = 0
        for name, path in models.items():
            own = [number for number, body in enumerate(bodies) if body["model"] == name]
            found = ask_alone(path, [bodies[number] for number in own])
            greedy += compare_with_peft(path, [bodies[number] for number in own], found)
            for number, bits in zip(own, found, strict=True):
                wanted[number] = bits
        print(
            f"{len(bodies)} requests for {len(models) - 1} adapters and the model, each alone; the "
            f"{greedy} greedy answers are those of PEFT",
            flush=True,
        )
        well = [run(layout, paths, bodies, wanted, args.kills) for layout in args.layout]
    return 0 if all(well) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the server ends, too
    sys.exit(main())
