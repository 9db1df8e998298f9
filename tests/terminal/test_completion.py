"""Completions of shells, for the installed ones."""

import contextlib
import io
import re
import shutil
import subprocess

import pytest

from octavo import cli
from tests.terminal.pseudo import Terminal


@pytest.fixture(scope="module")
def scripts():
    """Return the output of `octavo completion`, by shell."""
    found = {}
    for shell in ("bash", "zsh", "fish"):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert cli.main(["completion", shell]) == 0
        found[shell] = out.getvalue()
    return found


CASES = [
    (["se"], ["serve"]),
    (["comple"], ["complete", "completion"]),
    (["bench", "th"], ["throughput"]),
    (["serve", "--max-model"], ["--max-model-len"]),
    (["bench", "serve", "--request-r"], ["--request-rate"]),
    (["serve", "--request-r"], []),
    (["serve", "--log-format", ""], ["text", "json"]),
    (["serve", "m", "--dtype", "b"], ["bfloat16"]),
    (["router", "--repl"], ["--replicas"]),
    (["serve", "--log-format=j"], ["--log-format=json"]),
    (["completion", ""], ["bash", "zsh", "fish"]),
    (["serve", "--download-dir", "no/such"], []),
]


@pytest.mark.parametrize(("words", "found"), CASES)
def test_bash(scripts, words, found):
    given = " ".join(f"'{word}'" for word in ["octavo", *words])
    code = f"{scripts['bash']}COMP_WORDS=({given}); COMP_CWORD={len(words)}; _octavo"
    code += "; printf '%s\\n' \"${COMPREPLY[@]}\""
    done = subprocess.run(
        ["bash", "--norc", "-c", code], capture_output=True, text=True, check=True, timeout=100
    )
    assert done.stderr == ""
    assert done.stdout.split() == found


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
@pytest.mark.parametrize(("words", "found"), CASES[:-1])
def test_fish(scripts, tmp_path, words, found):
    line = " ".join(["octavo", *words])
    file = tmp_path / "octavo.fish"  # too long for an argument
    file.write_text(scripts["fish"])
    code = f'source {file}; complete -C "{line}"'
    done = subprocess.run(
        ["fish", "--no-config", "-c", code], capture_output=True, text=True, check=True, timeout=100
    )
    assert done.stderr == ""
    assert [line.partition("\t")[0] for line in done.stdout.splitlines()] == sorted(found)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh(scripts, tmp_path):
    file = tmp_path / "octavo.zsh"
    file.write_text(scripts["zsh"])
    env = {"TERM": "dumb", "HOME": str(tmp_path), "ZDOTDIR": str(tmp_path)}
    with Terminal(shutil.which("zsh"), "-f", "-i", columns=200, env=env) as zsh:
        zsh.type(f"source {file}; echo rea''dy\n")
        zsh.wait_for("ready\r\n")
        for words, found in CASES[:-1]:
            if len(found) == 1:
                zsh.type(" ".join(["octavo", *words]) + "\t")
                zsh.wait_for(re.escape(" ".join(["octavo", *words[:-1], *found])) + " ")
                zsh.type("\x15")


def test_an_unknown_shell_is_refused(capsys):
    assert cli.main(["completion", "tcsh"]) == 2
    assert "choose one of bash, zsh, fish" in capsys.readouterr().err
