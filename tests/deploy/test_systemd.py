"""Unit of systemd: its form, its flags, its readiness."""

import contextlib
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from octavo import cli
from octavo.config import EngineConfig, ServerConfig, build_section, section_fields
from octavo.config.arguments import engine_kwargs, given_settings
from octavo.config.settings_file import add_from_file

FOLDER = Path(__file__).parents[2] / "deploy" / "systemd"
UNIT = FOLDER / "octavo.service"


def settings():
    """Return the values of each setting of the unit."""
    found = {}
    for line in UNIT.read_text().splitlines():
        if line and line[0] not in "#[":
            name, value = line.split("=", 1)
            found.setdefault(name, []).append(value)
    return found


def words():
    """Return the words of the command with this repository's settings file."""
    [command] = settings()["ExecStart"]
    program, *rest = shlex.split(command.replace("/etc/octavo/", f"{FOLDER}/"))
    assert program.endswith("/bin/octavo")
    return rest


def test_the_command_is_understood():
    args = cli.build_parser(words()).parse_args(words())
    add_from_file(args.parser, args)
    [model] = vars(args).pop("model")
    EngineConfig.from_kwargs(**engine_kwargs(args, model))
    server = build_section(ServerConfig, given_settings(args, section_fields(ServerConfig)))
    assert server.state_dir == "${STATE_DIRECTORY}"
    assert server.shutdown_timeout < int(settings()["TimeoutStopSec"][0])
    assert server.host == yaml.safe_load((FOLDER / "octavo.yaml").read_text())["host"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path):
    unit = tmp_path / UNIT.name
    program = Path(sys.executable).with_name("octavo")
    unit.write_text(UNIT.read_text().replace("/opt/octavo/bin/octavo", str(program)))
    for check in (["verify", "--man=no"], ["security", "--offline=yes", "--threshold=20"]):
        done = subprocess.run(["systemd-analyze", *check, unit], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert check[0] == "security" or done.stderr == ""


def test_the_server_tells_systemd_that_it_is_ready(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.settimeout(240)
        log = tmp_path / "log"
        command = [sys.executable, "-m", "octavo", *words(), "--port", "0", "-asc", "2"]
        command += ["--max-model-len", "256", "--kv-cache-memory-bytes", "8M", "--num-threads", "1"]
        command.remove("--state-dir")  # not with two front ends
        command.remove("${STATE_DIRECTORY}")
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=out, env={"NOTIFY_SOCKET": str(tmp_path / "notify")}
            )
        try:
            assert receiver.recv(100) == b"READY=1", log.read_text()
            assert "INFO ready: octavo/stories" in log.read_text()
        finally:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
        assert process.wait() == 0
