"""Conformance of grammar backends: cases are read, and each kind of fault is found."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grammar_conformance
import numpy as np
import pytest
from grammar_conformance import Auto, Case, Judge, Result, read_functions, read_schemas, read_suite

from octavo.errors import GrammarError
from octavo.structured_output.base import CompiledGrammar, Grammar, GrammarBackend

STOP = 256


@dataclass(frozen=True)
class Bytes:
    """Vocabulary of a token for each byte, and one that ends."""

    token_bytes: list[bytes] = field(default_factory=lambda: [*map(_byte, range(256)), b""])
    stop_token_ids: list[int] = field(default_factory=lambda: [STOP])
    size: int = 257

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def _byte(value: int) -> bytes:
    return bytes([value])


class OneOf(Grammar):
    """Grammar that allows some texts; `lies`: its mask has a further bit."""

    def __init__(self, texts: list[str], lies: bool = False) -> None:
        self._texts = [[*text.encode(), STOP] for text in texts]
        self._ids: list[int] = []
        self._lies = lies

    def _next(self) -> set[int]:
        at = len(self._ids)
        return {t[at] for t in self._texts if t[:at] == self._ids and len(t) > at}

    def accept_tokens(self, token_ids: Any) -> int:
        for count, token in enumerate(token_ids):
            if token not in self._next():
                return count
            self._ids.append(token)
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        raise NotImplementedError

    def fill_bitmask(self, row: Any) -> None:
        bits = np.zeros(len(row) * 32, np.bool_)
        bits[sorted(self._next())] = True
        bits[ord("x")] |= self._lies
        row[:] = np.packbits(bits, bitorder="little").view(np.int32)

    @property
    def is_terminated(self) -> bool:
        return self._ids[-1:] == [STOP]

    def forced_tokens(self, most: int) -> list[int]:
        raise NotImplementedError


@dataclass
class Fake(GrammarBackend, CompiledGrammar):
    """Backend with one grammar."""

    texts: list[str]
    lies: bool = False
    error: Exception | None = None
    name = "fake"
    nbytes = 0

    def compile(self, spec: Any) -> CompiledGrammar:
        json.loads(spec.text)
        if self.error is not None:
            raise self.error
        return self

    def start(self) -> Grammar:
        return OneOf(self.texts, self.lies)


def judge(backend: Fake, case: Case, walks: int = 0) -> Result:
    return Judge(backend, Bytes(), walks, 1).run([case])  # type: ignore[arg-type]


INTEGER = Case("type", "integers", {"type": "integer"}, [(1, True), ("a", False)], "draft2020-12")
PAIR = Case("items", "pair", {"type": "array"}, [([1, 2], True)], "draft2020-12")


def test_what_is_right() -> None:
    result = judge(Fake(["1", "7"]), INTEGER, walks=5)
    assert (result.schemas, result.right, result.walks, result.unfinished) == (1, 2, 5, 0)
    assert not result.wrongly_accepted + result.wrongly_refused + result.bad_walks
    assert not result.bad_masks
    assert len(result.compile_times) == 1
    assert result.mask_times


def test_each_kind_of_fault() -> None:
    assert judge(Fake(["1", '"a"']), INTEGER).wrongly_accepted == [("type", 'integers: "a"')]
    assert judge(Fake(["2"]), INTEGER).wrongly_refused == [("type", "integers: 1")]
    assert judge(Fake(['"b"']), INTEGER, 1).bad_walks == [("type", 'integers: "b"')]
    ((keyword, _),) = judge(Fake(["x"]), INTEGER, 1).bad_walks
    assert keyword.startswith("no JSON")
    assert judge(Fake(["1"], lies=True), INTEGER).bad_masks == []  # no text has an x
    assert judge(Fake(["1"], lies=True), INTEGER, 9).bad_masks
    assert judge(Fake([]), INTEGER, 1).bad_masks == ["integers: nothing is allowed after "]
    result = judge(Fake([], error=GrammarError("No.")), INTEGER)
    assert (result.refused, result.reasons) == ({"type": 1}, {"type": "No."})
    assert len(judge(Fake([], error=KeyError("x")), INTEGER).crashed) == 1


def test_a_value_has_two_forms() -> None:
    assert judge(Fake(["[1,2]"]), PAIR).spaced_refused == 1
    result = judge(Fake(["[1, 2]"]), PAIR)
    assert (result.right, result.spaced_refused) == (1, 0)


def test_the_first_that_can() -> None:
    refusing = Fake([], error=GrammarError("No."))
    assert judge(Auto([refusing, Fake(["1"])]), INTEGER).right == 2  # type: ignore[arg-type]
    reasons = judge(Auto([refusing, refusing]), INTEGER).reasons  # type: ignore[arg-type]
    assert reasons == {"type": "No."}


def test_endless_walks_are_given_up() -> None:
    result = judge(Fake(["1" * 1000]), INTEGER, 2)
    assert (result.walks, result.unfinished, result.bad_walks) == (2, 2, [])


def test_the_suite_is_read_with_and_without_types(tmp_path: Path) -> None:
    tests = [{"description": "d", "data": 5, "valid": False}]
    tests += [{"description": "d", "data": d, "valid": True} for d in ("abc", None, True)]
    for name in ("draft7/minLength.json", "draft7/optional/format/date.json", "other/x.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        found = [{"description": "about", "schema": {"minLength": 2}, "tests": tests}]
        (tmp_path / name).write_text(json.dumps(found))
    cases = list(read_suite(tmp_path))
    plain = [case for case in cases if "(" not in case.name]
    assert [case.group for case in plain] == ["minLength", "format date"]
    assert [case.formats for case in plain] == [False, True]
    typed = {case.schema["type"]: case for case in cases[1:5]}
    assert set(typed) == {"number", "string", "null", "boolean"}
    assert [valid for _, valid in typed["string"].instances] == [False, True, False, False]


def test_functions_are_read_with_their_calls(tmp_path: Path) -> None:
    parameters = {
        "type": "dict",
        "properties": {"a": {"type": "float"}, "b": {"type": "any"}, "c": {"type": "tuple"}},
        "required": ["a"],
    }
    row = {"id": "s_0", "function": [{"name": "f", "parameters": parameters}]}
    (tmp_path / "BFCL_v4_simple.json").write_text(json.dumps(row) + "\n")
    truth = {"id": "s_0", "ground_truth": [{"f": {"a": [1.5, 2], "b": [""], "c": [[1]]}}]}
    (tmp_path / "answers_simple.json").write_text(json.dumps(truth) + "\n")
    (case,) = read_functions(tmp_path)
    kinds = {name: value.get("type") for name, value in case.schema["properties"].items()}
    assert (case.schema["type"], kinds) == ("object", {"a": "number", "b": None, "c": "array"})
    assert case.instances == [({"a": 1.5, "c": [1]}, True)]


def test_schemas_are_read_in_all_their_forms(tmp_path: Path) -> None:
    plain = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "integer"}
    (tmp_path / "a.json").write_text(json.dumps(plain))
    tested = {"schema": {"type": "null"}, "tests": [{"data": 5, "valid": False}]}
    (tmp_path / "b.json").write_text(json.dumps(tested))
    (tmp_path / "c.jsonl").write_text(json.dumps({"json_schema": '{"type": "string"}'}) + "\n")
    cases = list(read_schemas(tmp_path))
    assert [case.schema for case in cases] == [plain, {"type": "null"}, {"type": "string"}]
    assert [case.draft for case in cases] == ["draft7", "draft2020-12", "draft2020-12"]
    assert cases[1].instances == [(5, False)]


def test_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.json").write_text(
        '{"schema": {"type": "null"}, "tests": [{"data": 5,"valid": false}]}'
    )
    backends = {"xgrammar": Fake(["5"]), "llguidance": Fake([], error=GrammarError("A | b."))}
    monkeypatch.setattr(
        grammar_conformance, "make_backends", lambda names, model: (Bytes(), backends)
    )
    grammar_conformance.main(["--schemas", str(tmp_path), "--walks", "1"])
    text = capsys.readouterr().out
    folder = tmp_path.name
    assert f"| {folder} | xgrammar | 1 | 0 | 0 | 1 | 0 | 0 | 1 | 1 | 0 | 0 |" in text
    assert f"### {folder}: what xgrammar wrongly accepts" in text
    assert "A \\| b." in text
    for line in text.splitlines():
        assert not line.startswith("|") or line.endswith("|")
