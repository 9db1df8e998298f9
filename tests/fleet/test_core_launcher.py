"""Engine processes that cannot be started, or end in unusual ways."""

import errno
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from octavo.config import EngineConfig
from octavo.engine.core_messages import CoreProcessSetup
from octavo.fleet import core_launcher
from octavo.fleet import process as process_module
from octavo.fleet.core_launcher import CoreLauncher
from octavo.fleet.ipc_channel import IpcChannel
from octavo.fleet.process import CoreProcess
from octavo.plan.group_layout import ExpertGroupLayout
from octavo.plan.setup import Machine
from octavo.system.distributed import GroupMemory
from tests.e2e.harness import wait_until


def setup() -> CoreProcessSetup:
    return CoreProcessSetup(EngineConfig.from_kwargs(), "/nowhere", 64, None, False, "info", "text")


def launcher(**kwargs) -> CoreLauncher:
    return CoreLauncher(
        EngineConfig.from_kwargs(),
        Path("/nowhere"),
        default_batched_tokens=64,
        request_memory=None,
        warm_spare=None,
        log_level="info",
        log_format="text",
        **kwargs,
    )


def test_the_engines_that_others_wait_for_in_several_stages(monkeypatch):
    """The earliest step that is not complete, and its first stage, decide."""
    settings = {"enable_expert_parallel": True, "data_parallel_size": 2, "num_threads": 1}
    config = EngineConfig.from_kwargs(pipeline_parallel_size=2, **settings)
    monkeypatch.setattr(EngineConfig, "from_kwargs", lambda: config)
    one, layout = launcher(), ExpertGroupLayout(2)
    assert one.engines_behind() == []
    memories = [Path(path) for path in one.make_setup(None, 0).expert_memory]

    def write(stage, steps, arrivals):
        counters = bytearray(layout.nbytes)
        for offset, values in ((layout.steps, steps), (layout.arrivals, arrivals)):
            for rank, value in enumerate(values):
                counters[offset(rank) : offset(rank) + 4] = value.to_bytes(4, "little")
        memories[stage].write_bytes(bytes(GroupMemory.size(0)) + counters)

    write(0, (8, 7), (16, 14))  # engine 0 waits here for engine 1, which waits for its stage 1
    write(1, (6, 6), (11, 12))
    assert one.engines_behind() == [0]
    write(0, (6, 6), (11, 12))
    write(1, (6, 6), (12, 11))
    assert one.engines_behind() == [0]
    one.close()
    assert one.engines_behind() == []


def test_engines_on_several_machines_share_nothing_with_earlier_ones(monkeypatch):
    settings = {"enable_expert_parallel": True, "data_parallel_size": 4, "num_threads": 1}
    config = EngineConfig.from_kwargs(data_parallel_size_local=2, **settings)
    monkeypatch.setattr(EngineConfig, "from_kwargs", lambda: config)
    one = launcher()
    one.span(Machine(0, 2, "tcp://head:1", b"public", b"secret", b"first"))
    first = one.make_setup(None, 3)
    assert first.machine == Machine(0, 2, "tcp://head:1", b"public", b"secret", b"first")
    Path(first.expert_memory[0]).write_bytes(b"rows")
    one.note_launch(3)
    assert not one.is_outdated(3)
    one.begin_generation()
    second = one.make_setup(None, 3)
    assert one.is_outdated(3)
    one.note_launch(3)
    assert not one.is_outdated(3)
    assert second.machine.generation != b"first"
    assert second.machine.address == "tcp://head:1"
    assert second.expert_memory != first.expert_memory
    assert Path(first.expert_memory[0]).read_bytes() == b""
    # The relay is the last rank; the first engine elsewhere stands for all of them.
    layout = ExpertGroupLayout(3)
    counters = bytearray(layout.nbytes)
    for rank, value in enumerate((7, 7, 6)):
        counters[layout.arrivals(rank) : layout.arrivals(rank) + 1] = bytes([value])
    Path(second.expert_memory[0]).write_bytes(bytes(GroupMemory.size(0)) + counters)
    assert one.engines_behind() == [2]
    one.close()
    assert not Path(second.expert_memory[0]).exists()


def has_ended(process: CoreProcess) -> None:
    """Wait for the end, without reaping the process."""
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGKILL, "killed by SIGKILL (out of memory?)"),
        (signal.SIGRTMIN + 6, f"killed by signal {signal.SIGRTMIN + 6}"),
    ],
)
def test_a_signal_that_ended_it_is_named(number, words):
    process = CoreProcess()
    os.kill(process.pid, number)
    has_ended(process)
    assert process.describe_exit() == f"the engine process was {words}"
    process.shutdown()


