"""Processors of other packages: they are found, and their faults affect only their requests."""

import sys

import numpy as np
import pytest

from octavo.errors import ConfigError, RequestError
from octavo.sampling.plugins import load_named, load_plugins
from octavo.sampling.state import SamplingState
from tests.params import Params
from tests.plugins import NO_REPEAT, install
from tests.sampling.harness import random_logits, run

VOCAB = 60
GREEDY = {"temperature": 0.0}


@pytest.fixture
def make_state(tmp_path, monkeypatch):
    def make(source=NO_REPEAT, kind="NoRepeat", name="no_repeat"):
        install(tmp_path, monkeypatch, source, kind, name)
        return SamplingState(6, VOCAB, load_plugins(6, VOCAB))

    return make


def params(**fields):
    return Params(**fields).core(VOCAB)


def asks(**extra_args):
    return params(**GREEDY, extra_args=extra_args)


def test_without_packages_there_are_none():
    assert load_plugins(2, VOCAB) == []


def test_only_who_asks_for_it_gets_it(make_state, sampler):
    state = make_state()
    state.add_row(0, params(**GREEDY), [1, 5], 1)
    state.add_row(2, asks(no_repeat=2), [1, 5, 6, 7], 1)
    assert state.needs_tokens(np.array([2]))
    assert state.metadata(np.array([0])).plain
    logits = np.zeros((2, VOCAB))
    logits[:, 5:8] = 1.0, 2.0, 3.0
    rows = np.array([0, 2])
    assert run(sampler, logits, state.metadata(rows)).token_ids.tolist() == [7, 5]
    state.append(rows, np.array([7, 5, 7]), np.array([1, 2]))
    assert run(sampler, logits, state.metadata(rows)).token_ids.tolist() == [7, 6]
    state.remove_row(2)
    state.add_row(2, params(**GREEDY), [1], 1)
    assert run(sampler, logits, state.metadata(rows)).token_ids.tolist() == [7, 7]


def test_a_resumed_request_and_one_of_many_are_no_others(make_state, sampler, monkeypatch):
    """Rows are shown in portions; a row's tokens do not depend on the step's other rows."""
    state = make_state()
    monkeypatch.setattr("octavo.sampling.sizes.CHUNK_ELEMENTS", 2 * VOCAB)
    rng = np.random.default_rng(0)
    kinds = [asks(no_repeat=1 + i) if i % 3 else params(**GREEDY) for i in range(6)]
    outputs = [rng.integers(0, VOCAB, 4).tolist() for _ in kinds]
    logits = rng.normal(size=(6, VOCAB)).astype(np.float32)
    for row, kind in enumerate(kinds):
        for token in outputs[row]:
            logits[row, token] += 10
        state.add_row(row, kind, [3, *outputs[row][:2]], 1)
    state.append(np.arange(6), np.array([o[2:] for o in outputs]).flatten(), np.full(6, 2))
    together = run(sampler, logits, state.metadata(np.arange(6))).token_ids.tolist()
    for row, kind in enumerate(kinds):
        resumed = SamplingState(1, VOCAB, load_plugins(1, VOCAB))
        resumed.add_row(0, kind, [3, *outputs[row]], 1)
        alone = resumed.metadata(np.array([0]))
        assert run(sampler, logits[row : row + 1], alone).token_ids[0] == together[row]
        expected = logits[row].copy()
        if row % 3:
            expected[outputs[row][-1 - row :]] = -np.inf
        assert together[row] == expected.argmax()


def test_a_key_that_nobody_takes(make_state):
    with pytest.raises(
        RequestError, match=r"'no_rpeat'.*accepted: no_repeat_ngram_size, whis"
    ) as error:
        SamplingState(1, VOCAB).add_row(0, asks(no_rpeat=1), [1], 1)
    assert error.value.param == "extra_args"
    state = make_state()
    with pytest.raises(
        RequestError, match=r"'no_rpeat'.*accepted: no_repeat, no_repeat_ngram_size, whisper_rules"
    ):
        state.add_row(0, asks(no_repeat=1, no_rpeat=1), [1], 1)
    assert state.metadata(np.array([0])).plain


def test_arguments_that_it_does_not_like_fail_their_request(make_state):
    state = make_state()
    with pytest.raises(RequestError, match="no_repeat_point failed: no_repeat='x' is no positive"):
        state.add_row(0, asks(no_repeat="x"), [1], 1)
    assert state.metadata(np.array([0])).plain
    assert not state.needs_tokens(np.array([0]))


FAULTY = """
from octavo.sampling.logits_processors.base import LogitsProcessor


class Faulty(LogitsProcessor):
    extra_args = frozenset({"fail_in"})
    needs_tokens = True
    where = None

    def add_row(self, new):
        self.where = new.params.extra_args["fail_in"]
        return True

    def fail(self, where):
        if self.where == where:
            raise RuntimeError(f"broken in {where}")

    def remove_row(self, row):
        self.fail("remove_row")

    def append(self, rows, tokens):
        self.fail("append")

    def select(self, step):
        self.fail("select")
        return step

    def apply(self, ops, logits, step):
        logits[:] = 0
        self.fail("apply")
        logits[:, 7] = 1
"""


