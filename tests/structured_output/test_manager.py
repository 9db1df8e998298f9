"""Compiling beside the steps, and where requests stand in their grammars."""

from __future__ import annotations

import threading
import time
from functools import partial

import msgspec
import numpy as np
import pytest

from octavo.errors import GrammarError
from octavo.messages import EngineCoreRequest
from octavo.request import Request, RequestStatus
from octavo.structured_output import manager as module
from octavo.structured_output.manager import MAX_TEXT, StructuredOutputManager
from tests.params import core_params
from tests.structured_output.toys import STOP, ToyBackend, ToyGrammar, spec

VOCAB = 40


@pytest.fixture
def backend():
    backend = ToyBackend()
    yield backend
    backend.go.set()


@pytest.fixture
def manager(backend):
    manager = StructuredOutputManager(lambda: [backend], VOCAB)
    yield manager
    manager.shutdown()


def make(text, output=(), request_id="0", backend="auto"):
    params = msgspec.structs.replace(core_params(VOCAB), grammar=spec(text, backend))
    core = EngineCoreRequest(request_id, [5], params, 0.0, output_token_ids=list(output))
    request = Request(core)
    request.status = RequestStatus.WAITING_FOR_FSM
    return request


def finish(manager, *requests):
    """Adds requests and waits for them; the errors of those that failed."""
    left = [request for request in requests if not manager.add(request)]
    errors = {}
    while left:
        manager.wait(10)
        for request, error in manager.take_finished():
            left.remove(request)
            if error is not None:
                errors[request] = error
    return errors


def allowed(output):
    """Tokens that each row of a bitmask allows."""
    rows = np.frombuffer(output.bitmask, np.uint8).reshape(-1, 8)
    return [np.flatnonzero(np.unpackbits(row, bitorder="little")).tolist() for row in rows]


def test_a_grammar_is_compiled_once_and_kept(manager, backend):
    twins = [make("3,4 5"), make("3,4 5"), make("6")]
    assert finish(manager, *twins) == {}
    assert sorted(backend.compiled) == ["3,4 5", "6"]
    assert manager.add(make("3,4 5"))
    assert not manager.is_compiling


def test_the_backends_are_made_with_the_first_grammar():
    made = []
    manager = StructuredOutputManager(lambda: made.append(0) or [ToyBackend()], VOCAB)
    assert made == []
    finish(manager, make("3"), make("4"))
    assert made == [0]


def test_what_one_backend_cannot_the_next_one_does():
    first, second = ToyBackend("xgrammar"), ToyBackend("llguidance")
    first.compile = lambda grammar: (_ for _ in ()).throw(GrammarError("keyword foo"))
    manager = StructuredOutputManager(lambda: [first, second], VOCAB)
    assert finish(manager, make("3")) == {}
    assert second.compiled == ["3"]
    request = make("3 3", backend="xgrammar")
    assert "keyword foo" in finish(manager, request)[request].message
    bad = make("bad sing")
    assert finish(manager, bad)[bad].message == (
        "No grammar for this: keyword foo | llguidance cannot sing"
    )


def test_a_fault_of_a_backend_fails_its_request_only(manager, backend):
    request = make("nonsense")
    assert "ValueError" not in str(finish(manager, make("3")))
    assert "cannot be compiled" in finish(manager, request)[request].message


def test_libraries_that_cannot_be_loaded_are_not_the_requests_fault():
    def fail():
        raise ImportError("no such symbol")

    request = make("3")
    error = finish(StructuredOutputManager(fail, VOCAB), request)[request]
    assert (type(error).__name__, error.status) == ("StepFailedError", 500)
    assert "no such symbol" in error.message


