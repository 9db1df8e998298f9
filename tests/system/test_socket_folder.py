"""Folder of a killed process, which the next process removes."""

import os
import signal
import subprocess
import sys
import tempfile

import pytest

from octavo.system.socket_folder import SocketFolder

PREFIX = "octavo-router-"


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def killed(temporary):
    """Return the folder of a process that was killed."""
    code = (
        "import os, signal\nfrom octavo.system.socket_folder import SocketFolder\n"
        f"folder = SocketFolder({PREFIX!r})\n(folder.path / 'replica-0').touch()\n"
        "print(folder.path)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-uc", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    assert done.returncode == -signal.SIGKILL
    return done.stdout.strip()


def test_folders_of_the_dead_are_removed_and_no_others(temporary):
    living = SocketFolder(PREFIX)
    (living.path / "replica-0").touch()
    (temporary / "octavo-other").mkdir()
    (temporary / "elsewhere").mkdir()
    (temporary / "octavo-router-link").symlink_to(temporary / "elsewhere")
    left = killed(temporary)
    assert os.path.exists(left)
    new = SocketFolder(PREFIX)
    assert not os.path.exists(left)
    assert (living.path / "replica-0").exists()
    assert (temporary / "octavo-other").exists()
    assert (temporary / "elsewhere").exists()
    assert new.path.stat().st_mode & 0o777 == 0o700
    for folder in (new, living):
        folder.close()
        assert not folder.path.exists()


def test_a_folder_that_is_removed_before_it_is_locked_is_made_again(temporary, monkeypatch):
    make, made = tempfile.mkdtemp, []

    def make_and_lose(prefix):
        made.append(make(prefix=prefix))
        if len(made) == 1:
            SocketFolder(PREFIX).close()
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_lose)
    folder = SocketFolder(PREFIX)
    assert folder.path.exists()
    folder.close()
