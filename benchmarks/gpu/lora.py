"""Adapters: kernels compared with float64 and timed; answers compared with merged weights."""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu.base import Bench
from gpu.correctness import numbers
from gpu.engines import engine, random_ids
from octavo import LLM, LoRARequest, SamplingParams
from octavo.kernels.lora import LoraTable
from octavo.kernels.torch_tensors import from_torch
from octavo.kernels.triton.ops import TritonOps
from octavo.outputs import CompletionOutput

ROWS = 300
"""Rows of the products that are compared: more than those with a program for each split."""
BOUND = 2e-5
"""Largest error of a float32 sum, relative to the largest result."""
RANKS = (3, 16, 64)
MODULES = ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.down_proj")


def check_lora(bench: Bench) -> None:
    """Check and time the kernels, then check the answers of engines."""
    check_kernels(bench)
    check_answers(bench)


def check_kernels(bench: Bench) -> None:
    """Compare all ranks in one call with float64, and rows alone; time calls beside the product.

    The last adapter has gains and offsets, as a DoRA and biases of B have.
    """
    gpu, sizes, n = bench.gpu, bench.sizes, bench.sizes.linear
    ops = TritonOps(gpu.device, upcast=gpu.device.type == "cpu")
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        table, factors = make_table(ops, n, dtype, RANKS, affine=True)
        x, base = torch.randn(ROWS, n, dtype=dtype), torch.randn(ROWS, 2 * n)
        slots = torch.arange(ROWS, dtype=torch.int32) % (len(RANKS) + 1) - 1
        want = base.double()
        for slot, (a, b, affine) in enumerate(factors):
            rows = slots == slot
            want[rows] += 0.5 * (x[rows].double() @ a.double().T) @ b.double().T
            if affine is not None:
                want[rows] = want[rows] * affine[0] + affine[1]
        on_gpu, where, out = (t.to(gpu.device) for t in (x, slots, base.clone()))
        ops.add_lora(out, on_gpu, where, table)
        error = ((out.cpu() - want).abs().max() / want.abs().max()).item()
        bits = True
        for row in (1, 2, 3, ROWS - 1):
            alone = base[row : row + 1].to(gpu.device)
            ops.add_lora(alone, on_gpu[row : row + 1], where[row : row + 1].clone(), table)
            bits &= torch.equal(alone[0], out[row])
        name = str(dtype).removeprefix("torch.")
        bench.add(
            f"adapters of ranks {', '.join(map(str, RANKS))}, the last with gains and offsets, "
            f"{name}: error, a row alone and among {ROWS - 1}",
            f"{error:.1e}, {'the same' if bits else 'other'} bits",
            f"{BOUND:.0e}, the same bits",
            error <= BOUND and bits,
        )
    weight = ops.pack_weight(from_torch(torch.randn(n, n, dtype=torch.bfloat16)))
    for count in sizes.linear_rows:
        x = torch.randn(count, n, dtype=torch.bfloat16, device=gpu.device)
        plain = gpu.seconds(partial(ops.linear, x, weight))
        out = ops.linear(x, weight)
        for ranks, affine in (
            ((16,), False),
            ((16,), True),
            ((16,) * 8, False),
            ((64,) * 8, False),
        ):
            table, _ = make_table(ops, n, torch.bfloat16, ranks, modules=1, affine=affine)
            slots = torch.arange(count, dtype=torch.int32, device=gpu.device) % len(ranks)
            seconds = gpu.seconds(partial(ops.add_lora, out, x, slots, table))
            bench.add(
                f"kernel: {len(ranks)} adapters of rank {ranks[0]}"
                f"{' with gains and offsets' if affine else ''}, {count} x {n} x {n}",
                f"{seconds * 1e6:,.0f} us, {seconds / plain:.0%} of the product's time",
            )


def make_table(
    ops: TritonOps,
    n: int,
    dtype: torch.dtype,
    ranks: tuple[int, ...],
    modules: int = 2,
    *,
    affine: bool = False,
) -> tuple[LoraTable, list[tuple[Tensor, Tensor, Tensor | None]]]:
    """Return adapters of a layer of n inputs and some modules of n outputs.

    The list has the factors of each. With `affine`, the last adapter also has gains and offsets,
    float32 [2, modules * n].
    """
    table = LoraTable(len(ranks), [n] * modules, n, max(ranks))
    factors: list[tuple[Tensor, Tensor, Tensor | None]] = []
    for slot, rank in enumerate(ranks):
        a = (torch.randn(rank, n) / n**0.5).to(dtype)
        b = (torch.randn(modules * n, rank) / rank**0.5).to(dtype)
        both = 0.5 + torch.rand(2, modules * n) if affine and slot == len(ranks) - 1 else None
        factors.append((a, b, both))
        name = str(dtype).removeprefix("torch.")
        more = [None] * modules if both is None else both.split(n, 1)
        parts = [
            ops.pack_lora(
                from_torch(a),
                from_torch(x),
                0.5,
                name,
                None,
                None if y is None else from_torch(y.contiguous()),
            )
            for x, y in zip(b.split(n), more, strict=True)
        ]
        table.set(slot, parts)
    ops.put_adapter_tables([table])
    return table, factors


