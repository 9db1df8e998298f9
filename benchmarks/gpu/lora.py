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
from gpu.families import FAMILIES
from octavo import LLM, LoRARequest, SamplingParams
from octavo.kernels.lora import ExpertPart, LoraTable
from octavo.kernels.replaced import ReplacedTable
from octavo.kernels.torch_tensors import from_torch
from octavo.kernels.triton.ops import TritonOps
from octavo.outputs import CompletionOutput

ROWS = 300
"""Rows of the products that are compared: more than those with a program for each split."""
BOUND = 2e-5
"""Largest error of a float32 sum, relative to the largest result."""
ROUNDING = 2.0**-7
"""The same of a result in bfloat16."""
RANKS = (3, 16, 64)
EXPERTS = 4
OTHERS = (
    "adapters of the embedding",
    "their own embeddings",
    "adapters of experts",
    "their own LM heads",
)
MODULES = ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.down_proj")


def check_lora(bench: Bench) -> None:
    """Check and time the kernels, then check the answers of engines."""
    check_kernels(bench)
    check_other_kernels(bench)
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


def check_other_kernels(bench: Bench) -> None:
    """Do the same with adapters of tokens and of experts, and with whole layers of adapters."""
    gpu, n, rank = bench.gpu, bench.sizes.linear, 16
    ops = TritonOps(gpu.device, upcast=gpu.device.type == "cpu")
    dtype, slots_used, rows = torch.bfloat16, 2, ROWS
    torch.manual_seed(0)

    def random(*shape: int) -> Tensor:
        return (torch.randn(*shape) / shape[-1] ** 0.5).to(dtype)

    def put(x: Tensor) -> Tensor:
        return x.to(gpu.device)

    a, b = random(slots_used, EXPERTS, rank, n), random(slots_used, EXPERTS, n, rank)
    tables = [
        LoraTable(slots_used, [n], n, rank),
        LoraTable(slots_used, [n], n, rank, experts=EXPERTS),
    ]
    whole = random(slots_used, n, n)
    replaced = [
        ReplacedTable(slots_used, (n, n), has_bias=False, is_embedding=is_embedding)
        for is_embedding in (True, False)
    ]
    for slot in range(slots_used):
        for expert in range(EXPERTS):
            factors = from_torch(a[slot, expert]), from_torch(b[slot, expert])
            packed = ops.pack_lora(*factors, 0.5, "bfloat16")
            ExpertPart(tables[1], expert).set(slot, [packed])
            if expert == 0:
                tables[0].set(slot, [packed])
        for table in replaced:
            own = ops.pack_replaced(from_torch(whole[slot]), None, "bfloat16", table)
            table.set(slot, own)
    ops.put_adapter_tables([*tables, *replaced])
    x, tokens = random(rows, n), torch.arange(rows) * 7 % n
    slots = torch.arange(rows, dtype=torch.int32) % (slots_used + 1) - 1
    ids = (torch.arange(rows, dtype=torch.int32) % EXPERTS).view(-1, 1)
    own, at = slots.clamp(min=0).long(), ids[:, 0].long()
    base = torch.randn(rows, n).to(dtype)
    inner = (x.double()[:, None] @ a[own, at].double().mT)[:, 0]
    changes = (
        (base.double(), a[own, 0].double()[torch.arange(rows), :, tokens], b[own, 0]),
        (base.double(), inner, b[own, at]),
    )
    lora = [y + 0.5 * (u[:, None] @ w.double().mT)[:, 0] for y, u, w in changes]
    wants = [lora[0], whole[own, tokens].double(), lora[1]]
    wants.append((x.double()[:, None] @ whole[own].double().mT)[:, 0])
    x, tokens, slots_on, ids = (put(it) for it in (x, tokens, slots, ids))

    def call(number: int, out: Tensor, some: slice) -> None:
        of = slots_on[some].clone()
        if number == 0:
            ops.add_lora_embedding(out, tokens[some].clone(), of, tables[0])
        elif number == 1:
            ops.replace_embedding(out, tokens[some].clone(), of, replaced[0])
        elif number == 2:
            places = torch.arange(len(out), dtype=torch.int32, device=out.device).view(-1, 1)
            ops.add_expert_lora(out, x[some], ids[some].clone(), places, of, tables[1])
        else:
            ops.replace_linear(out, x[some], of, replaced[1])

    for number, (name, want) in enumerate(zip(OTHERS, wants, strict=True)):
        want[slots < 0] = base[slots < 0].double()
        out, all_rows = put(base.clone()), slice(None)
        call(number, out, all_rows)
        error = ((out.cpu().double() - want).abs().max() / want.abs().max()).item()
        bits = True
        for row in (1, 2, rows - 1):
            alone, one = put(base[row : row + 1].clone()), slice(row, row + 1)
            call(number, alone, one)
            bits &= torch.equal(alone[0], out[row])
        seconds = gpu.seconds(partial(call, number, out, all_rows))
        bench.add(
            f"{name}, bfloat16: error, a row alone and among {rows - 1}; {rows} rows of {n}",
            f"{error:.1e}, {'the same' if bits else 'other'} bits; {seconds * 1e6:,.0f} us",
            f"{ROUNDING:.0e}, the same bits",
            error <= ROUNDING and bits,
        )


