"""`octavo launch`, with a server and with agents that print what they get."""

import json
import os
import shlex
import subprocess
import sys
import tomllib

import pytest

from octavo import cli
from octavo.server.client import Client, Served, ServerError
from octavo.terminal import launch
from tests.server.test_run import serving
from tests.server.test_tools import TEMPLATE

PRINTER = """#!/bin/sh
exec "$PYTHON" -c 'import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:]]))' "$@"
"""
KNOWN = Served("http://x", "org/m", 100_000, True, True, frozenset(["POST /v1/messages"]))


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)
    flags = ("--chat-template", str(template), "--api-key", "secret")
    with serving("ready", *flags, "--served-model-name", "org/it's", "other") as process:
        yield process.url


@pytest.fixture
def environment(monkeypatch, tmp_path):
    """Put printing agents on PATH."""
    for name in launch.AGENTS:
        program = tmp_path / name
        program.write_text(PRINTER)
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("ANTHROPIC_API_KEY", "real")
    monkeypatch.delenv("OCTAVO_API_KEY", raising=False)


def started(url, *words):
    """Return the environment and the arguments of a started agent, and its warnings."""
    command = [sys.executable, "-m", "octavo", "launch", "--url", url, "--api-key", "secret"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=True)
    environment, arguments = json.loads(done.stdout)
    return environment, arguments, done.stderr


def printed(capsys, url, *words):
    """Return the lines of a dry run; they must not have the key."""
    status = cli.main(["launch", "--url", url, "--api-key", "secret", "--dry-run", *words])
    out = capsys.readouterr().out
    assert status == 0
    assert "secret" not in out
    return out.splitlines()


def values(lines):
    """Return the variables of a dry run."""
    words = [shlex.split(line) for line in lines if line.startswith("export ")]
    return dict(word.split("=", 1) for _, word in words)


@pytest.mark.usefixtures("environment")
def test_claude(url, capsys):
    environment, arguments, warnings = started(url, "claude", "--", "-p", "--model", "hi there")
    assert arguments == ["-p", "--model", "hi there"]
    wanted = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "secret",
        "ANTHROPIC_MODEL": "org/it's",
        "ANTHROPIC_SMALL_FAST_MODEL": "org/it's",
        "ANTHROPIC_DEFAULT_OPUS_MODEL": "org/it's",
        "ANTHROPIC_DEFAULT_SONNET_MODEL": "org/it's",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "org/it's",
        "CLAUDE_CODE_SUBAGENT_MODEL": "org/it's",
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": "256",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    }
    assert wanted.items() <= environment.items()
    assert "ANTHROPIC_API_KEY" not in environment
    assert "context of 256 tokens" in warnings
    assert "tool calls" not in warnings
    lines = printed(capsys, url, "claude", "--model", "other")
    assert lines[0] == "unset ANTHROPIC_API_KEY"
    assert lines[-1] == "claude"
    shown = values(lines)
    assert shown.keys() == wanted.keys()
    assert shown["ANTHROPIC_AUTH_TOKEN"] == "***"
    assert shown["ANTHROPIC_MODEL"] == "other"


@pytest.mark.usefixtures("environment")
def test_opencode(url, capsys):
    variables = values(printed(capsys, url, "opencode"))
    config = json.loads(variables["OPENCODE_CONFIG_CONTENT"])
    assert variables["OCTAVO_API_KEY"] == "***"
    assert config["model"] == config["small_model"] == "octavo/org/it's"
    provider = config["provider"]["octavo"]
    assert provider["options"] == {"baseURL": f"{url}/v1", "apiKey": "{env:OCTAVO_API_KEY}"}
    model = provider["models"]["org/it's"]
    assert (model["tool_call"], model["reasoning"]) == (True, True)
    assert model["limit"] == {"context": 256, "output": 128}


@pytest.mark.usefixtures("environment")
def test_aider(url, capsys):
    lines = printed(capsys, url, "aider", "--", "--yes")
    assert values(lines) == {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": "***"}
    assert shlex.split(lines[-1]) == [
        "aider",
        "--model",
        "openai/org/it's",
        "--no-show-model-warnings",
        "--yes",
    ]


def test_codex():
    settings = launch.AGENTS["codex"].settings(KNOWN, "secret")
    assert settings.environment == {"OCTAVO_API_KEY": "secret"}
    flags, words = settings.arguments[::2], settings.arguments[1::2]
    assert set(flags) == {"-c"}
    assert tomllib.loads("\n".join(words)) == {
        "model": "org/m",
        "model_provider": "octavo",
        "model_context_window": 100_000,
        "web_search": "disabled",
        "model_providers": {
            "octavo": {
                "name": "Octavo",
                "base_url": "http://x/v1",
                "env_key": "OCTAVO_API_KEY",
                "wire_api": "responses",
            }
        },
    }


def test_problems():
    claude, codex = launch.AGENTS["claude"], launch.AGENTS["codex"]
    assert launch.find_problems(claude, KNOWN) == []
    with pytest.raises(ServerError, match="POST /v1/responses"):
        launch.find_problems(codex, KNOWN)
    (problem,) = launch.find_problems(claude, KNOWN._replace(context_length=63_999))
    assert "context of 63999 tokens" in problem
    (problem,) = launch.find_problems(claude, KNOWN._replace(has_tools=False))
    assert "--tool-call-parser" in problem
    (problem,) = launch.find_problems(claude, KNOWN._replace(thinks=False))
    assert "no reasoning" in problem


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "AGENT is missing; choose one of claude, codex, opencode, aider"),
        (["emacs"], "agent 'emacs' is unknown"),
        (["claude"], "install the npm package @anthropic-ai/claude-code"),
        (["aider"], "install the Python package aider-chat"),
        (["claude", "--dry-run", "--url", "http://127.0.0.1:1"], "No answer from"),
        (["claude", "--dry-run", "--nope"], "unknown flag --nope"),
    ],
)
def test_errors(words, message, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["launch", *words]) != 0
    assert message in capsys.readouterr().err


def test_errors_of_the_server(url, capsys):
    for words, message in (
        (["--api-key", "wrong"], "API key"),
        (["--api-key", "secret", "--model", "nope"], "model 'nope' not found"),
    ):
        assert cli.main(["launch", "claude", "--dry-run", "--url", url, *words]) == 1
        assert message in capsys.readouterr().err
    client = Client(url, "secret", "a\0b")
    with pytest.raises(ServerError, match="control characters"):
        client.describe()
    client.close()


def test_a_server_that_is_not_ready_or_not_octavos():
    with serving("loading") as process:
        client = Client(process.url, None, "octavo/stories")
        with pytest.raises(ServerError, match="not ready: loading the model"):
            client.describe()
        client._url = process.url + "/v1/x"
        with pytest.raises(ServerError):
            client.describe()
        client.close()
