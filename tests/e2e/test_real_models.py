"""Published models: their tokens, answers, perplexity, and transcripts.

`OCTAVO_REAL_MODELS` names a folder with some of the files; the tests of a missing file are skipped.

The expected tokens are the greedy ones of the file's numbers in float32, which llama.cpp computes
too, up to the first one whose probability is less than e times that of the second most probable.
Activations of 8 bits may change only later tokens.
"""

import json
import os
import subprocess
import sys
import wave
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo.model_tools.quality import measure
from tests.e2e.harness import serve
from tests.word_errors import num_word_errors

FOLDER = os.environ.get("OCTAVO_REAL_MODELS")
SETTINGS = {"max_model_len": 256, "kv_cache_memory_bytes": "64M"}
FLAGS = ("--max-model-len", "256", "--kv-cache-memory-bytes", "64M")


class Case(NamedTuple):
    """Prompt and the tokens of the answer."""

    prompt: str
    is_chat: bool
    prompt_ids: list[int]
    answer_ids: list[int]


class Model(NamedTuple):
    """Published file."""

    name: str
    perplexity: float
    """Perplexity of the file's numbers in float32 on 1,024 tokens of the built-in stories."""
    cases: list[Case]


# fmt: off
SMOLLM2_SYSTEM = [
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407,
    19712, 8182, 2, 198,
]
QWEN_SYSTEM = [
    151644, 8948, 198, 2610, 525, 1207, 16948, 11, 3465, 553, 54364, 14817, 13, 1446, 525, 264,
    10950, 17847, 13, 151645, 198,
]
SMOLLM2 = Model("SmolLM2-135M-Instruct.Q4_1.gguf", 13.948, [
    Case(
        "Count from 1 to 10.", True,
        [*SMOLLM2_SYSTEM, 1, 4093, 198, 9825, 429, 216, 33, 288, 216, 33, 32, 30, 2, 198, 1, 520,
         9531, 198],
        [33, 30, 216, 33, 198, 34, 30, 216, 34, 198, 35, 30, 216, 35, 198, 36, 30, 216, 36, 198,
         37, 30, 216, 37, 198, 38, 30, 216, 38, 198, 39, 30],
    ),
    Case("The capital of Germany is", False, [504, 3575, 282, 4521, 314], [11452, 30]),
    Case(
        "1, 2, 3, 4, 5,", False,
        [33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28, 216, 37, 28],
        [216, 38, 28, 216, 39, 28, 216, 40, 28, 216, 41, 28, 216, 33, 32, 28, 216, 33, 33, 28, 216,
         33, 34, 28, 216, 33, 35, 28, 216, 33, 36, 28],
    ),
])
GEMMA = Model("gemma-3-270m-q4_k_m.gguf", 13.779, [
    Case(
        "1, 2, 3, 4, 5,", False,
        [2, 236770, 236764, 236743, 236778, 236764, 236743, 236800, 236764, 236743, 236812, 236764,
         236743, 236810, 236764],
        [236743, 236825, 236764, 236743, 236832, 236764, 236743, 236828, 236764, 236743, 236819,
         236764, 236743, 236770, 236771, 236764, 236743, 236770, 236770, 236764, 236743, 236770,
         236778, 236764, 236743, 236770, 236800, 236764, 236743, 236770, 236812, 236764],
    ),
    Case(
        "A B C D E F", False,
        [2, 236776, 603, 565, 622, 645, 633],
        [667, 640, 564, 730, 751, 639, 587, 646, 708, 593, 1366, 630, 555, 558, 749, 782, 649, 1684,
         895, 1491, 108],
    ),
    Case(
        "def fibonacci(n):\n", False,
        [2, 2063, 10779, 78113, 236769, 236749, 1473, 107], [140, 584, 538],
    ),
    Case(
        "Monday, Tuesday, Wednesday,", False,
        [2, 49381, 236764, 9863, 236764, 10119, 236764],
        [9853, 236764, 7672, 236764, 8224, 236764, 8174],
    ),
])
QWEN = Model("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", 15.944, [
    Case(
        "What is the capital of France?", True,
        [*QWEN_SYSTEM, 151644, 872, 198, 3838, 374, 279, 6722, 315, 9625, 30, 151645, 198, 151644,
         77091, 198],
        [785, 6722, 315, 9625, 374, 12095, 13, 151645],
    ),
    Case(
        "1, 2, 3, 4, 5,", False,
        [16, 11, 220, 17, 11, 220, 18, 11, 220, 19, 11, 220, 20, 11],
        [220, 21, 11, 220, 22, 11, 220, 23, 11, 220, 24, 11, 220, 16, 15, 11, 220, 16, 16, 11, 220,
         16, 17, 11, 220, 16, 18, 11, 220, 16, 19, 11],
    ),
    Case(
        "A B C D E F", False,
        [32, 425, 356, 422, 468, 434],
        [479, 472, 358, 619, 730, 444, 386, 451, 506, 393, 1207, 431, 328, 350, 547, 647, 467, 1599,
         809, 1863, 271],
    ),
    Case("def fibonacci(n):\n", False, [750, 75698, 1445, 982], [262, 421, 308, 2651, 220]),
])
# fmt: on
MODELS = pytest.mark.parametrize("model", [SMOLLM2, GEMMA, QWEN], ids=lambda model: model.name)