Changes = dict[str, Tensor]
"""Tensors of an adapter's file, by their names without PEFT's prefix."""


def change_linear(kind: str, rank: int, model: Any) -> tuple[Changes, dict[str, Any]]:
    """Change linear layers of a model; return the adapter's tensors and fields of its config."""
    factors, modules = {}, MODULES[:2] if kind == "biases" else MODULES
    for name, module in model.named_modules():
        if name.endswith(modules):
            a = torch.randn(rank, module.in_features) / module.in_features**0.5
            b = 0.1 * torch.randn(module.out_features, rank)
            factors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
            module.weight.data += 2 * b @ a
            if kind == "norms":
                norms = 0.5 + torch.rand(module.out_features)
                factors[f"{name}.lora_magnitude_vector"] = norms
                module.weight.data *= (norms / module.weight.data.norm(dim=1))[:, None]
            elif kind == "biases":
                bias = torch.randn(module.out_features)
                factors[f"{name}.lora_B.bias"] = bias
                module.bias.data += 2 * bias
    return factors, {"use_dora": kind == "norms", "lora_bias": kind == "biases"}


def change_ends(kind: str, rank: int, model: Any) -> tuple[Changes, dict[str, Any]]:
    """Change the embedding and the LM head by factors, or replace them beside linear layers."""
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    if kind == "whole":
        for weight in (embedding, head):
            weight.data.normal_(std=0.1)
        whole = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
        factors, _ = change_linear(kind, rank, model)
        factors |= {name: weight.data.clone() for name, weight in whole.items()}
        return factors, {"modules_to_save": ["embed_tokens", "lm_head"]}
    (vocab, size), factors = embedding.shape, {}
    for name, weight, shape in (
        ("model.embed_tokens.lora_embedding_{}", embedding, (size, vocab)),
        ("lm_head.lora_{}.weight", head, (vocab, size)),
    ):
        a, b = torch.randn(rank, shape[1]), 0.1 * torch.randn(shape[0], rank)
        factors |= {name.format("A"): a, name.format("B"): b}
        delta = 2 * b @ a / rank**0.5
        factors[name.format("B")] = b / rank**0.5
        weight.data += delta.T if shape[0] == size else delta
    return factors, {}


