"""Acceptance of every format of quantized checkpoints: all that a model can do, in all layouts.

    python -m tests.e2e.accept_formats --formats MXFP4 gguf

Makes a small random model of each format, and another one with one layer, which drafts. Prints a
table of the checks, and fails if one of them does.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import torch

from octavo import LLM, SamplingParams
from octavo.kernels.dequantize import dequantize
from octavo.scheduler.speculation import DraftLengths
from octavo.system.tensor import HostTensor
from tests.gguf_files import convert, quantize
from tests.models.harness import make_hf
from tests.quantization.formats import FORMATS
from tests.quantization.harness import SIZES, assert_same_weights
from tests.revival import assert_revived

VOCAB = 128
MORE_SIZES = {"vocab_size": VOCAB, "max_position_embeddings": 256, "pad_token_id": 0}
SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True, "dtype": "bfloat16", "max_model_len": 128, "max_num_seqs": 8,
    "kv_cache_memory_bytes": "8M",
}  # fmt: skip
PROMPTS = [[(7 * i + 3 * j) % 120 for j in range(count)] for i, count in enumerate((1, 17, 40, 70))]
_GGUF_TYPES = {"attn_v": "q8_0", "ffn_down": "q8_0", "": "q4_0"}
_EXACT = ("FP8", "fp8")
"""Parts of the names of formats whose activations have the model's type."""


