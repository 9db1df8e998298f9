"""Ask for many adapters at once in every layout, kill engines and workers, compare each answer.

    python benchmarks/lora_acceptance.py [--layout tp2 ray-tp2] [--requests 200] [--kills 2]

The adapters are of mixed kinds and ranks; `MAKERS` has a function for each kind. They are adapters
of the built-in model, or with --experts of a small mixture of experts with random weights. With
draft models, every second one has an adapter of the draft model. The requests are greedy and
sampled, structured, with n = 2, streamed, and with long prompts. Each must give the tokens,
logprobs and text that its adapter gives alone, one request after the other, in a fresh engine. In
float32, the greedy tokens must be those of PEFT's merged model, or of PEFT's model where PEFT
cannot merge. In each layout the requests are sent together, repeatedly, until the kills have
happened. Exit status 1: an answer differs, or something is left of a server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
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
from octavo.config import BUILTIN_DRAFT_MODEL, BUILTIN_MODEL
from octavo.models.adaptable_model import AdaptableModel
from octavo.models.hub import resolve_model
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
COMMON_FIELDS = {"peft_type": "LORA", "task_type": "CAUSAL_LM"}
WHOLE = ["embed_tokens", "lm_head"]
"""Modules that some adapters replace."""
MAX_RANK = 16
INVOCATION = [7, 5, 7]
"""Tokens at which the activated adapters begin; three of four prompts have them."""
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


def of_embedding(
    model: AdaptableModel, modules: list[str], rng: np.random.Generator, rank: int
) -> Adapter:
    """Return a LoRA of the embedding and of some modules."""
    tensors, fields = plain(model, modules, rng, rank)
    (name,) = (name for name, module in model.modules.items() if module.is_embedding)
    embedding = model.modules[name]
    prefix = f"base_model.model.{name}.lora_embedding"
    tensors[f"{prefix}_A"] = rng.standard_normal((rank, embedding.inputs), np.float32) / rank
    tensors[f"{prefix}_B"] = 0.05 * rng.standard_normal((embedding.outputs, rank), np.float32)
    return tensors, fields | {"target_modules": [*modules, name]}


def of_head(
    model: AdaptableModel, modules: list[str], rng: np.random.Generator, rank: int
) -> Adapter:
    """Return a LoRA of the LM head and of some modules."""
    return plain(model, [*modules, "lm_head"], rng, rank)


def with_whole_modules(
    model: AdaptableModel, modules: list[str], rng: np.random.Generator, rank: int
) -> Adapter:
    """Return a LoRA of some modules with its own embedding and LM head."""
    tensors, fields = plain(model, modules, rng, rank)
    (name,) = (name for name, module in model.modules.items() if module.is_embedding)
    for whole in (name, "lm_head"):
        shape = model.modules[name].weight_shape
        tensors[f"base_model.model.{whole}.weight"] = rng.standard_normal(shape, np.float32) / 16
    return tensors, fields | {"modules_to_save": WHOLE}


def activated(
    model: AdaptableModel, modules: list[str], rng: np.random.Generator, rank: int
) -> Adapter:
    """Return an activated LoRA of some modules."""
    tensors, fields = plain(model, modules, rng, rank)
    return tensors, fields | {"alora_invocation_tokens": INVOCATION}


def of_experts(
    model: AdaptableModel, modules: list[str], rng: np.random.Generator, rank: int
) -> Adapter:
    """Return a LoRA of all experts, of routers and of some modules, as PEFT fuses experts."""
    tensors, fields = plain(model, modules, rng, rank)
    layers = sorted({name.partition(".experts.")[0] for name in model.modules if _is_expert(name)})
    experts = model.modules[f"{layers[0]}.gate"].outputs
    for layer in layers:
        parts = {".experts.base_layer": ("gate_proj", 2), ".experts": ("down_proj", 1), ".gate": ()}
        for part, names in parts.items():
            if names:
                shape = model.modules[f"{layer}.experts.0.{names[0]}"]
                inputs, outputs, ranks = shape.inputs, names[1] * shape.outputs, experts * rank
            else:
                shape = model.modules[f"{layer}.gate"]
                inputs, outputs, ranks = shape.inputs, shape.outputs, rank
            a = rng.standard_normal((ranks, inputs), np.float32) / inputs**0.5
            b = 0.3 * rng.standard_normal((outputs, ranks), np.float32) / rank**0.5
            tensors[f"base_model.model.{layer}{part}.lora_A.weight"] = a
            tensors[f"base_model.model.{layer}{part}.lora_B.weight"] = b
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]
    return tensors, fields | {"target_parameters": parameters}


def single_experts(fused: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the tensors of `of_experts` with a pair of factors for each expert."""
    tensors = {}
    for name, a in fused.items():
        if not name.endswith(".lora_A.weight"):
            continue
        other = name.replace(".lora_A.", ".lora_B.")
        b, (layer, experts, _) = fused[other], name.partition(".experts")
        if not experts:
            tensors |= {name: a, other: b}
            continue
        count = fused[f"{layer}.gate.lora_B.weight"].shape[0]
        rank, is_first = len(a) // count, ".base_layer." in name
        modules = ("gate_proj", "up_proj") if is_first else ("down_proj",)
        for expert in range(count):
            for module, rows in zip(
                modules, np.split(b[:, expert::count], len(modules)), strict=True
            ):
                own = f"{layer}.experts.{expert}.{module}"
                tensors[f"{own}.lora_A.weight"] = a[expert * rank :][:rank]
                tensors[f"{own}.lora_B.weight"] = np.ascontiguousarray(rows)
    return tensors