def change_experts(kind: str, rank: int, model: Any) -> tuple[Changes, dict[str, Any]]:
    """Change all experts of a model, one by one."""
    factors: Changes = {}
    for i, layer in enumerate(model.model.layers):
        experts = layer.mlp.experts
        inner = experts.down_proj.shape[2]
        for name, weights in (
            ("gate_proj", experts.gate_up_proj[:, :inner]),
            ("up_proj", experts.gate_up_proj[:, inner:]),
            ("down_proj", experts.down_proj),
        ):
            for expert, weight in enumerate(weights.data):
                a = torch.randn(rank, weight.shape[1]) / weight.shape[1] ** 0.5
                b = 0.1 * torch.randn(weight.shape[0], rank)
                weight += 2 * b @ a
                stored = f"model.layers.{i}.mlp.experts.{expert}.{name}.lora"
                factors |= {f"{stored}_A.weight": a, f"{stored}_B.weight": b}
    return factors, {}


DENSE = {
    "rank-4": (4, change_linear),
    "rank-16": (16, change_linear),
    "norms": (8, change_linear),
    "biases": (8, change_linear),
    "tokens": (8, change_ends),
    "whole": (4, change_ends),
}
"""Rank and function of each kind of adapter of a dense model."""
MIXTURE = {"experts-4": (4, change_experts), "experts-16": (16, change_experts)}
"""The same for a mixture of experts."""


def check_answers(bench: Bench) -> None:
    """Compare adapters with merged weights in float32, and one adapter with several at once.

    The adapters of a dense model are two LoRAs, a DoRA, a LoRA with biases of B, a LoRA of
    embedding and LM head, and one with its own embedding and LM head; the model's attention has
    biases. Those of a mixture change experts.
    """
    import transformers

    tiny = bench.sizes.tiny
    config = transformers.LlamaConfig.from_dict(tiny | {"attention_bias": True})
    check_model(bench, "adapters", transformers.LlamaForCausalLM, config, DENSE)
    _, more = FAMILIES["mixture"]
    mixture = transformers.Qwen3MoeConfig.from_dict(tiny | more)
    check_model(bench, "of experts", transformers.Qwen3MoeForCausalLM, mixture, MIXTURE)


def check_model(bench: Bench, name: str, make: Any, config: Any, kinds: dict[str, Any]) -> None:
    """Check a model; see `check_answers`.

    Args:
        bench: takes the results.
        name: name of the adapters in them.
        make: the model's class in transformers.
        config: its configuration.
        kinds: rank and function of each kind of adapter.
    """
    from safetensors.torch import save_file

    sizes, vocab = bench.sizes, bench.sizes.tiny["vocab_size"]
    prompts = [random_ids(n, seed=n, vocab=vocab) for n in sizes.prompts]
    params = SamplingParams(temperature=0, max_tokens=sizes.answer, logprobs=1, ignore_eos=True)
    common: dict[str, Any] = {"dtype": "float32", "max_num_batched_tokens": 256}
    lora: dict[str, Any] = {
        "enable_lora": True,
        "max_loras": len(kinds),
        "max_lora_rank": max(rank for rank, _ in kinds.values()),
        "lora_modules_to_save": ["embed_tokens", "lm_head"] if "whole" in kinds else [],
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
        model = make(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.1)
            for key, parameter in model.named_parameters():
                if key.endswith("bias"):
                    parameter.normal_(std=0.1)
        base = str(Path(folder, "base"))
        model.save_pretrained(base)
        adapters: list[LoRARequest | None] = [None]
        merged = [base]
        for number, (kind, (rank, change)) in enumerate(kinds.items(), 1):
            path = Path(folder, kind)
            path.mkdir()
            changed = make.from_pretrained(base, dtype=torch.float32)
            with torch.no_grad():
                factors, fields = change(kind, rank, changed)
            tensors = {f"base_model.model.{key}": it for key, it in factors.items()}
            save_file(tensors, path / "adapter_model.safetensors")
            fields |= {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
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
        f"{name} and merged weights, float32",
        f"{equal} of {len(truth)} answers have the same tokens",
        str(len(truth)),
        equal == len(truth),
    )
    bench.add(
        f"{name}: requests of one adapter alone and of all at once, batch_invariant=True",
        f"{bits} of {len(truth)} have the same bits",
        str(len(truth)),
        bits == len(truth),
    )
