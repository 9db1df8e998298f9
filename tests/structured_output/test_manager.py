"""Compilation concurrent with the steps, and the states of requests in their grammars."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import msgspec
import numpy as np
import pytest

from octavo.errors import GrammarError
from octavo.request import Request, RequestStatus
from octavo.structured_output import compiler
from octavo.structured_output import manager as module
from octavo.structured_output.manager import MAX_TEXT, StructuredOutputManager
from tests.params import core_params, core_request
from tests.structured_output.toys import (
    STOP,
    ThreadHelper,
    ThreadProcess,
    ToyBackend,
    ToyGrammar,
    make_manager,
    spec,
)

VOCAB = 40


@pytest.fixture
def backend():
    backend = ToyBackend()
    yield backend
    backend.go.set()


@pytest.fixture
def woken():
    return threading.Event()


@pytest.fixture
def manager(backend, woken):
    manager = make_manager(backend, vocab_size=VOCAB, wake=woken.set)
    yield manager
    backend.go.set()
    manager.shutdown()


def make(text, output=(), request_id="0", backend="auto", tenant=None):
    params = msgspec.structs.replace(core_params(VOCAB), grammar=spec(text, backend))
    core = core_request(request_id, [5], params, output_token_ids=list(output), tenant=tenant)
    request = Request(core)
    request.status = RequestStatus.WAITING_FOR_FSM
    return request


def finish(manager, *requests):
    """Add requests and wait for them; return the errors of those that failed."""
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
    """Return the tokens that each row of a bitmask allows."""
    rows = np.frombuffer(output.bitmask, np.uint8).reshape(-1, 8)
    return [np.flatnonzero(np.unpackbits(row, bitorder="little")).tolist() for row in rows]


def test_a_grammar_is_compiled_once_and_kept(manager, backend):
    assert finish(manager, make("3,4 5"), make("3,4 5")) == {}
    assert backend.compiled == ["3,4 5"]
    assert finish(manager, make("6")) == {}
    assert backend.compiled == ["3,4 5", "6", "6"]  # once more in the process of the other one
    assert manager.add(make("3,4 5"))
    assert manager.add(make("6"))
    assert not manager.is_compiling


def test_compiling_holds_nobody_up_and_wakes_the_engine(manager, backend, woken):
    request = make("slow 3")
    assert not manager.add(request)
    assert manager.is_compiling
    assert not manager.has_finished
    assert manager.take_finished() == []
    assert not woken.is_set()
    backend.go.set()
    assert woken.wait(60)
    assert manager.has_finished
    assert manager.take_finished() == [(request, None)]


def test_a_large_grammar_is_refused(manager):
    with pytest.raises(GrammarError, match=f"{MAX_TEXT + 1} characters; at most {MAX_TEXT}"):
        manager.add(make("3" * (MAX_TEXT + 1)))
    assert not manager.is_compiling


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
    for _ in range(2):  # the state is as without drafts
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


def test_a_token_that_the_grammar_refuses_fails_its_request_only(manager):
    wrong, right = make("3,4 5", request_id="w"), make("3,4 5", request_id="r")
    finish(manager, wrong, right)
    wrong.append_output_token_ids([9])
    right.append_output_token_ids([4])
    output, errors = manager.make_output([(wrong, 0), (right, 0)], {})
    assert "internal error: token 9" in errors[wrong]
    assert output.req_ids == ["r"]
    assert allowed(output) == [[5]]


def test_a_grammar_that_is_always_slow_fails_its_request(manager, monkeypatch):
    monkeypatch.setattr(module, "MATCH_SECONDS", 0.0)
    monkeypatch.setattr(module, "MATCH_SECONDS_PER_TOKEN", 0.0)
    request = make("3")
    finish(manager, request)
    _, errors = manager.make_output([(request, 0)], {})
    assert "takes too long" in errors[request]


def test_requests_that_end_are_forgotten(manager):
    request = make("3")
    finish(manager, request)
    assert len(manager._states) == 1
    del request
    deadline = time.monotonic() + 60
    while len(manager._states) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(manager._states) == 0


def test_the_helper_is_started_with_the_first_grammar(backend):
    started = []

    def start(name):
        started.append(name)
        return ThreadHelper(backend, VOCAB)

    manager = StructuredOutputManager(start, ["toy"], VOCAB)
    assert started == []
    finish(manager, make("3"), make("4"))
    assert started == ["toy"]
    manager.shutdown()


def raising(message):
    def compile_grammar(grammar):
        raise GrammarError(message)

    return compile_grammar


def test_the_next_backend_compiles_what_one_refuses():
    first, second = ToyBackend("xgrammar"), ToyBackend("llguidance")
    first.compile = raising("keyword foo")
    manager = make_manager(first, second)
    assert finish(manager, make("3")) == {}
    assert second.compiled == ["3"]
    request = make("3 3", backend="xgrammar")
    assert "keyword foo" in finish(manager, request)[request].message
    bad = make("bad sing")
    assert finish(manager, bad)[bad].message == (
        "No grammar for this: keyword foo | llguidance cannot sing"
    )
    manager.shutdown()


def test_an_error_names_the_extra_that_may_support_the_grammar():
    """The extra helps neither with a grammar that is wrong, nor if the request names a backend."""
    backend = ToyBackend("llguidance")
    manager = make_manager(backend)

    def refusal(text, wanted="auto"):
        request = make(text, backend=wanted)
        return finish(manager, request)[request].message

    ebnf = 'root ::= "a"'
    backend.compile = raising("llguidance: foo is not supported")
    assert refusal(ebnf) == (
        "No grammar for this: llguidance: foo is not supported | The package xgrammar may support "
        "it, but is not installed: pip install 'octavo[xgrammar]'"
    )
    for text, wanted in (('start: "a"', "auto"), (ebnf, "llguidance")):
        assert refusal(text, wanted) == "No grammar for this: llguidance: foo is not supported"
    backend.compile = raising("The grammar is not valid JSON")
    assert refusal(ebnf + " ") == "No grammar for this: The grammar is not valid JSON"
    manager.shutdown()


def test_a_fault_of_a_backend_fails_its_request_only(manager):
    request = make("nonsense")
    assert finish(manager, make("3")) == {}
    assert "cannot be compiled: ValueError" in finish(manager, request)[request].message


def test_a_library_that_cannot_be_loaded_is_the_servers_fault():
    def fail(name):
        raise ImportError("no such symbol")

    request = make("3")
    manager = StructuredOutputManager(fail, ["toy"], VOCAB)
    error = finish(manager, request)[request]
    assert (type(error).__name__, error.status) == ("StepFailedError", 500)
    assert "no such symbol" in error.message
    manager.shutdown()


def test_output_that_a_request_has_is_fed(manager):
    request = make("3,4 5,6 7", output=[3, 5])
    assert finish(manager, request) == {}
    assert allowed(manager.make_output([(request, 0)], {})[0]) == [[7]]
    again = make("3,4 5,6 7", output=[4])
    assert finish(manager, again) == {}
    assert allowed(manager.make_output([(again, 0)], {})[0]) == [[5, 6]]
    wrong = make("3,4 5,6 7", output=[3, 7])
    assert "token number 1 (7)" in finish(manager, wrong)[wrong].message
    long = " ".join(["3,4"] * 100)
    late = make(long, output=[3] * 77 + [5])
    assert "token number 77 (5)" in finish(manager, late)[late].message


def test_tenants_share_no_process(manager, backend):
    finish(manager, make("3"), make("3", tenant="a"), make("3", tenant="b"))
    assert backend.compiled == ["3"] * 3


def test_a_process_that_is_late_is_killed_and_fails_its_requests_only(manager, monkeypatch):
    requests = [make("3", request_id=str(i), tenant=str(i)) for i in range(3)]
    finish(manager, *requests)
    go, fill = threading.Event(), ToyGrammar.fill_bitmask
    process = manager._states[requests[1]].process

    def slow(grammar, row):
        if grammar in process.server._grammars.values():
            process.seconds = 0.5
            go.wait(100)
        fill(grammar, row)

    monkeypatch.setattr(ToyGrammar, "fill_bitmask", slow)
    output, errors = manager.make_output([(r, 0) for r in requests], {})
    go.set()
    assert list(errors) == [requests[1]]
    assert "takes too long to match" in errors[requests[1]]
    assert output.req_ids == ["0", "2"]
    assert allowed(output) == [[3], [3]]
    with pytest.raises(GrammarError, match="used before: its grammar takes too long"):
        manager.add(make("3", tenant="1"))


def test_a_process_that_does_not_answer_is_killed(manager, monkeypatch):
    monkeypatch.setattr(module, "_ANSWER_SECONDS", 0.05)
    request, go = make("3"), threading.Event()
    finish(manager, request)
    monkeypatch.setattr(ToyGrammar, "fill_bitmask", lambda *_: go.wait(100))
    _, errors = manager.make_output([(request, 0)], {})
    go.set()
    assert "takes too long to match" in errors[request]


@pytest.mark.parametrize(
    "answer", [b"\1" + bytes(7) + b"\xc1", b"\1" + bytes(7) + b"\x90", b"\xff" * 8]
)
def test_an_answer_that_cannot_be_read_fails_its_request_only(manager, monkeypatch, answer):
    broken, other = make("3", tenant="1"), make("4", request_id="1", tenant="2")
    finish(manager, broken, other)
    manager.make_output([(broken, 0), (other, 0)], {})
    server = manager._states[broken].process.server
    monkeypatch.setattr(server, "_match", lambda message, steps: steps.sendall(answer))
    output, errors = manager.make_output([(broken, 0), (other, 0)], {})
    assert "unreadable" in errors[broken]
    assert allowed(output) == [[4]]
    with pytest.raises(GrammarError, match="used before"):
        manager.add(make("3", tenant="1"))


def test_requests_survive_a_process_that_was_killed_from_outside(manager, backend):
    requests = [make("3,4 5,6 7,8", request_id=str(i)) for i in range(2)]
    other = make("9", request_id="2")
    finish(manager, *requests, other)
    manager.make_output([(r, 0) for r in requests], {})
    for request in requests:
        request.append_output_token_ids([4])
        request.status = RequestStatus.RUNNING
    before = backend.compiled.count("3,4 5,6 7,8")
    ThreadProcess.kill(manager._states[requests[0]].process, None)
    output, errors = manager.make_output([(r, 0) for r in [*requests, other]], {"0": [5]})
    assert errors == {}
    assert output.req_ids == ["0", "1", "2"]
    assert allowed(output) == [[5, 6], [7, 8], [5, 6], [9]]
    # Once for both requests, and perhaps once more in the process of the other grammar.
    assert backend.compiled.count("3,4 5,6 7,8") - before in (1, 2)
    assert manager.take_finished() == []


def test_faults_and_limits_of_a_grammar_fail_its_request(manager):
    requests = [make("3", request_id=str(i)) for i in range(3)]
    finish(manager, *requests)
    assert allowed(manager.make_output([(r, 0) for r in requests], {})[0]) == [[3]] * 3
    faults = {0: GrammarError("its limits"), 1: ZeroDivisionError("oops")}
    for i, fault in faults.items():
        state = manager._states[requests[i]]
        grammar = state.process.server._grammars[state.key]
        grammar.fill_bitmask = lambda row, fault=fault: (_ for _ in ()).throw(fault)
    output, errors = manager.make_output([(r, 0) for r in requests], {})
    assert errors[requests[0]] == "its limits"
    assert "ZeroDivisionError: oops" in errors[requests[1]]
    assert output.req_ids == ["2"]


def test_the_process_forgets_requests_that_have_ended(manager):
    first, second = make("3"), make("3")
    finish(manager, first, second)
    manager.make_output([(first, 0), (second, 0)], {})
    server = manager._states[second].process.server
    assert len(server._grammars) == 2
    del first
    deadline = time.monotonic() + 60
    while len(server._grammars) > 1 and time.monotonic() < deadline:
        manager.make_output([(second, 0)], {})
    assert len(server._grammars) == 1


def test_a_grammar_that_takes_too_long_with_given_output_is_refused(manager, monkeypatch):
    finish(manager, make("3 3"))
    [placed] = manager._ready.values()
    process = placed.process
    go, accept = threading.Event(), ToyGrammar.accept_tokens

    def slow(grammar, tokens):
        process.seconds += 5.0
        go.wait(100)
        return accept(grammar, tokens)

    monkeypatch.setattr(ToyGrammar, "accept_tokens", slow)
    monkeypatch.setattr(compiler, "_IDLE_WATCH_SECONDS", 0.02)
    request = make("3 3", output=[3])
    assert "takes too long to match" in finish(manager, request)[request].message
    go.set()


def test_grammars_of_a_shared_process_that_breaks_go_on_alone(manager, backend, monkeypatch):
    requests = [make(f"3 {i} 5", request_id=str(i)) for i in range(6, 9)]
    for request in requests:
        finish(manager, request)
    processes = {manager._states[r].process for r in requests}
    assert len(processes) == 1
    go, fill = threading.Event(), ToyGrammar.fill_bitmask

    def slow(grammar, row):
        if grammar.rule(1) == [7]:
            for process in {state.process for state in manager._states.values()}:
                if grammar in process.server._grammars.values():
                    process.seconds += 0.5
                    go.wait(100)
        fill(grammar, row)

    monkeypatch.setattr(ToyGrammar, "fill_bitmask", slow)
    output, errors = manager.make_output([(r, 0) for r in requests], {})
    assert list(errors) == [requests[1]]
    assert "takes too long to match" in errors[requests[1]]
    assert output.req_ids == ["6", "8"]
    assert allowed(output) == [[3], [3]]
    assert len({manager._states[r].process for r in requests} - processes) == 3
    go.set()


# The garbage collector also finds objects of other tests, such as sockets that are still open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_nothing_is_left_of_a_process_that_has_ended(manager, monkeypatch):
    monkeypatch.setattr(compiler, "MAX_IDLE", 0)
    monkeypatch.setattr(compiler, "_IDLE_WATCH_SECONDS", 0.02)
    request = make("3")
    finish(manager, request)
    process = weakref.ref(manager._states[request].process)
    del request
    deadline = time.monotonic() + 60
    while manager._ready and time.monotonic() < deadline:
        manager.wait(0.01)
        manager.take_finished()
    assert not manager._ready
    for helper in manager._compiler._helpers.values():
        helper.process.processes.clear()  # a list of the stand-in only
    while process() is not None and time.monotonic() < deadline:  # its thread is ending
        manager.wait(0.01)
        gc.collect()
    assert process() is None  # and so its sockets are closed


def test_a_fault_of_the_compiler_fails_what_waits_and_no_more(manager, monkeypatch):
    good = make("3")
    finish(manager, good)
    watch = compiler.GrammarCompiler._start

    def fail(self):
        monkeypatch.setattr(compiler.GrammarCompiler, "_start", watch)
        raise KeyError("oops")

    monkeypatch.setattr(compiler.GrammarCompiler, "_start", fail)
    request = make("4")
    error = finish(manager, request)[request]
    assert (type(error).__name__, error.status) == ("StepFailedError", 500)
    again = make("5")
    assert finish(manager, again) == {}
    output, errors = manager.make_output([(good, 0), (again, 0)], {})
    assert errors == {}
    assert allowed(output) == [[3], [5]]
