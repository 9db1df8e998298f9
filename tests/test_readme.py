"""README.md: every block runs as written.

Models that would have to be downloaded, and placeholders for the reader's names, are replaced by
the built-in model; the server's port is a free one. Benchmarks, which take long, are only parsed:
their own tests run them.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from octavo import cli
from octavo.config import BUILTIN_MODEL
from tests.e2e.harness import free_port
from tests.gguf_files import convert
from tests.models.harness import make_hf

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
PYTHON = [text for language, text in BLOCKS if language == "python"]
LINES = [
    shlex.split(line, comments=True)
    for language, text in BLOCKS
    if language != "python"
    for line in text.splitlines()
]
OCTAVO = [words[1:] for words in LINES if words and words[0] == "octavo"]
MODELS = {"TinyLlama/TinyLlama-1.1B-Chat-v1.0", "PATH_OR_HUB_ID", "MODEL"}


def here(words):
    """Return the words with the built-in model in place of others."""
    return [BUILTIN_MODEL if word in MODELS else word for word in words]


def octavo(*words, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", "octavo", *words], timeout=250, text=True, check=True, **kwargs
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Return the address of the README's server, on a free port."""
    (words,) = (here(words) for words in OCTAVO if words[0] == "serve")
    port = free_port()
    words[words.index("8000")] = str(port)
    words += ["--host", "127.0.0.1"]
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as file:
        process = subprocess.Popen([sys.executable, "-m", "octavo", *words], stderr=file)
        try:
            url = f"http://localhost:{port}"
            for _ in range(2000):
                assert process.poll() is None, log.read_text()
                try:
                    if httpx.get(url + "/ready", timeout=60).status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                try:
                    process.wait(0.1)
                except subprocess.TimeoutExpired:
                    continue
            yield url
        finally:
            process.terminate()
            process.wait(100)


def run_python(text):
    done = subprocess.run(
        [sys.executable, "-c", text],
        timeout=250,
        text=True,
        capture_output=True,
        check=True,
        cwd=ROOT,
    )
    return done.stdout.strip()


def test_the_offline_example():
    (text,) = (text for text in PYTHON if "LLM(" in text)
    assert run_python(text)[-1] in '.!?"', "a whole sentence"


def test_the_example_with_openais_client(server):
    (text,) = (text for text in PYTHON if "openai" in text)
    assert run_python(text.replace("http://localhost:8000", server))


def test_the_other_python_examples_are_none():
    assert len(PYTHON) == 2  # a further one needs a test here


@pytest.mark.parametrize("words", [w for w in OCTAVO if w[0] == "run"], ids=" ".join)
def test_octavo_run(words, tmp_path):
    """Without a text, the command reads standard input, which ends at once."""
    words = [str(tmp_path / word) if word.endswith(".gguf") else word for word in words]
    for path in (Path(word) for word in words if word.endswith(".gguf")):
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
        model = make_hf("LlamaForCausalLM", vocab_size=128, num_hidden_layers=1, **sizes)
        convert(model, "llama", path, {"": "q4_0"})
    text = None if len(words) > 1 and " " in words[-1] else "The dog"
    done = octavo(*here(words), capture_output=True, input=text)
    assert done.stdout.strip()
    *logs, _figures = done.stderr.splitlines()
    assert len(logs) <= 2


def test_octavo_list():
    (words,) = (words for words in OCTAVO if words[0] == "list")
    assert BUILTIN_MODEL in octavo(*words, capture_output=True).stdout


def test_octavo_chat(server):
    (words,) = (words for words in OCTAVO if words[0] == "chat")
    done = octavo(*words, "--url", server, capture_output=True, input="What is 3 + 4?")
    assert done.stdout.strip()


TOOLS = ("bench", "inspect", "plan", "quality", "convert", "transcribe")


@pytest.mark.parametrize("words", [w for w in OCTAVO if w[0] in TOOLS], ids=" ".join)
def test_benchmarks_and_model_tools_are_read(words):
    args, unknown = cli.build_parser(words).parse_known_args(words)
    assert args.command is not None
    assert unknown == []


def test_commands_and_files_are_there():
    known = {"run", "serve", "chat", "complete", "list", "pull", "help", *TOOLS}
    assert {words[0] for words in OCTAVO} <= known
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
    for words in LINES:
        if words and words[0] == "make":
            assert words[1] in targets
    for link in re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text()):
        assert os.path.exists(ROOT / link), link