def check_answers(bench: Bench) -> None:
    """Compare adapters with merged weights in float32, and one adapter with several at once.

    They are two LoRAs, a DoRA, and a LoRA with biases of B; the model's attention has biases.
    """
    import transformers
    from safetensors.torch import save_file

    sizes, vocab = bench.sizes, bench.sizes.tiny["vocab_size"]
    prompts = [random_ids(n, seed=n, vocab=vocab) for n in sizes.prompts]
    params = SamplingParams(temperature=0, max_tokens=sizes.answer, logprobs=1, ignore_eos=True)
    kinds = {"rank-4": 4, "rank-16": 16, "norms": 8, "biases": 8}
    common: dict[str, Any] = {"dtype": "float32", "max_num_batched_tokens": 256}
    lora: dict[str, Any] = {
        "enable_lora": True,
        "max_loras": len(kinds),
        "max_lora_rank": max(kinds.values()),
    }

    def ask(llm: LLM, adapters: list[LoRARequest | None]) -> list[CompletionOutput]:
        asked = [(ids, adapter) for adapter in adapters for ids in prompts]
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids, _ in asked],
            params,
            lora_request=[adapter for _, adapter in asked],
            use_tqdm=False,
        )
        return [output.outputs[0] for output in outputs]

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        config = transformers.LlamaConfig.from_dict(sizes.tiny | {"attention_bias": True})
        model = transformers.LlamaForCausalLM(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 2 or name.endswith("bias"):
                    parameter.normal_(std=0.1)
        base = str(Path(folder, "base"))
        model.save_pretrained(base)
        adapters: list[LoRARequest | None] = [None]
        merged = [base]
        for number, (kind, rank) in enumerate(kinds.items(), 1):
            path, factors = Path(folder, kind), {}
            path.mkdir()
            modules = MODULES[:2] if kind == "biases" else MODULES
            changed = transformers.LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
            for name, module in changed.named_modules():
                if name.endswith(modules):
                    a = torch.randn(rank, module.in_features) / module.in_features**0.5
                    b = 0.1 * torch.randn(module.out_features, rank)
                    stored = f"base_model.model.{name}.lora_"
                    factors |= {f"{stored}A.weight": a, f"{stored}B.weight": b}
                    module.weight.data += 2 * b @ a
                    if kind == "norms":
                        norms = 0.5 + torch.rand(module.out_features)
                        factors[f"{stored}magnitude_vector"] = norms
                        module.weight.data *= (norms / module.weight.data.norm(dim=1))[:, None]
                    elif kind == "biases":
                        bias = torch.randn(module.out_features)
                        factors[f"{stored}B.bias"] = bias
                        module.bias.data += 2 * bias
            save_file(factors, path / "adapter_model.safetensors")
            fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
            fields |= {"use_dora": kind == "norms", "lora_bias": kind == "biases"}
            (path / "adapter_config.json").write_text(json.dumps(fields))
            adapters.append(LoRARequest(kind, number, str(path)))
            merged.append(f"{path}-merged")
            changed.save_pretrained(merged[-1])
        truth = []
        for path_of_model in merged:
            with engine(bench, path_of_model, **common) as llm:
                truth += ask(llm, [None])
        with engine(bench, base, batch_invariant=True, **common, **lora) as llm:
            alone = [ask(llm, [adapter]) for adapter in adapters]
            at_once = ask(llm, adapters)
    single = [answer for answers in alone for answer in answers]
    equal = sum(list(a.token_ids) == list(t.token_ids) for a, t in zip(single, truth, strict=True))
    bits = sum(numbers(a) == numbers(b) for a, b in zip(single, at_once, strict=True))
    bench.add(
        "adapters and merged weights, float32",
        f"{equal} of {len(truth)} answers have the same tokens",
        str(len(truth)),
        equal == len(truth),
    )
    bench.add(
        "requests of several adapters, one adapter alone and all at once, batch_invariant=True",
        f"{bits} of {len(truth)} have the same bits",
        str(len(truth)),
        bits == len(truth),
    )