class Case:
    """Model of a format, its dequantized twin, and a model that drafts.

    Args:
        name: a key of `FORMATS`, or "gguf".
        folder: an empty folder.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.atol = name, 1e-7
        self.quantized, self.plain = self._make(folder / "target", 2)
        self.draft, _ = self._make(folder / "draft", 1)
        with LLM(str(self.quantized), enable_prefix_caching=False, **SETTINGS) as llm:
            self.planned = llm.memory_plan.nbytes("weights")
            (self.nbytes,) = llm.apply_model(_nbytes)
            self.alone = [answer for prompt in PROMPTS for answer in answers(llm, [prompt])]
            self.together = answers(llm, PROMPTS)

    def _make(self, folder: Path, layers: int) -> tuple[Path, Path]:
        sizes = MORE_SIZES | {"num_hidden_layers": layers}
        if self.name != "gguf":
            self.atol = FORMATS[self.name].atol
            made = FORMATS[self.name].make(folder, **sizes)
            return made.quantized, made.plain
        model = make_hf("LlamaForCausalLM", **SIZES | sizes)
        for name, weight in model.named_parameters():
            if "proj" in name or "lm_head" in name:
                kind = "q8_0" if "v_proj" in name or "down_proj" in name else "q4_0"
                blocks = np.frombuffer(quantize(weight.detach().numpy(), kind), np.uint8)
                numbers = dequantize(blocks.reshape(weight.numel() // 32, -1), kind)
                weight.data = torch.from_numpy(numbers).view(weight.shape)
        model.save_pretrained(folder / "plain")
        convert(model, "llama", folder / "model.gguf", _GGUF_TYPES | {"token_embd": "f32"})
        return folder / "model.gguf", folder / "plain"

    def start(self, **settings: Any) -> LLM:
        return LLM(str(self.quantized), **SETTINGS | settings)

    # The checks.

    def load(self) -> None:
        """The kernels have the numbers of the file."""
        assert_same_weights(self.quantized, self.plain, atol=self.atol)

    def plan(self) -> None:
        """The plan knows the size of the weights, and a process stays within it."""
        difference = abs(self.nbytes - self.planned)
        assert difference < 0.01 * self.nbytes, f"planned {self.planned}, are {self.nbytes}"
        with self.start(isolate=True) as llm:
            assert answers(llm, PROMPTS) == self.together
            (pid,) = llm.llm_engine.client.pids
            resident, planned = psutil.Process(pid).memory_info().rss, llm.memory_plan.total
            assert resident < 1.01 * planned, f"planned {planned}, are {resident}"

    def numbers(self) -> None:
        """Logprobs are those of the dequantized model, but for 8-bit activations."""
        got, want = (_prompt_logprobs(path) for path in (self.quantized, self.plain))
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        exact = any(part in self.name for part in _EXACT)
        assert error < 1e-4 if exact else 0 < error < 0.2, f"error {error:.2g}"

    def batches(self) -> None:
        """A request has one answer: alone, in company, in chunks, on one thread."""
        assert len({tokens for tokens, _ in self.alone}) == len(PROMPTS)
        assert self.together == self.alone
        settings = {"long_prefill_token_threshold": 7, "num_threads": 1, "enforce_eager": True}
        with self.start(**settings) as llm:
            assert answers(llm, PROMPTS + PROMPTS[::-1])[: len(PROMPTS)] == self.alone

    def tensor_parallel(self) -> None:
        """Two ranks give the bits of one."""
        with self.start(tensor_parallel_size=2) as llm:
            assert answers(llm, PROMPTS) == self.alone

    def pipeline_parallel(self) -> None:
        """Two stages give the bits of one."""
        with self.start(pipeline_parallel_size=2) as llm:
            assert answers(llm, PROMPTS) == self.alone

    def prefix_cache(self) -> None:
        """Cached prefixes change no bit."""
        with self.start() as llm:
            for _ in range(2):
                assert answers(llm, PROMPTS) == self.alone
            assert llm.stats().prefix_cache_hits > 64

    def speculation(self) -> None:
        """Drafts of a quantized model, some right and some wrong, change no bit."""
        for path in (self.draft, self.quantized):
            draft = {"model": str(path), "num_speculative_tokens": 3}
            with (
                # The maximum: the best number depends on the drafts' time.
                mock.patch.object(DraftLengths, "choose", lambda lengths, num_reqs: lengths.most),
                self.start(speculative_config=draft) as llm,
            ):
                assert answers(llm, PROMPTS) == self.alone
                accepted, drafted = llm.stats().num_accepted_tokens, llm.stats().num_draft_tokens
                assert accepted < drafted if path == self.draft else accepted == drafted > 0

    def revival(self) -> None:
        """An engine that is killed in the middle of an answer is replaced; the answer goes on."""
        params = SamplingParams(temperature=0.9, seed=3, max_tokens=60, ignore_eos=True)
        with self.start(isolate=True) as llm:
            assert_revived(llm, {"prompt_token_ids": PROMPTS[2]}, params)


CHECKS: dict[str, Callable[[Case], None]] = {
    "load": Case.load,
    "plan": Case.plan,
    "numbers": Case.numbers,
    "batches": Case.batches,
    "TP 2": Case.tensor_parallel,
    "PP 2": Case.pipeline_parallel,
    "prefixes": Case.prefix_cache,
    "draft": Case.speculation,
    "revival": Case.revival,
}


def answers(llm: LLM, prompts: list[list[int]]) -> list[tuple[tuple[int, ...], list[Any]]]:
    """Return the tokens and logprobs of sampled answers, one with a temperature of 0."""
    params = [
        SamplingParams(
            temperature=0.9 if len(prompt) > 1 else 0, seed=3, max_tokens=16, logprobs=2,
            ignore_eos=True,
        )
        for prompt in prompts
    ]  # fmt: skip
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
    )
    return [
        (tuple(o.outputs[0].token_ids), [sorted(x.items()) for x in o.outputs[0].logprobs or []])
        for o in outputs
    ]


def _nbytes(model: object) -> int:
    """Return the bytes of all tensors that a live model holds."""
    ends: dict[int, int] = {}
    seen, left = set(), [model]
    while left:
        value = left.pop()
        if isinstance(value, HostTensor):
            begin = value.data_ptr()
            ends[begin] = max(ends.get(begin, 0), begin + value.nbytes)
        elif id(value) not in seen:
            seen.add(id(value))
            left += value.values() if isinstance(value, dict) else ()
            left += value if isinstance(value, list | tuple) else ()
            left += vars(value).values() if hasattr(value, "__dict__") else ()
            for name in (n for kind in type(value).__mro__ for n in getattr(kind, "__slots__", ())):
                left.append(getattr(value, name, None))
    total = reached = 0
    for begin, end in sorted(ends.items()):  # some are views of others
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _prompt_logprobs(path: Path) -> np.ndarray[Any, Any]:
    """Return the logprobs of a prompt's tokens in float32."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    prompt = PROMPTS[-1]
    with LLM(str(path), **SETTINGS | {"dtype": "float32"}) as llm:
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    rows = zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
    return np.array([row[token].logprob for row, token in rows if row is not None])


def accept(name: str, folder: Path, checks: Iterable[str] = CHECKS) -> dict[str, str]:
    """Return the errors of some checks of a format, by the check's name."""
    case, failed = Case(name, folder), {}
    for check in checks:
        try:
            CHECKS[check](case)
        except Exception:
            failed[check] = traceback.format_exc(limit=-2)
    return failed


def main() -> None:
    """Check formats and print the table."""
    known = [*FORMATS, "gguf"]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="+", choices=known, default=known)
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    print(f"{'':22}" + "".join(f"{check:>10}" for check in CHECKS))
    errors = []
    for name in args.formats:
        with tempfile.TemporaryDirectory() as folder:
            failed = accept(name, Path(folder))
        row = ("WRONG" if check in failed else "ok" for check in CHECKS)
        print(f"{name:22}" + "".join(f"{result:>10}" for result in row), flush=True)
        errors += [f"--- {name}, {check}: {text}" for check, text in failed.items()]
    print(*errors, sep="\n")
    raise SystemExit(bool(errors))


if __name__ == "__main__":
    main()
