"""Walk through a new user's first steps and mistakes, and print a line for each.

    python benchmarks/first_steps.py

Every step runs real commands or uses a real server that it starts. A line reports if the output is
what a user needs to continue; the exit status is 1 if any is not.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

STORIES = Path(__file__).resolve().parent.parent / "octavo" / "builtin" / "stories"
ENVIRONMENT = {**os.environ, "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}
STEPS: list[tuple[str, Callable[[], str]]] = []


def step(name: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Add a step: a function that returns an observation, or raises AssertionError."""

    def add(function: Callable[[], str]) -> Callable[[], str]:
        STEPS.append((name, function))
        return function

    return add


def octavo(*words: str, given: str | None = "") -> tuple[int, str]:
    """Run a command; return its status and its output.

    Args:
        words: arguments of `octavo`.
        given: standard input.
    """
    done = subprocess.run(
        [sys.executable, "-m", "octavo", *words],
        input=given,
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=300,
    )
    said = done.stdout + done.stderr
    assert "Traceback" not in said, said
    return done.returncode, said


def refused(*words: str, needed: str) -> str:
    """Run a command that must fail with a sentence; return that."""
    status, said = octavo(*words)
    line = said.strip().splitlines()[-1]
    assert status != 0, f"it did not fail: {said[-200:]}"
    assert re.search(needed, said), said[-300:]
    return line


@step("Ctrl-C during the first answer of a chat leaves no traceback")
def interrupt() -> str:
    """Stop `octavo run` in a terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [sys.executable, "-m", "octavo", "run"], ENVIRONMENT)
    said, end = "", time.monotonic() + 60
    # Inputs after texts, in turn: a question, Ctrl-C during the answer, the end.
    typed = [
        (r"\S", b"tell me a story about a dog\r"),
        (r"story about", b"\x03"),
        (r"", b"/bye\r"),
    ]
    with contextlib.suppress(OSError):
        while time.monotonic() < end:
            if select.select([terminal], [], [], 1.0)[0]:
                said += os.read(terminal, 65536).decode(errors="replace")
            elif typed and re.search(typed[0][0], said):
                os.write(terminal, typed.pop(0)[1])
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert not typed, said
    assert "Traceback" not in said, said
    assert status == 0, f"status {status}: {said[-300:]}"
    return "the chat went on and ended"


@step("flags stand anywhere")
def flags_anywhere() -> str:
    """Run `octavo run MODEL --raw --max-tokens 4 TEXT`."""
    status, said = octavo("run", "octavo/stories", "--raw", "--max-tokens", "4", "Once upon a")
    assert status == 0, said
    return said.strip().splitlines()[0]


@step("a base model continues the text, and says so")
def base_model() -> str:
    """Use a folder without a chat template."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "base"
        shutil.copytree(STORIES, folder)
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        path = folder / "tokenizer_config.json"
        config = json.loads(path.read_text())
        config.pop("chat_template", None)
        path.write_text(json.dumps(config))
        status, said = octavo("run", str(folder), "--max-tokens", "4", given="Once upon a\n")
        assert status == 0, said
        assert "continues the text" in said, said
        return "continues the text"


@step("a name that looks like a model or a file is no prompt")
def no_prompt() -> str:
    """Use words that the built-in model must not continue."""
    return " | ".join(
        [
            refused("run", "mistral", "hi there", needed="mistral"),
            refused("run", "model.gguf", "hi there", needed="file model.gguf does not exist"),
        ]
    )


@step("built-in names are suggested")
def suggestion() -> str:
    """Mistype a model."""
    return refused("run", "octavo/storys", "x y", needed="Did you mean octavo/stories")


@step("mistyped flags get long suggestions that are alike, or none")
def flags() -> str:
    """Mistype `--task`, `--max-model-length`."""
    first = refused("serve", "--task", "generate", needed="unknown flag --task")
    assert "-asc" not in first
    second = refused("serve", "--max-model-lenn", "5", needed="mean --max-model-len")
    return f"{first} | {second}"


@step("errors on the command line name flags")
def error_names() -> str:
    """Use a value out of range."""
    return refused("serve", "--max-model-len", "0", needed="--max-model-len=0")


@step("octavo version, help, completion")
def commands() -> str:
    """Use commands that users of other tools know."""
    version = octavo("version")[1].strip()
    for words in (("help",), ("help", "serve"), ("completion", "bash"), ("completion", "zsh")):
        status, said = octavo(*words)
        assert status == 0, said
        assert said.strip()
    return version


