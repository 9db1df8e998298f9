"""Common code of the installers: environments, pip, log files, and the record of an installation.

Each peer has its own folder, `FOLDER/NAME`. `installed.json` in it is written last, so an
interrupted installation does not count as installed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TORCH = "torch==2.13.0"  # installed first: other specs would install the CUDA build
MARKER = "installed.json"


class CompareError(Exception):
    """Error that ends a comparison; the message contains the remedy."""


def run(command: list[Any], log: Path, *, env: Mapping[str, str] | None = None) -> None:
    """Run a command with its output in `log`.

    Raises:
        CompareError: the command failed; the message contains the end of the output.
    """
    words = [str(word) for word in command]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        out.write(f"\n$ {' '.join(words)}\n".encode())
        out.flush()
        try:
            done = subprocess.run(
                words,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=None if env is None else {**os.environ, **env},
                check=False,
            )
        except FileNotFoundError:
            raise CompareError(f"{words[0]} is not on this machine; install it.") from None
    if done.returncode != 0:
        tail = log.read_text(errors="replace")[-1500:]
        raise CompareError(f"{words[0]} failed (status {done.returncode}); end of {log}:\n{tail}")


def make_environment(folder: Path, log: Path) -> Path:
    """Make a virtual environment in `folder` if it is missing; return its interpreter."""
    python = folder / "bin" / "python"
    if not python.exists():
        run([sys.executable, "-m", "venv", "--clear", folder], log)
    return python


def pip_install(python: Path, log: Path, *words: str | Path) -> None:
    """Install packages with an environment's own pip."""
    run([python, "-m", "pip", "install", "--quiet", *words], log)


def versions(python: Path, *packages: str) -> dict[str, str]:
    """Return the installed versions of packages in an environment."""
    code = (
        "import json, sys, importlib.metadata as m;"
        "print(json.dumps({name: m.version(name) for name in sys.argv[1:]}))"
    )
    command = [str(python), "-c", code, *packages]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    result: dict[str, str] = json.loads(found)
    return result


def size_mib(folder: Path) -> float:
    """Return the size of a folder on the disk in MiB."""
    return sum(f.lstat().st_size for f in folder.rglob("*") if not f.is_dir()) / 2**20


def write_marker(folder: Path, note: dict[str, Any]) -> None:
    """Record that a peer is installed, with its versions."""
    write_json(folder / MARKER, note)


def read_marker(folder: Path) -> dict[str, Any] | None:
    """Return the record of `write_marker`, or None if the peer is not installed."""
    try:
        note: dict[str, Any] = json.loads((folder / MARKER).read_text())
    except FileNotFoundError:
        return None
    return note


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: a reader never sees half of it."""
    new = path.with_name(path.name + ".new")
    with new.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


def need_tool(name: str) -> str:
    """Return the path of a program next to this interpreter, or on the PATH."""
    path = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if path is None:
        raise CompareError(f"{name} is not on this machine; install it (pip install {name}).")
    return path