def test_one_that_ends_before_it_has_its_setup():
    process = CoreProcess()
    process._process.kill()
    has_ended(process)
    process.start(setup())
    assert "SIGKILL" in process.describe_exit()
    process.shutdown()
    process.shutdown()


def refuse(*args, **kwargs):
    raise OSError(11, "Resource temporarily unavailable")


def test_there_is_no_room_for_a_spare(monkeypatch, caplog):
    made = launcher()
    monkeypatch.setattr(core_launcher, "CoreProcess", refuse)
    made.make_spare()
    assert "there is no warm spare: Resource temporarily unavailable" in caplog.text
    made.shutdown()


def test_there_is_one_spare_at_most_and_it_lives():
    made = launcher()
    made.make_spare()
    spare = made._spare
    made.make_spare()
    assert made._spare is spare
    spare._process.kill()
    has_ended(spare)
    made.make_spare()
    assert made._spare.pid != spare.pid
    assert made._spare.describe_exit() is None
    assert spare._process.returncode is not None  # nothing is left of it
    made.shutdown()


def test_a_spare_has_imported_what_an_engine_needs():
    made = launcher()
    made.make_spare()
    maps = Path(f"/proc/{made._spare.pid}/maps")
    wanted = {"_native"}
    wait_until(lambda: all(name in maps.read_text() for name in wanted))
    made.shutdown()


@pytest.mark.parametrize("reason", [errno.EPERM, errno.EMFILE])
def test_a_channel_without_a_descriptor_of_the_process(monkeypatch, tmp_path, reason):
    def forbidden(pid):
        raise OSError(reason, "not here")

    monkeypatch.setattr(os, "pidfd_open", forbidden, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    addresses = f"ipc://{tmp_path}/in", f"ipc://{tmp_path}/out"
    if reason == errno.EMFILE:
        with pytest.raises(OSError, match="not here"):
            IpcChannel(*addresses, os.getpid())
    else:
        IpcChannel(*addresses, os.getpid()).close()


def test_a_spare_that_is_stopped_is_not_used():
    made = launcher()
    made.make_spare()
    spare = made._spare
    os.kill(spare.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, spare.pid, os.WSTOPPED | os.WNOWAIT)
    process = made.launch(None)
    assert process.pid != spare.pid
    assert spare._process.returncode == -signal.SIGKILL
    process.shutdown(0.0)
    made.shutdown()


def test_one_that_stays_stopped_is_killed():
    process = CoreProcess()
    process.kill_if_stopped(5.0, 1.0)  # it runs
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    process.kill_if_stopped(0.5, 1.0)
    os.kill(process.pid, signal.SIGCONT)
    os.waitid(os.P_PID, process.pid, os.WCONTINUED | os.WNOWAIT)
    process.kill_if_stopped(0.5, 1.0)  # it continues, and the earlier stop is forgotten
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    process.kill_if_stopped(0.5, 1.0)
    assert process.describe_exit() is None
    assert not process.was_stopped
    process.kill_if_stopped(0.5, 1.0)
    process.shutdown()
    assert process.was_stopped
    assert process.describe_exit() == (
        "the engine process was stopped by a signal for 1.0 s and was killed"
    )


def test_there_is_no_room_for_sockets(monkeypatch):
    process = CoreProcess()
    made = launcher(process=process)
    monkeypatch.setattr(process_module, "SocketFolder", refuse)
    with pytest.raises(OSError, match="Resource temporarily unavailable"):
        made.launch(None)
    assert process.describe_exit() is not None  # it has been reaped


def test_a_start_removes_the_sockets_of_engines_that_were_killed_with_their_server(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first = CoreProcess()
    first.start(setup())
    (living,) = tmp_path.iterdir()
    # As a killed process leaves it: its lock is free.
    (killed := tmp_path / f"{living.name[:-3]}old").mkdir()
    second = CoreProcess()
    second.start(setup())
    assert living.exists()
    assert not killed.exists()
    first.shutdown(0.0)
    second.shutdown(0.0)
    assert list(tmp_path.iterdir()) == []


def test_an_address_that_cannot_be_had(tmp_path):
    address = f"ipc://{tmp_path}/no/such/folder"
    with pytest.raises(OSError, match="No such file"):
        IpcChannel(address, address)
