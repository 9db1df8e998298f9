"""Tokens and logprobs: compared with transformers, and alone with among others."""

from __future__ import annotations

import math
import random
import tempfile
from typing import Any

import torch
from torch import Tensor

from gpu.base import Bench
from gpu.engines import engine, generate, random_ids, write_config
from octavo import SamplingParams
from octavo.outputs import CompletionOutput


def check_parity(bench: Bench) -> None:
    """Compare greedy tokens and logprobs with transformers in float32, on random models."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    sizes, device, vocab = bench.sizes, bench.gpu.device, bench.sizes.tiny["vocab_size"]
    prompts = [random_ids(n, seed=n, vocab=vocab) for n in sizes.prompts]
    params = SamplingParams(temperature=0, max_tokens=sizes.answer, logprobs=1, ignore_eos=True)
    for dtype in ("float32", "bfloat16"):
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(sizes.tiny))
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() == 2:
                        parameter.normal_(std=0.1)
            model.to(getattr(torch, dtype)).save_pretrained(folder)
            with engine(
                bench,
                folder,
                dtype=dtype,
                max_num_seqs=len(prompts),
                max_num_batched_tokens=256,
            ) as llm:
                answers = generate(llm, prompts, params)
            # The reference, and the error of transformers itself in the model's own dtype.
            truth, theirs = (
                transformers.LlamaForCausalLM.from_pretrained(folder, dtype=form).eval().to(device)
                for form in (torch.float32, getattr(torch, dtype))
            )
        worst = their_worst = 0.0
        equal = their_equal = total = 0
        for prompt, answer in zip(prompts, answers, strict=True):
            ids = list(answer.token_ids)
            true, rounded = (logprobs(model, prompt, ids, device) for model in (truth, theirs))
            chosen = torch.tensor(ids)
            steps = torch.arange(len(ids))
            assert answer.logprobs is not None
            reported = zip(ids, answer.logprobs, strict=True)
            ours = torch.tensor([entry[token].logprob for token, entry in reported])
            worst = max(worst, (ours - true[steps, chosen]).abs().max().item())
            error = (rounded - true)[steps, chosen].abs().max().item()
            their_worst = max(their_worst, error)
            equal += int((true.argmax(-1) == chosen).sum())
            their_equal += int((true.argmax(-1) == rounded.argmax(-1)).sum())
            total += len(ids)
        if dtype == "float32":
            bound, fewest, note = 1e-3, total, ""
        else:
            bound, fewest = 2 * their_worst, math.floor(0.95 * their_equal)
            note = f" (transformers in {dtype}: {their_equal}, {their_worst:.1e})"
        bench.add(
            f"parity with transformers in float32: {dtype}",
            f"{equal} of {total} greedy tokens equal, logprobs within {worst:.1e}{note}",
            f"{fewest}, {bound:.1e}",
            equal >= fewest and worst <= bound,
        )


def logprobs(model: Any, prompt: list[int], ids: list[int], device: torch.device) -> Tensor:
    """Return logprobs of all tokens at the choice of each of `ids`: [len(ids), vocab]."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([prompt + ids], device=device)).logits[0]
        return logits[len(prompt) - 1 : -1].float().log_softmax(-1).cpu()


def check_invariance(bench: Bench) -> None:
    """Compare a request alone and among others, which change the chunks of its prompt."""
    sizes, rng = bench.sizes, random.Random(1)
    vocab = sizes.tiny["vocab_size"]
    target = random_ids(sizes.target, seed=0, vocab=vocab)
    others = [
        random_ids(rng.randrange(1, sizes.target // 2), seed=i, vocab=vocab)
        for i in range(sizes.others)
    ]
    params = SamplingParams(
        temperature=0.8, seed=7, max_tokens=2 * sizes.answer, logprobs=3, ignore_eos=True
    )
    for invariant in (True, False):
        with (
            tempfile.TemporaryDirectory() as folder,
            engine(
                bench,
                write_config(folder, sizes.tiny),
                load_format="dummy",
                batch_invariant=invariant,
                max_num_seqs=sizes.others + 1,
                max_num_batched_tokens=256,
            ) as llm,
        ):
            alone = generate(llm, [target], params)[0]
            among = generate(llm, [*others, target], params)[-1]
        same = list(alone.token_ids) == list(among.token_ids)
        bits = same and numbers(alone) == numbers(among)
        bench.add(
            f"a request alone and among {sizes.others} others, batch_invariant={invariant}",
            "the same bits" if bits else "the same tokens" if same else "other tokens",
            "the same bits" if invariant else "",
            bits if invariant else None,
        )


def numbers(answer: CompletionOutput) -> list[dict[int, float]]:
    """Return all logprobs of an answer."""
    return [{t: entry.logprob for t, entry in step.items()} for step in answer.logprobs or []]
