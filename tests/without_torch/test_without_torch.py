"""Octavo on a CPU needs no torch: answers, servers, commands and errors without it.

Where torch is installed it changes nothing, and no process imports it.
"""

from __future__ import annotations

import base64
import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest
import torch

from tests.without_torch.answers import CASES
from tests.without_torch.conftest import ROOT, Serve

MODEL = "octavo/stories"
ABSENT = ("torch", "triton", "transformers", "xgrammar", "ray")
COMPLETION = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}


def run(python: str, *words: str, status: int = 0, **environment: str) -> str:
    done = subprocess.run(
        [python, *words],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + (done.stderr if status else "")


def test_the_environment_lacks_them(light: str) -> None:
    code = f"import importlib.util as u; print([n for n in {ABSENT} if u.find_spec(n)])"
    assert run(light, "-c", code) == "[]\n"


@pytest.mark.parametrize("part", range(3))
def test_same_bits_with_and_without_torch(light: str, part: int) -> None:
    script = str(Path(__file__).with_name("answers.py"))
    cases = list(CASES)[part::3]
    without, with_it = (
        json.loads(run(python, script, *cases)) for python in (light, sys.executable)
    )
    assert set(without) == {*cases, "torch"}
    assert without == with_it
    assert without["torch"] is False


def modules_of(pid: int) -> set[str]:
    """Return those of the absent modules that a process and its children have loaded."""
    server = psutil.Process(pid)
    found = set()
    for process in (server, *server.children(recursive=True)):
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        found |= {name for name in ("libtorch", "libtriton", "xgrammar") if name in maps}
    return found


def answers_of_a_server(client: httpx.Client) -> list[object]:
    """Return answers of the API's kinds of requests."""
    schema = {"type": "object", "properties": {"a": {"enum": ["b", "c"]}}, "required": ["a"]}
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
    bodies: list[tuple[str, dict[str, object]]] = [
        ("/v1/completions", COMPLETION | {"logprobs": 2, "n": 2, "temperature": 0.8, "seed": 1}),
        ("/v1/completions", COMPLETION | {"use_beam_search": True, "n": 2}),
        (
            "/v1/completions",
            COMPLETION | {"structured_outputs": {"json": schema}, "max_tokens": 40},
        ),
        ("/v1/completions", COMPLETION | {"structured_outputs": {"regex": "[a-c]{4}"}}),
        ("/v1/chat/completions", chat | {"seed": 1}),
    ]
    answers = []
    for path, body in bodies:
        response = client.post(path, json=body)
        assert response.status_code == 200, response.text
        answers.append(
            [choice.get("text") or choice["message"] for choice in response.json()["choices"]]
        )
    return answers


LAYOUTS = {  # the first has a warm spare engine, too
    "server": "serve",
    "ranks and drafts": "serve --no-warm-spare --tensor-parallel-size 2 --speculative-config"
    ' \'{"method": "ngram", "num_speculative_tokens": 3}\'',
    "engines": "serve --no-warm-spare --data-parallel-size 2 --api-server-count 2",
    "stages": "serve --no-warm-spare --pipeline-parallel-size 2 --quantization int8",
    "connector": "serve --no-warm-spare --kv-offloading-size 0.1",
    "router": "router --no-warm-spare --replicas 2",
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_servers(light: str, serve: Serve, layout: str) -> None:
    command, *flags = shlex.split(LAYOUTS[layout])
    found = []
    for python in (light, sys.executable):
        with serve(python, command, MODEL, *flags) as client:
            found.append(answers_of_a_server(client))
            assert modules_of(int(client.headers["x-server-pid"])) == set()
    assert found[0] == found[1]


def test_prompt_embeds_and_sleep(light: str, serve: Serve) -> None:
    config = json.loads((ROOT / "octavo/builtin/stories/config.json").read_text())
    buffer = io.BytesIO()
    torch.save(torch.zeros(3, config["hidden_size"], dtype=torch.bfloat16), buffer)
    embeds = base64.b64encode(buffer.getvalue()).decode()
    flags = ("--enable-prompt-embeds", "--enable-sleep-mode", "--enable-admin")
    with serve(light, "serve", MODEL, *flags) as client:
        body = {"model": MODEL, "prompt": "", "prompt_embeds": embeds, "max_tokens": 4}
        assert client.post("/v1/completions", json=body).status_code == 200
        before = client.post("/v1/completions", json=COMPLETION).json()["choices"]
        assert client.post("/sleep").status_code == 200
        assert client.post("/wake_up").status_code == 200
        assert client.post("/v1/completions", json=COMPLETION).json()["choices"] == before


def test_commands(light: str, tmp_path: Path) -> None:
    octavo = ("-m", "octavo")
    assert run(light, *octavo, "run", "--raw", "Once upon a time", "--max-tokens", "8").strip()
    assert run(light, *octavo, "list")
    assert (
        "throughput"
        in run(
            light, *octavo, "bench", "throughput", "--num-prompts", "4", "--output-len", "8"
        ).lower()
    )
    assert run(light, *octavo, "collect-env")
    requests = tmp_path / "requests.jsonl"
    requests.write_text(
        json.dumps(
            {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": COMPLETION}
        )
    )
    run(light, *octavo, "run-batch", "-i", str(requests), "-o", str(tmp_path / "out.jsonl"))
    answer = json.loads((tmp_path / "out.jsonl").read_text())
    assert answer["response"]["body"]["choices"][0]["text"]


def test_a_broken_torch_does_not_matter(light: str, tmp_path: Path) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('broken')")
    script = str(Path(__file__).with_name("answers.py"))
    answers = run(light, script, "bfloat16", PYTHONPATH=str(tmp_path))
    assert json.loads(answers)["bfloat16"]["greedy"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--attention-backend", "reference"], "octavo[torch]"),
        (["--attention-backend", "triton"], "octavo[cuda]"),
        (["--logits-processors", "tests.without_torch.plugin:NeedsTorch"], "octavo[torch]"),
        (["--structured-outputs-config", '{"backend": "xgrammar"}'], "octavo[xgrammar]"),
    ],
)
def test_errors_name_the_extra(light: str, flags: list[str], message: str) -> None:
    text = run(light, "-m", "octavo", "run", "Once upon", *flags, "--max-tokens", "2", status=2)
    assert message in text
    assert "Traceback" not in text


def test_numpy_arrays_are_prompt_embeddings(light: str) -> None:
    code = """
import numpy as np
from octavo import LLM, SamplingParams
with LLM("octavo/stories", enable_prompt_embeds=True, max_model_len=64) as llm:
    prompt = {"prompt_embeds": np.zeros((3, SIZE), np.float32)}
    answers = llm.generate(prompt, SamplingParams(max_tokens=4), use_tqdm=False)
    print(list(answers[0].outputs[0].token_ids))
"""
    config = json.loads((ROOT / "octavo/builtin/stories/config.json").read_text())
    assert run(light, "-c", code.replace("SIZE", str(config["hidden_size"]))).startswith("[")


def test_readme(light: str) -> None:
    from tests.test_readme import OCTAVO, PYTHON, here

    (text,) = (text for text in PYTHON if "LLM(" in text)
    assert run(light, "-c", text).strip()
    lines = [here(words) for words in OCTAVO if words[0] == "run" and len(words) > 1]
    for words in lines[:1]:
        assert run(light, "-m", "octavo", *words).strip()