@step("each folder that is no model has a sentence of its own")
def folders() -> str:
    """Use an empty folder, an adapter, a GGUF file, a broken config.json, a Git-LFS pointer."""
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
    cases = {
        "empty": {},
        "adapter": {"adapter_config.json": "{}"},
        "gguf": {"model.gguf": "GGUF"},
        "broken": {"config.json": "{"},
        "pointer": {"config.json": pointer},
    }
    sentences = []
    with tempfile.TemporaryDirectory() as name:
        for case, files in cases.items():
            folder = Path(name) / case
            folder.mkdir()
            for file, text in files.items():
                (folder / file).write_text(text)
            sentences.append(refused("run", str(folder), "x y", needed=case.split("_")[0]))
    sentences = [text.replace(name, "") for text in sentences]
    assert len(set(sentences)) == len(cases)
    return " | ".join(text[:60] for text in sentences)


@step("simulate shows how long it will take")
def simulate() -> str:
    """Show the help of a short simulation."""
    status, said = octavo("simulate", "octavo/stories", "--help")
    assert status == 0, said
    return "described in --help"


@contextlib.contextmanager
def server(*flags: str) -> Iterator[tuple[str, list[str]]]:
    """Run a server of the built-in model; yield its address and the lines of its start."""
    words = ["serve", "octavo/stories", "--host", "127.0.0.1", "--port", "0", *flags]
    process = subprocess.Popen(
        [sys.executable, "-m", "octavo", *words],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=ENVIRONMENT,
    )
    assert process.stderr is not None
    lines: list[str] = []
    try:
        for line in process.stderr:
            lines.append(line.strip())
            if "ready: " in line:
                break
        found = re.search(r"at (http\S+)/v1", lines[-1])
        assert found is not None, lines
        yield found[1], lines
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)


def ask(url: str, path: str, status: int = 200, **fields: Any) -> Any:
    """Send a request to a server; return its answer."""
    answer = httpx.post(url + path, json=fields, timeout=120)
    assert answer.status_code == status, answer.text
    return answer.json()


CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "Tell me about a dog."}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


@step("a start begins with loading and ends with ready; a server takes what clients send")
def serve() -> str:
    """Check the start's lines and fields that clients of other servers send."""
    seen = []
    with server() as (url, lines):
        assert "loading octavo/stories" in lines[0], lines
        assert lines[-1].endswith(f"ready: octavo/stories at {url}/v1"), lines
        seen.append(lines[-1][-50:])
        both = {"guided_grammar": 'root ::= "a"', "structured_outputs": {"grammar": 'root ::= "a"'}}
        ask(url, CHAT, messages=[USER], max_tokens=4, **both)
        both["guided_grammar"] = 'root ::= "b"'
        ask(url, CHAT, 400, messages=[USER], max_tokens=4, **both)
        seen.append("equal grammars count once")
        answer = ask(
            url,
            CHAT,
            messages=[USER],
            max_tokens=8,
            reasoning_effort="low",
            verbosity="low",
            store=False,
            tools=[TOOL],
            tool_choice="none",
        )
        assert answer["choices"][0]["message"]["reasoning"] is None
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        history = [
            USER,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "3"},
            USER,
        ]
        ask(url, CHAT, messages=history, max_tokens=4)
        seen.append("tools of the history, reasoning_effort, verbosity, store")
        answer = ask(
            url,
            CHAT,
            messages=[USER],
            max_tokens=200,
            seed=3,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "person", "schema": PERSON},
            },
        )
        text = answer["choices"][0]["message"]["content"]
        if answer["choices"][0]["finish_reason"] == "stop":
            assert set(json.loads(text)) == {"name", "age"}, text
        seen.append(f"a schema: {' '.join(text.split())[:40]}")
        metrics = httpx.get(url + "/metrics", timeout=30).text
        assert "requests_running" in metrics
    return " | ".join(seen)


@step("a name of vLLM's that Octavo does not have gets one sentence")
def compat() -> str:
    """Run a script for vLLM that imports a missing name."""
    with tempfile.TemporaryDirectory() as name:
        script = Path(name) / "script.py"
        script.write_text("from vllm.distributed.nowhere import Something\n")
        done = subprocess.run(
            [sys.executable, "-m", "octavo.compat.vllm", str(script)],
            capture_output=True,
            text=True,
            env=ENVIRONMENT,
            timeout=120,
        )
    said = done.stderr.strip()
    assert done.returncode != 0
    assert "Traceback" not in said, said
    return said.splitlines()[-1]


def main() -> int:
    """Run all steps; return the exit status."""
    failed = 0
    for name, function in STEPS:
        try:
            seen = function()
        except Exception as error:
            failed += 1
            print(f"FAILED  {name}: {type(error).__name__}: {str(error)[:400]}", flush=True)
        else:
            print(f"ok      {name}: {seen}", flush=True)
    print(f"{len(STEPS) - failed} of {len(STEPS)} steps")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