def _is_expert(name: str) -> bool:
    return ".experts." in name


MAKERS: list[Callable[[AdaptableModel, list[str], np.random.Generator, int], Adapter]]
MAKERS = [plain, stabilized, patterned, of_some_layers, decomposed, biased]
MAKERS += [of_embedding, of_head, with_whole_modules, activated]
"""Makers of adapters of one kind each, given the names of the linear layers and a rank."""


def write_adapters(
    folder: Path, count: int, model_name: str = BUILTIN_MODEL, *, is_draft: bool = False
) -> list[Path]:
    """Write adapters of a model, of all kinds in turn.

    Adapters of experts, which PEFT reads in one form only, have it in the folder "peft".
    """
    model = AdaptableModel(
        read_spec(open_checkpoint(resolve_model(model_name), "auto")), modules_to_save=WHOLE
    )
    modules = [
        name
        for name in model.modules
        if ".layers." in name and not _is_expert(name) and not name.endswith(".mlp.gate")
    ]
    makers = [*MAKERS, of_experts] if any(map(_is_expert, model.modules)) else MAKERS
    paths = []
    for number in range(count):
        rng = np.random.default_rng(number)
        rank = int(rng.integers(1, MAX_RANK + 1))
        make = makers[number % len(makers)]
        if is_draft and make is activated:  # its model's adapter is none
            make = plain
        tensors, fields = make(model, modules, rng, rank)
        path = folder / f"{'draft' if is_draft else 'adapter'}-{number}"
        _write(path, tensors, fields)
        if make is of_experts and number // len(makers) % 2:
            shutil.copytree(path, folder / "peft" / path.name)
            del fields["target_parameters"]
            _write(path, single_experts(tensors), fields)
        paths.append(path)
    return paths


def _write(path: Path, tensors: dict[str, np.ndarray[Any, Any]], fields: dict[str, Any]) -> None:
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(COMMON_FIELDS | fields))
    save_file(tensors, path / "adapter_model.safetensors")


