"""What shells complete, as far as they are installed."""

import contextlib
import io
import shutil
import subprocess

import pytest

from octavo import cli


@pytest.fixture(scope="module")
def scripts():
    """What `octavo completion` prints, by shell."""
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
    (["completion", "z"], []),
    (["serve", "--download-dir", "no/such"], []),
]


@pytest.mark.parametrize(("words", "found"), CASES)
def test_bash(scripts, words, found):
    given = " ".join(f"'{word}'" for word in ["octavo", *words])
    code = f"{scripts['bash']}COMP_WORDS=({given}); COMP_CWORD={len(words)}; _octavo"
    code += "; printf '%s\\n' \"${COMPREPLY[@]}\""
    done = subprocess.run(
        ["bash", "--norc", "-c", code], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stderr == ""
    assert done.stdout.split() == found


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
@pytest.mark.parametrize(("words", "found"), CASES[:-2])
def test_fish(scripts, words, found):
    line = " ".join(["octavo", *words])
    code = scripts["fish"] + f'complete -C "{line}"'
    done = subprocess.run(
        ["fish", "--no-config", "-c", code], capture_output=True, text=True, check=True, timeout=30
    )
    assert [line.partition("\t")[0] for line in done.stdout.splitlines()] == sorted(found)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_reads_its_script(scripts):
    done = subprocess.run(
        ["zsh", "-f", "-n", "-c", scripts["zsh"]], capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_unknown_shell_is_refused(capsys):
    assert cli.main(["completion", "tcsh"]) == 2
    assert "choose one of bash, zsh, fish" in capsys.readouterr().err
