"""Real grammar processes: their limits, their deaths, and the effect on other requests."""

from __future__ import annotations

import os
import signal
import sys
import time

import psutil
import pytest

from octavo.errors import GrammarError
from octavo.structured_output import compiler as compiler_module
from octavo.structured_output.client import GrammarHelper, HelperSetup
from octavo.structured_output.manager import StructuredOutputManager
from tests.structured_output.test_manager import VOCAB, allowed, finish, make
from tests.structured_output.toys import STOP

COMMAND = [sys.executable, "-m", "tests.structured_output.toys"]
MAX_NBYTES = 64 * 2**20


@pytest.fixture(scope="module")
def shared():
    helpers = []

    def start(name):
        helpers.append(GrammarHelper(COMMAND, HelperSetup(name, "", VOCAB, [STOP], MAX_NBYTES)))
        return helpers[-1]

    manager = StructuredOutputManager(start, ["toy"], VOCAB)
    manager.helpers = helpers
    finish(manager, make("3"))
    yield manager
    manager.shutdown()


@pytest.fixture
def manager(shared, monkeypatch):
    monkeypatch.setattr(compiler_module, "COMPILE_SECONDS", 0.3)
    return shared


def pid_of(manager, request):
    return manager._states[request].process.pid


def wait_for_end(pid):
    for _ in range(6000):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return
        except psutil.NoSuchProcess:
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} lives on")


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("spin", "more than 5 s of processor time to compile"),
        ("eat", "more than 64 MiB to compile"),
        ("crash", "the library failed on it (SIGABRT)"),
    ],
)
def test_a_grammar_that_breaks_compiling_is_refused(manager, what, reason):
    bad, good = make(what, tenant="a"), make(f"3,4 5 {len(what)}", tenant="b")
    errors = finish(manager, bad, good)
    assert list(errors) == [bad]
    assert isinstance(errors[bad], GrammarError)
    assert reason in errors[bad].message
    assert allowed(manager.make_output([(good, 0)], {})[0]) == [[3, 4]]


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("spin", "takes too long to match"),
        ("eat", "takes too much memory to match"),
        ("crash", "the library failed on it (status -6)"),
    ],
)
def test_a_grammar_that_breaks_matching_fails_its_requests_only(manager, what, reason):
    bad, good = make(f"match {what}", request_id="b"), make("3,4 5", request_id="g")
    assert finish(manager, bad, good) == {}
    manager.make_output([(bad, 0), (good, 0)], {})
    bad.append_output_token_ids([3] * 20)
    good.append_output_token_ids([4])
    output, errors = manager.make_output([(bad, 0), (good, 0)], {})
    assert list(errors) == [bad]
    assert reason in errors[bad]
    assert allowed(output) == [[5]]
    if what != "eat":  # which is an error that the process survives
        with pytest.raises(GrammarError, match="used before"):
            manager.add(make(f"match {what}"))


def test_a_grammar_whose_masks_are_slow_is_refused_before_it_runs(manager):
    request = make("slow masks 3")
    assert "takes too long to match" in finish(manager, request)[request].message


def test_requests_survive_kills_of_the_process_and_of_the_helper(manager, monkeypatch):
    request = make("3,4 5,6 7,8 9")
    finish(manager, request)
    for victim, token, then in [("process", 3, [5, 6]), ("helper", 6, [7, 8])]:
        before = pid_of(manager, request)
        pid = before if victim == "process" else manager.helpers[-1]._process.pid
        # The helper may have died without having been waited for.
        monkeypatch.setattr(manager.helpers[-1]._process, "poll", lambda: None)
        os.kill(pid, signal.SIGKILL)
        wait_for_end(before)
        request.append_output_token_ids([token])
        output, errors = manager.make_output([(request, 0)], {})
        assert errors == {}
        assert allowed(output) == [then]
        assert pid_of(manager, request) != before
    assert len(manager.helpers) == 2


def test_all_processes_end_with_the_engine():
    helper = GrammarHelper(COMMAND, HelperSetup("toy", "", VOCAB, [STOP], MAX_NBYTES))
    assert helper.read_loaded().error is None
    pids = [helper._process.pid, helper.fork(None).pid]
    helper.socket.close()  # as the end of the engine's process does
    for pid in pids:
        wait_for_end(pid)


def test_a_helper_says_why_it_cannot_load():
    setup = HelperSetup("llguidance", "/nowhere", VOCAB, [STOP], MAX_NBYTES)
    helper = GrammarHelper([sys.executable, "-m", "octavo.structured_output.process"], setup)
    answer = helper.read_loaded()
    assert answer.error_kind == "ModelError"
    assert "/nowhere" in answer.error
    helper.close()


def test_a_helper_that_does_not_answer_counts_as_gone():
    helper = GrammarHelper(COMMAND, HelperSetup("toy", "", VOCAB, [STOP], MAX_NBYTES))
    assert helper.read_loaded().error is None
    helper.socket.settimeout(0.05)
    os.kill(helper._process.pid, signal.SIGSTOP)
    with pytest.raises(OSError, match="timed out"):
        helper.fork(None)
    assert not helper.is_alive
    assert helper.wait(1) == -signal.SIGKILL
    helper.close()