@pytest.mark.parametrize("at", ["load", "compile", "match"])
def test_want_of_memory_is_the_engines_whatever_the_library_says(backend, monkeypatch, at):
    def fail(*args):
        raise ImportError("failed to map segment from shared object")

    def have_no_memory():
        raise MemoryError("there is none")

    request = make("3")
    if at == "match":
        manager = StructuredOutputManager(lambda: [backend], VOCAB)
        finish(manager, request)
        monkeypatch.setattr(ToyGrammar, "fill_bitmask", fail)
    elif at == "compile":
        manager = StructuredOutputManager(lambda: [backend], VOCAB)
        monkeypatch.setattr(backend, "compile", fail)
    else:
        manager = StructuredOutputManager(fail, VOCAB)
    monkeypatch.setattr(module, "check_memory", have_no_memory)
    ask = partial(manager.make_output, [(request, 0)], {}) if at == "match" else None
    with pytest.raises(MemoryError):
        (ask or partial(finish, manager, request))()


def test_compiling_holds_nobody_up_and_wakes_the_engine(manager, backend):
    woken = threading.Event()
    manager.wake = woken.set
    request = make("slow 3")
    assert not manager.add(request)
    assert manager.is_compiling
    assert not manager.has_finished
    assert manager.take_finished() == []
    assert not woken.is_set()
    backend.go.set()
    assert woken.wait(10)
    assert manager.has_finished
    assert manager.take_finished() == [(request, None)]


def test_what_takes_too_long_fails_and_the_rest_goes_on(manager, backend, monkeypatch):
    monkeypatch.setattr(module, "COMPILE_SECONDS", 0.05)
    slow = [make(f"slow {i + 2}") for i in range(3)]
    errors = finish(manager, *slow, make("3"))
    assert set(errors) == set(slow)
    assert "more than 0.05 s to compile" in errors[slow[0]].message
    more = [make(f"slow {i + 2} 3") for i in range(3)]
    messages = [e.message for e in finish(manager, *more).values()]
    assert len(messages) == 3
    assert any("try again later" in message for message in messages)
    backend.go.set()
    for thread in manager._lost:
        thread.thread.join(10)
    assert finish(manager, make("7")) == {}


def test_what_nobody_waits_for_is_not_compiled(manager, backend):
    blocking = [make("slow 2"), make("slow 3")]
    for request in blocking:
        manager.add(request)
    for _ in blocking:
        assert backend.running.acquire(timeout=10)
    gone = make("4")
    manager.add(gone)
    gone.status = RequestStatus.FINISHED_ABORTED
    backend.go.set()
    left = 2
    while left or manager.is_compiling:
        manager.wait(10)
        left -= len(manager.take_finished())
    assert "4" not in backend.compiled
    assert finish(manager, make("4")) == {}


def test_a_large_grammar_is_refused(manager):
    with pytest.raises(GrammarError, match=f"{MAX_TEXT + 1} characters; at most {MAX_TEXT}"):
        manager.add(make("3" * (MAX_TEXT + 1)))
    assert not manager.is_compiling


def test_the_cache_is_bounded(manager, backend, monkeypatch):
    monkeypatch.setattr(module, "CACHE_NBYTES", 3500)
    for i in range(5):
        finish(manager, make(str(i + 2)))
        manager.add(make("2"))  # what is used stays
    assert finish(manager, make("2"), make("6"), make("5")) == {}
    assert sorted(backend.compiled) == ["2", "3", "4", "5", "6"]
    finish(manager, make("4"))
    assert sorted(backend.compiled) == ["2", "3", "4", "4", "5", "6"]


def test_masks_follow_a_request_s_tokens(manager):
    request, other = make("3,4 5,6 7"), make("8")
    finish(manager, request, other)
    output, errors = manager.make_output([(request, 0), (other, 0)], {})
    assert allowed(output) == [[3, 4], [8]]
    assert output.req_ids == ["0", "0"]
    assert not errors
    request.append_output_token_ids([4, 6])
    output, _ = manager.make_output([(request, 0)], {})
    assert allowed(output) == [[7]]
    request.append_output_token_ids([7])
    output, _ = manager.make_output([(request, 0)], {})
    assert allowed(output) == [[STOP]]
    assert STOP in request.stop_token_ids