def file_of(model: Model) -> str:
    """Return the path of a model's file; skip the test without it."""
    if not FOLDER:
        pytest.skip("OCTAVO_REAL_MODELS names no folder of published GGUF files")
    path = Path(FOLDER) / model.name
    if not path.exists():
        pytest.skip(f"OCTAVO_REAL_MODELS={FOLDER} has no {model.name}")
    return str(path)


@MODELS
def test_tokens(model: Model) -> None:
    """The tokenizer, the chat template and the greedy answers."""
    with LLM(file_of(model), **SETTINGS) as llm:
        tokenizer = llm.get_tokenizer()
        for case in model.cases:
            text = case.prompt
            if case.is_chat:
                text = llm.render_chat([{"role": "user", "content": text}])
            ids = tokenizer.encode(text, add_special_tokens=not case.is_chat)
            assert ids == case.prompt_ids, case.prompt
        params = [
            SamplingParams(temperature=0, repetition_penalty=1, max_tokens=len(case.answer_ids))
            for case in model.cases
        ]
        prompts = [{"prompt_token_ids": case.prompt_ids} for case in model.cases]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [list(o.outputs[0].token_ids) for o in outputs] == [c.answer_ids for c in model.cases]


@MODELS
def test_perplexity(model: Model) -> None:
    """8-bit activations and bfloat16 cost less than 2 % on so few tokens."""
    found = measure({"model": file_of(model)}, tokens=1024, chunk=256)
    assert found["perplexity"]["value"] == pytest.approx(model.perplexity, rel=0.02)


def test_chat_through_the_template_of_the_file(tmp_path: Path) -> None:
    """The same answer by a server, in a terminal, and by tokens."""
    file, case = file_of(SMOLLM2), SMOLLM2.cases[0]
    with serve(tmp_path, *FLAGS, model=file) as server:
        body = {
            "model": file,
            "messages": [{"role": "user", "content": case.prompt}],
            "temperature": 0,
            "repetition_penalty": 1,
            "max_tokens": len(case.answer_ids),
            "return_token_ids": True,
        }
        answer = server.post("/v1/chat/completions", body).json()
    (choice,) = answer["choices"]
    assert answer["prompt_token_ids"] == case.prompt_ids
    assert choice["token_ids"] == case.answer_ids
    text = choice["message"]["content"]
    assert text.startswith("1. 1\n2. 2\n3. 3\n")
    words = ["--temperature", "0", "--repetition-penalty", "1", "--max-tokens", "32"]
    done = subprocess.run(
        [sys.executable, "-m", "octavo", "run", file, case.prompt, *words, *FLAGS],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == f"{text}\n"


@pytest.mark.parametrize(("name", "num_errors"), [("whisper-tiny-en", 3), ("whisper-base", 1)])
def test_transcripts(name: str, num_errors: int) -> None:
    """As many wrong words of 71 as transformers' float32, in 5 clips and in all of them joined."""
    clips = Path(FOLDER or "", "audio-librivox5")
    if not FOLDER or not clips.is_dir() or not Path(FOLDER, name).is_dir():
        pytest.skip(f"OCTAVO_REAL_MODELS names no folder with audio-librivox5 and {name}")
    rows = [json.loads(line) for line in (clips / "transcripts.jsonl").read_text().splitlines()]
    files = [clips / row["file"] for row in rows]
    with LLM(str(Path(FOLDER, name)), dtype="float32") as llm:
        found = llm.transcribe(files, timestamps=False)
        timed = llm.transcribe(files)
        samples = [np.append(_samples(file), np.zeros(8000, np.float32)) for file in files]
        (joined,) = llm.transcribe(np.concatenate(samples))
    assert {one.language for one in found} == {"en"}
    texts = [row["text"] for row in rows]
    errors = [num_word_errors(text, one.text) for text, one in zip(texts, found, strict=True)]
    assert sum(errors) == num_errors
    for one in timed:
        assert 0 <= one.segments[0].start < 1
        assert one.duration - 1 < one.segments[-1].end <= one.duration
    assert num_word_errors(" ".join(texts), joined.text) <= num_errors + 4


def _samples(file: Path) -> np.ndarray:
    with wave.open(str(file)) as stream:
        data = stream.readframes(stream.getnframes())
    return np.frombuffer(data, "<i2") / np.float32(2**15)