@pytest.mark.parametrize("where", ["append", "select", "apply", "remove_row"])
def test_what_it_does_wrong_fails_its_requests_only(make_state, sampler, where):
    state = make_state(FAULTY, "Faulty", "faulty")
    rows = np.array([0, 1])
    for row, kind in enumerate((params(**GREEDY, logprobs=1), asks(fail_in=where))):
        state.add_row(row, kind, [1], 1)
    state.append(rows, rows, np.ones(2, np.int64))
    logits = random_logits(2, VOCAB, seed=1)
    out = run(sampler, logits, state.metadata(rows))
    assert out.token_ids[0] == logits[0].argmax()
    assert 0 in out.logprobs
    if where == "remove_row":
        assert (out.token_ids[1], out.errors) == (7, {})
    else:
        assert out.token_ids[1] == -1
        message = f"logits processor faulty_point failed: broken in {where}"
        assert out.errors == {1: message}
    state.remove_row(1)
    state.add_row(1, asks(fail_in=None), [1], 1)
    out = run(sampler, logits, state.metadata(rows))
    assert (out.token_ids[1], out.errors) == (7, {})


NO_KEYS = FAULTY.replace('{"fail_in"}', "()")
TEXT = FAULTY.replace('frozenset({"fail_in"})', '"fail_in"')
UNUSABLE = {
    "raises": ("raise RuntimeError('no licence')", "X", "no licence"),
    "misses": ("", "Missing", "Missing"),
    "other": ("class X: pass", "X", "not a subclass of LogitsProcessor"),
    "nokeys": (NO_KEYS, "Faulty", "not a frozenset of keys"),
    "text": (TEXT, "Faulty", "not a frozenset of keys"),
    "abstract": (FAULTY.replace("def apply", "def applies"), "Faulty", "abstract method"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_what_cannot_be_loaded_is_named(tmp_path, monkeypatch, name):
    source, kind, reason = UNUSABLE[name]
    install(tmp_path, monkeypatch, source, kind, f"bad_{name}")
    with pytest.raises(ConfigError, match=reason) as error:
        load_plugins(2, VOCAB)
    assert f"entry point bad_{name}_point = bad_{name}:{kind}" in str(error.value)
    assert f"package bad_{name} " in str(error.value)


def test_without_torch_the_extra_is_named(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, NO_REPEAT, "NoRepeat", "no_torch")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"no_torch_point.*pip install 'octavo\[torch\]'"):
        load_plugins(2, VOCAB)
    with pytest.raises(ConfigError, match=r"'no_torch:NoRepeat'.*pip install 'octavo\[torch\]'"):
        load_named(["no_torch:NoRepeat"], 2, VOCAB, lambda kind: kind())


def test_two_cannot_take_one_key(tmp_path, monkeypatch):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        install(tmp_path / name, monkeypatch, NO_REPEAT, "NoRepeat", name)
    with pytest.raises(ConfigError, match=r"first_point already accepts the key 'no_repeat'"):
        load_plugins(2, VOCAB)


BROKEN = """
import numpy as np
from octavo.sampling.logits_processors.base import LogitsProcessor, StepRows
class Broken(LogitsProcessor):
    extra_args = frozenset({"fault"})
    needs_tokens = True
    def add_row(self, new):
        self.fault = new.params.extra_args.pop("fault")
        return True
    def append(self, rows, tokens):
        assert self.fault != "append"
    def select(self, step):
        match self.fault:
            case "append":  # would not be applied
                return step.take(slice(0))
            case "none":
                return None
            case "beyond":
                return StepRows(step.at + 9, step.rows, step.num_output_tokens)
            case "others":
                return StepRows(step.at - 1, step.rows, step.num_output_tokens)
        return step
    def apply(self, ops, logits, step):
        if self.fault == "exit":
            raise SystemExit("enough")
        logits[:, 7] = 100
"""


@pytest.mark.parametrize("fault", ["append", "none", "beyond", "others", "exit"])
def test_a_fault_fails_who_asked_for_it_and_nobody_else(make_state, sampler, fault):
    state = make_state(BROKEN, "Broken", "broken")
    state.add_row(0, params(**GREEDY), [1], 1)
    state.add_row(1, asks(fault=fault), [1], 1)
    state.append(np.array([0, 1]), np.array([3, 4]), np.ones(2, np.int64))
    logits = np.zeros((2, VOCAB))
    logits[:, 5] = 1.0
    output = run(sampler, logits, state.metadata(np.array([0, 1])))
    assert list(output.errors) == [1]
    assert "logits processor broken" in output.errors[1]
    assert output.token_ids[0] == 5


def test_what_one_does_with_its_arguments_the_next_answer_does_not_see(make_state, sampler):
    state, shared = make_state(BROKEN, "Broken", "broken"), asks(fault="no")
    for row in (0, 1):
        state.add_row(row, shared, [1], 1)
    output = run(sampler, np.zeros((2, VOCAB)), state.metadata(np.array([0, 1])))
    assert output.token_ids.tolist() == [7, 7]