def test_each_draft_has_a_row_as_far_as_the_grammar_goes_along(manager):
    request = make("3,4 5,6 7,8 9")
    finish(manager, request)
    for _ in range(2):  # it is as if nothing had been drafted
        output, _ = manager.make_output([(request, 0)], {"0": [3, 6, 2, 9]})
        assert allowed(output) == [[3, 4], [5, 6], [7, 8], [7, 8], [7, 8]]


def test_forced_tokens_go_along_with_drafts(manager):
    request = make("3,4 5 6 7 8,9 2")
    finish(manager, request)
    output, _ = manager.make_output([(request, 2)], {})
    assert output.forced == {}
    request.append_output_token_ids([3])
    output, _ = manager.make_output([(request, 1)], {"0": [5]})
    assert output.forced == {"0": [5, 6, 7]}


def test_output_that_a_request_has_is_replayed(manager):
    request = make("3,4 5,6 7", output=[3, 5])
    assert finish(manager, request) == {}
    assert allowed(manager.make_output([(request, 0)], {})[0]) == [[7]]
    wrong = make("3,4 5,6 7", output=[3, 7])
    with pytest.raises(GrammarError, match=r"token number 1 \(7\)"):
        manager.add(wrong)
    later = make("3,4 5,6 7 8", output=[3, 7])
    assert "token number 1" in finish(manager, later)[later].message


def test_a_token_that_the_grammar_refuses_fails_its_request_only(manager):
    wrong, right = make("3,4 5", request_id="w"), make("3,4 5", request_id="r")
    finish(manager, wrong, right)
    wrong.append_output_token_ids([9])
    right.append_output_token_ids([4])
    output, errors = manager.make_output([(wrong, 0), (right, 0)], {})
    assert "internal error: token 9" in errors[wrong]
    assert output.req_ids == ["r"]
    assert allowed(output) == [[5]]


def test_a_grammar_that_is_stuck_fails_its_request_only(manager, monkeypatch):
    monkeypatch.setattr(module, "_STEP_SECONDS", 0.05)
    requests = [make("3", request_id=str(i)) for i in range(3)]
    finish(manager, *requests)
    go, fill = threading.Event(), ToyGrammar.fill_bitmask
    stuck = manager._states[requests[1]].grammar

    def slow(grammar, row):
        if grammar is stuck:
            go.wait(20)
        fill(grammar, row)

    monkeypatch.setattr(ToyGrammar, "fill_bitmask", slow)
    output, errors = manager.make_output([(r, 0) for r in requests], {})
    assert list(errors) == [requests[1]]
    assert "takes too long to match" in errors[requests[1]]
    assert output.req_ids == ["0", "2"]
    assert allowed(output) == [[3], [3]]
    go.set()


def test_a_grammar_that_is_always_slow_fails_its_request(manager, monkeypatch):
    monkeypatch.setattr(module, "_SECONDS", 0.0)
    monkeypatch.setattr(module, "_SECONDS_PER_TOKEN", 0.0)
    request = make("3")
    finish(manager, request)
    _, errors = manager.make_output([(request, 0)], {})
    assert "takes too long" in errors[request]


def test_faults_and_limits_of_a_grammar_fail_its_request(manager, monkeypatch):
    requests = [make("3", request_id=str(i)) for i in range(3)]
    finish(manager, *requests)
    faults = {0: GrammarError("its limits"), 1: ZeroDivisionError("oops")}
    for i, fault in faults.items():
        grammar = manager._states[requests[i]].grammar
        grammar.fill_bitmask = lambda row, fault=fault: (_ for _ in ()).throw(fault)
    output, errors = manager.make_output([(r, 0) for r in requests], {})
    assert errors[requests[0]] == "its limits"
    assert "ZeroDivisionError: oops" in errors[requests[1]]
    assert output.req_ids == ["2"]


def test_requests_that_end_are_forgotten(manager):
    request = make("3")
    finish(manager, request)
    assert len(manager._states) == 1
    del request
    deadline = time.monotonic() + 10
    while len(manager._states) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(manager._states) == 0
