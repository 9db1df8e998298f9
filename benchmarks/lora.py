"""Speed of generation with LoRA adapters, beside the same model without them.

    python benchmarks/lora.py MODEL --batch 8 --rank 16

The adapters have random numbers and change all linear layers of the decoder's layers. With --dora,
they are DoRA. Two engines take turns: one without adapters, one with `enable_lora`, which serves
requests without an adapter, a batch with one adapter, and a batch in which each request has its
own. The medians of all rounds count.

Then requests for one token show what a load costs: with an adapter in a slot, with one in memory
outside of the slots, and with one that must be read from its file (which the system has in memory).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from octavo import LLM, LoRARequest, SamplingParams
from octavo.checkpoints.registry import open_checkpoint
from octavo.models.adaptable_model import AdaptableModel
from octavo.models.registry import read_spec

SETTINGS = {"enable_prefix_caching": False}


def write_adapters(
    model: AdaptableModel, folder: Path, count: int, rank: int, dora: bool
) -> list[LoRARequest]:
    """Write random adapters of a model, as PEFT does, and return requests for them."""
    rng, requests = np.random.default_rng(0), []
    for number in range(count):
        tensors = {}
        for name, module in model.modules.items():
            if name == "lm_head" or module.is_embedding:
                continue
            a = rng.standard_normal((rank, module.inputs), dtype=np.float32) / module.inputs**0.5
            b = rng.standard_normal((module.outputs, rank), dtype=np.float32) * 0.01
            tensors[f"base_model.model.{name}.lora_A.weight"] = a.astype(np.float16)
            tensors[f"base_model.model.{name}.lora_B.weight"] = b.astype(np.float16)
            if dora:
                magnitude = np.ones(module.outputs, np.float16)
                tensors[f"base_model.model.{name}.lora_magnitude_vector"] = magnitude
        path = folder / f"adapter-{number}"
        path.mkdir()
        targets = sorted({name.split(".")[-3] for name in tensors if "lora_A" in name})
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "use_dora": dora}
        config["target_modules"] = targets
        (path / "adapter_config.json").write_text(json.dumps(config))
        save_file(tensors, path / "adapter_model.safetensors")
        requests.append(LoRARequest(path.name, number + 1, str(path)))
    return requests


def main() -> None:
    """Print tokens per second, and the times of loads."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dora", action="store_true")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    settings = SETTINGS | {"dtype": args.dtype, "max_num_seqs": args.batch, "max_model_len": 512}
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True, temperature=0)
    prompts = [[(7 * i + j) % 1000 + 5 for j in range(16)] for i in range(args.batch)]
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    with tempfile.TemporaryDirectory() as folder, LLM(args.model, **settings) as plain:
        spec = AdaptableModel(read_spec(open_checkpoint(Path(args.model))))
        adapters = write_adapters(spec, Path(folder), args.batch, args.rank, args.dora)
        lora = {"enable_lora": True, "max_loras": args.batch, "max_lora_rank": args.rank}
        with LLM(args.model, **settings, **lora) as llm:
            cases = {
                "without adapters": (plain, None),
                "enable_lora, no adapter": (llm, None),
                "one adapter": (llm, adapters[:1] * args.batch),
                f"{args.batch} adapters": (llm, adapters),
            }
            seconds: dict[str, list[float]] = {name: [] for name in cases}
            for _ in range(args.rounds + 1):
                for name, (engine, requests) in cases.items():
                    start = time.perf_counter()
                    engine.generate(given, params, lora_request=requests, use_tqdm=False)
                    seconds[name].append(time.perf_counter() - start)
            base = statistics.median(seconds["without adapters"][1:])
            for name, times in seconds.items():
                median = statistics.median(times[1:])
                speed = args.batch * args.tokens / median
                print(f"{name}: {speed:.0f} tokens/s, {100 * base / median:.1f} %", flush=True)
        one = SamplingParams(max_tokens=1, temperature=0)
        lora |= {"max_loras": 1, "max_cpu_loras": 2}
        with LLM(args.model, **settings, **lora) as llm:
            orders = {"in its slot": [0, 0], "in memory": [0, 1], "on disk": [0, 1, 2, 3]}
            for name, order in orders.items():
                times = []
                for number in order * 8:
                    start = time.perf_counter()
                    llm.generate(given[:1], one, lora_request=adapters[number], use_tqdm=False)
                    times.append(time.perf_counter() - start)
                print(f"{name}: {1e3 * statistics.median(times[4:]):.2f} ms for one token")


if __name__ == "__main__":
    main()