def write_mixture(folder: Path) -> str:
    """Write a mixture of experts with random weights and the built-in tokenizer."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=4096,
            hidden_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            intermediate_size=96,
            moe_intermediate_size=40,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            initializer_range=0.2,
            bos_token_id=0,
            eos_token_id=2,
        )
    )
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve_model(BUILTIN_MODEL) / name, folder)
    return str(folder)


def make_requests(count: int, names: list[str]) -> list[dict[str, Any]]:
    """Return bodies of mixed requests, each of one of the models `names`.

    Three of four prompts have the tokens at which activated adapters begin.
    """
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
        prompt = [rng.randint(300, 3000) for _ in range(length)]
        if rng.random() < 0.75:
            at = rng.randint(0, length)
            prompt[at:at] = INVOCATION
        made.append(
            {
                "model": names[number * 7 % len(names)],
                "prompt": prompt,
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


def ask_alone(model: str, path: Path | None, bodies: list[dict[str, Any]]) -> list[Bits]:
    """Return the answers of an adapter, or of the model, alone in an engine of its own."""
    adapter = None if path is None else LoRARequest(path.name, 1, str(path))
    found: list[Bits] = []
    lora: dict[str, Any] = {"max_lora_rank": MAX_RANK}
    if path is not None:
        lora |= {"enable_lora": True, "lora_modules_to_save": WHOLE}
    with LLM(model, **COMMON, **lora) as llm:
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


def compare_with_peft(
    base: str, path: Path | None, bodies: list[dict[str, Any]], found: list[Bits]
) -> int:
    """Return the number of greedy answers, all of which are those of PEFT's model.

    It is merged if PEFT can merge the adapter: not biases of B, activated LoRA, and one of the
    embedding and the LM head if they are tied.

    Raises:
        AssertionError: a token is not the most likely one.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(resolve_model(base), dtype=torch.float32)
    if path is not None:
        twin = path.parent / "peft" / path.name
        model = PeftModel.from_pretrained(model, twin if twin.exists() else path)
        config = model.peft_config["default"]
        changes_tied = model.config.tie_word_embeddings and (
            config.modules_to_save or any(it.endswith(tuple(WHOLE)) for it in config.target_modules)
        )
        if not config.lora_bias and not config.alora_invocation_tokens and not changes_tied:
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
    layout: str,
    model: str,
    paths: list[Path],
    drafts: list[Path],
    bodies: list[dict[str, Any]],
    wanted: list[Bits],
    kills: int,
) -> bool:
    """Compare all answers in a layout; return True if they are right."""
    modules = [{"name": path.name, "path": str(path)} for path in paths]
    if layout == "draft":
        for module, draft in zip(modules[::2], drafts, strict=True):
            module["draft_path"] = str(draft)
    flags = [*LAYOUTS[layout], "--enable-lora", "--max-loras", "4", "--max-cpu-loras", "8"]
    flags += ["--max-lora-rank", str(MAX_RANK), "--max-num-seqs", "32"]
    flags += [
        word
        for name, value in COMMON.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    flags += ["--progress-timeout", "60"]
    flags += ["--lora-modules-to-save", *WHOLE, "--lora-modules", *map(json.dumps, modules)]
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="la-") as folder:
        with Site(model, "plain", flags, Path(folder)) as site:
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
    parser.add_argument("--experts", action="store_true", help="a mixture of experts")
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--kills", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        base = write_mixture(Path(folder) / "mixture") if args.experts else BUILTIN_MODEL
        paths = write_adapters(Path(folder), args.adapters, base)
        drafts = write_adapters(
            Path(folder), (args.adapters + 1) // 2, BUILTIN_DRAFT_MODEL, is_draft=True
        )
        models: dict[str, Path | None] = {base: None}
        models |= {path.name: path for path in paths}
        bodies = make_requests(args.requests, list(models))
        wanted: list[Bits] = [[]] * len(bodies)
        greedy = 0
        for name, path in models.items():
            own = [number for number, body in enumerate(bodies) if body["model"] == name]
            found = ask_alone(base, path, [bodies[number] for number in own])
            greedy += compare_with_peft(base, path, [bodies[number] for number in own], found)
            for number, bits in zip(own, found, strict=True):
                wanted[number] = bits
        print(
            f"{len(bodies)} requests for {len(models) - 1} adapters and the model, each alone; the "
            f"{greedy} greedy answers are those of PEFT",
            flush=True,
        )
        well = [
            run(layout, base, paths, drafts, bodies, wanted, args.kills) for layout in args.layout
        ]
    return 0 if all(well) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the server ends, too
    sys.exit(main())
