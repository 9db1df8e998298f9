"""Evaluate grammar backends on JSON schemas: rejections, errors, and speed.

    python benchmarks/grammar_conformance.py --suite FOLDER --functions FOLDER --schemas FOLDER

`--suite` is a copy of the JSON-Schema-Test-Suite's `tests` (a folder for each draft), `--functions`
one with the Berkeley function-calling data (`BFCL_*.json`, `answers_*.json`), `--schemas` one with
schemas: plain ones, those of JSONSchemaBench (`json_schema`), or with tests (`schema`, `tests`).

Each schema is compiled: functions with the defaults, others literally, that is with additional
properties. Instances, as compact and as spaced JSON, are fed to the grammar token by token. An
accepted invalid instance is wrongly accepted; a valid instance that is accepted in neither form is
wrongly refused. Then random tokens of the mask are appended until the grammar ends: a text that
`jsonschema` rejects was wrongly accepted, too. Prints a report in Markdown.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import numpy as np

from octavo.checkpoints.registry import open_checkpoint
from octavo.config import BUILTIN_MODEL
from octavo.errors import RequestError
from octavo.messages import GrammarSpec
from octavo.models.hub import resolve_model
from octavo.models.registry import read_spec
from octavo.structured_output.base import CompiledGrammar, GrammarBackend
from octavo.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.structured_output.vocabulary import Vocabulary

HAS_XGRAMMAR = importlib.util.find_spec("xgrammar") is not None
BACKENDS = ("auto", "llguidance", "xgrammar") if HAS_XGRAMMAR else ("auto", "llguidance")
VALIDATORS: dict[str, Any] = {
    "draft4": jsonschema.Draft4Validator,
    "draft6": jsonschema.Draft6Validator,
    "draft7": jsonschema.Draft7Validator,
    "draft2019-09": jsonschema.Draft201909Validator,
    "draft2020-12": jsonschema.Draft202012Validator,
}
# Walks: maximum tokens; probability of choosing a closing token if one is allowed.
WALK_TOKENS = 400
CLOSING_SHARE = 0.4
CLOSING = frozenset(b'"]},')
# Python types in the function-calling data.
FUNCTION_TYPES = {"dict": "object", "float": "number", "tuple": "array", "list": "array"}
LATEST = "draft2020-12"
EXAMPLES = 3


@dataclass(frozen=True)
class Case:
    """Schema with instances of known validity."""

    group: str
    """Subject of the test, such as a keyword."""
    name: str
    schema: Any
    instances: Sequence[tuple[Any, bool]]
    draft: str
    formats: bool = False
    """True if formats are more than annotations."""
    additional_properties: bool = True
    """True to allow properties that the schema does not name; False: the default."""

    def errors(self, value: Any) -> list[str] | None:
        """Return the keywords that an instance violates, by `jsonschema`; None if that fails."""
        validator = VALIDATORS[self.draft]
        checker = validator.FORMAT_CHECKER if self.formats else None
        try:
            found = validator(self.schema, format_checker=checker).iter_errors(value)
            return sorted({str(error.validator) for error in found})
        except Exception:  # a dangling reference, an invalid pattern, endless recursion
            return None


@dataclass
class Result:
    """Result of one backend for one set of cases."""

    schemas: int = 0
    refused: collections.Counter[str] = field(default_factory=collections.Counter)
    """Number of rejected schemas by group."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Example of a reason for each group."""
    crashed: list[str] = field(default_factory=list)
    right: int = 0
    """Number of correctly judged instances."""
    wrongly_accepted: list[tuple[str, str]] = field(default_factory=list)
    """Tuples (group or keyword, example)."""
    wrongly_refused: list[tuple[str, str]] = field(default_factory=list)
    spaced_refused: int = 0
    """Number of valid instances that were accepted as compact JSON only."""
    walks: int = 0
    unfinished: int = 0
    bad_walks: list[tuple[str, str]] = field(default_factory=list)
    bad_masks: list[str] = field(default_factory=list)
    """Cases in which the mask allows a token that is not accepted."""
    compile_times: list[float] = field(default_factory=list)
    mask_times: list[float] = field(default_factory=list)


# Reading cases


def read_suite(folder: Path) -> Iterator[Case]:
    """Read the JSON-Schema-Test-Suite; of its optional part only the formats."""
    for draft in sorted(path for path in folder.iterdir() if path.name in VALIDATORS):
        for file in [*sorted(draft.glob("*.json")), *sorted(draft.glob("optional/format/*.json"))]:
            formats = file.parent != draft
            for test in json.loads(file.read_text()):
                case = Case(
                    f"format {file.stem}" if formats else file.stem,
                    f"{draft.name}/{file.stem}: {test['description']}",
                    test["schema"],
                    [(t["data"], t["valid"]) for t in test["tests"]],
                    draft.name,
                    formats,
                )
                yield case
                yield from _typed(case)


def _typed(case: Case) -> Iterator[Case]:
    """Repeat a case for each type of its instances, if the schema itself names none.

    Backends reject many keywords without a type, and would not be tested with them otherwise.
    """
    schema = case.schema
    if not isinstance(schema, dict) or not schema.keys().isdisjoint(("type", "$ref", "enum")):
        return
    for kind in dict.fromkeys(_type_of(value) for value, _ in case.instances):
        instances = [(value, valid and _type_of(value) == kind) for value, valid in case.instances]
        name = f"{case.name} ({kind})"
        typed = {**schema, "type": kind}
        yield Case(case.group, name, typed, instances, case.draft, case.formats)


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    names = {str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def read_functions(folder: Path) -> Iterator[Case]:
    """Read the functions' parameters, with the correct calls."""
    for file in sorted(folder.glob("BFCL_*.json")):
        answers: dict[tuple[str, str], list[Any]] = collections.defaultdict(list)
        found = folder / f"answers_{file.stem.split('_', 2)[2]}.json"
        for row in _lines(found) if found.exists() else ():
            for call in row["ground_truth"]:
                for name, values in call.items():
                    answers[row["id"], name].append(_first(values))
        for row in _lines(file):
            for function in row["function"]:
                schema = _json_types(function["parameters"])
                case = Case("functions", f"{row['id']} {function['name']}", schema, [], LATEST)
                known = [(v, case.errors(v) == []) for v in answers[row["id"], function["name"]]]
                yield Case(
                    case.group, case.name, schema, known, LATEST, additional_properties=False
                )


def _first(values: Any) -> Any:
    """Return the first correct value of each parameter; "" means none."""
    return {name: found[0] for name, found in values.items() if found[0] != ""}


def _json_types(schema: Any) -> Any:
    """Replace Python's types in a schema by JSON's."""
    if isinstance(schema, list):
        return [_json_types(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _json_types(value) for name, value in schema.items()}
    kind = found.get("type")
    if isinstance(kind, str):
        found["type"] = FUNCTION_TYPES.get(kind, kind)
        if kind == "any":
            del found["type"]
    return found


def read_schemas(folder: Path) -> Iterator[Case]:
    """Read JSONSchemaBench and similar data."""
    for file in sorted([*folder.rglob("*.json"), *folder.rglob("*.jsonl")]):
        rows = _lines(file) if file.suffix == ".jsonl" else [json.loads(file.read_text())]
        for number, row in enumerate(rows):
            schema, tests = row, []
            if isinstance(row, dict) and "json_schema" in row:
                schema = row["json_schema"]
                schema = json.loads(schema) if isinstance(schema, str) else schema
            elif isinstance(row, dict) and "schema" in row and "tests" in row:
                schema, tests = row["schema"], row["tests"]
            validator = jsonschema.validators.validator_for(schema, VALIDATORS[LATEST])
            drafts = [name for name, kind in VALIDATORS.items() if kind is validator]
            yield Case(
                folder.name,
                f"{file.relative_to(folder)}:{number}",
                schema,
                [(test["data"], test["valid"]) for test in tests],
                drafts[0] if drafts else LATEST,
            )


def _lines(file: Path) -> Iterator[Any]:
    for line in file.read_text().splitlines():
        if line.strip():
            yield json.loads(line)


# Judging a backend


class Judge:
    """Evaluation of cases with one backend.

    Args:
        backend: makes grammars.
        vocabulary: the tokens of the grammars.
        walks: number of random answers for each schema.
        seed: seed of the random answers.
    """

    def __init__(
        self, backend: GrammarBackend, vocabulary: Vocabulary, walks: int, seed: int
    ) -> None:
        self._backend, self._vocabulary = backend, vocabulary
        self._walks, self._random = walks, random.Random(seed)
        self._row = np.zeros(-(-vocabulary.size // 32), np.int32)
        self._closing = np.array([bool(t) and set(t) <= CLOSING for t in vocabulary.token_bytes])
        self._stops = np.zeros(vocabulary.size, np.bool_)
        self._stops[vocabulary.stop_token_ids] = True

    def run(self, cases: Iterable[Case]) -> Result:
        """Judge all cases."""
        result = Result()
        for case in cases:
            result.schemas += 1
            compiled = self._compile(case, result)
            if compiled is None:
                continue
            for value, valid in case.instances:
                self._judge_instance(case, compiled, value, valid, result)
            for _ in range(self._walks):
                self._walk(case, compiled, result)
        return result

    def _compile(self, case: Case, result: Result) -> CompiledGrammar | None:
        text = json.dumps(case.schema, ensure_ascii=False)
        spec = GrammarSpec("json", text, additional_properties=case.additional_properties)
        begin = time.perf_counter()
        try:
            compiled = self._backend.compile(spec)
        except RequestError as error:
            result.refused[case.group] += 1
            result.reasons.setdefault(case.group, error.message)
            return None
        except Exception as error:
            result.crashed.append(f"{case.name}: {error!r}")
            return None
        result.compile_times.append(time.perf_counter() - begin)
        return compiled

    def _judge_instance(
        self, case: Case, compiled: CompiledGrammar, value: Any, valid: bool, result: Result
    ) -> None:
        compact = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        spaced = json.dumps(value, ensure_ascii=False)
        accepted = [self._accepts(case, compiled, text, result) for text in (compact, spaced)]
        if any(accepted) == valid:
            result.right += 1
            result.spaced_refused += accepted == [True, False]
        elif valid:
            result.wrongly_refused.append((case.group, f"{case.name}: {compact[:80]}"))
        else:
            result.wrongly_accepted.append((case.group, f"{case.name}: {compact[:80]}"))

    def _accepts(self, case: Case, compiled: CompiledGrammar, text: str, result: Result) -> bool:
        try:
            ids = self._vocabulary.encode(text)
        except UnicodeEncodeError:  # half of a surrogate pair, which no answer can contain
            return False
        assert b"".join(self._vocabulary.token_bytes[i] for i in ids) == text.encode()
        grammar = compiled.start()
        for token in [*ids, self._vocabulary.stop_token_ids[0]]:
            allowed = self._mask(grammar.fill_bitmask, result)[token]
            accepted = grammar.accept_tokens([token]) == 1
            if allowed and not accepted:
                result.bad_masks.append(f"{case.name}: {text[:80]} at token {token}")
            if not accepted:
                return False
        return grammar.is_terminated

    def _mask(self, fill: Callable[[np.ndarray], None], result: Result) -> np.ndarray:
        begin = time.perf_counter()
        fill(self._row)
        result.mask_times.append(time.perf_counter() - begin)
        bits = np.unpackbits(self._row.view(np.uint8), bitorder="little")
        return bits[: self._vocabulary.size].astype(np.bool_)

    def _walk(self, case: Case, compiled: CompiledGrammar, result: Result) -> None:
        grammar, ids = compiled.start(), list[int]()
        while not grammar.is_terminated and len(ids) < WALK_TOKENS:
            allowed = self._mask(grammar.fill_bitmask, result)
            closing = allowed & (self._closing | self._stops)
            if closing.any() and self._random.random() < CLOSING_SHARE:
                allowed = closing
            choices = np.flatnonzero(allowed)
            if not len(choices):
                result.bad_masks.append(f"{case.name}: nothing is allowed after {self._text(ids)}")
                return
            token = int(choices[self._random.randrange(len(choices))])
            if grammar.accept_tokens([token]) != 1:
                result.bad_masks.append(f"{case.name}: {self._text(ids)} at token {token}")
                return
            ids.append(token)
        result.walks += 1
        if not grammar.is_terminated:
            result.unfinished += 1
            return
        text = self._text(ids[:-1])
        try:
            errors = case.errors(json.loads(text))
        except json.JSONDecodeError as error:
            errors = [f"no JSON ({error.msg})"]
        for keyword in errors or ():
            result.bad_walks.append((keyword, f"{case.name}: {text[:80]}"))

    def _text(self, ids: Sequence[int]) -> str:
        return b"".join(self._vocabulary.token_bytes[i] for i in ids).decode("utf-8", "replace")


# Reporting


def table(title: str, rows: Sequence[Sequence[object]], head: Sequence[str]) -> str:
    """Format a table in Markdown."""
    lines = [f"### {title}", "", "| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    lines += ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def percentiles(times: Sequence[float], unit: float) -> list[str]:
    """Return p50, p90, p99 and the maximum, in units of `unit` seconds."""
    if not times:
        return ["-"] * 4
    found = [*np.percentile(times, (50, 90, 99)), max(times)]
    return [f"{value / unit:.3g}" for value in found]


def report(results: dict[tuple[str, str], Result]) -> str:
    """Format the whole report.

    Args:
        results: results by set of cases and backend.
    """
    counts, times, parts = [], [], []
    for (cases, backend), r in results.items():
        refused = sum(r.refused.values())
        compiled = r.schemas - refused - len(r.crashed)
        judged = [r.right, len(r.wrongly_accepted), len(r.wrongly_refused), r.spaced_refused]
        walks = [r.walks - r.unfinished, len({example for _, example in r.bad_walks})]
        odd = [len(r.bad_masks), len(r.crashed)]
        counts.append([cases, backend, compiled, refused, *judged, *walks, *odd])
        compiling, masking = percentiles(r.compile_times, 1e-3), percentiles(r.mask_times, 1e-6)
        times.append([cases, backend, *compiling, *masking])
    head = ["cases", "backend", "schemas compiled", "schemas refused", "instances right"]
    head += ["wrongly accepted", "wrongly refused", "compact only", "walks", "wrong walks"]
    head += ["wrong masks", "crashes"]
    parts.append(table("Verdicts", counts, head))
    head = ["cases", "backend", *(f"compile {p} (ms)" for p in ("p50", "p90", "p99", "max"))]
    head += [f"mask {p} (us)" for p in ("p50", "p90", "p99", "max")]
    parts.append(table("Times", times, head))
    for (cases, backend), r in results.items():
        for what, found in (
            ("wrongly accepts", r.wrongly_accepted),
            ("generates, though invalid", r.bad_walks),
            ("wrongly refuses", r.wrongly_refused),
        ):
            if found:
                title = f"{cases}: what {backend} {what}"
                parts.append(table(title, _by_group(found), ["keyword", "number", "examples"]))
        if r.refused:
            rows = [(g, n, r.reasons[g][:160]) for g, n in sorted(r.refused.items())]
            title = f"{cases}: schemas that {backend} does not compile"
            parts.append(table(title, rows, ["keyword", "number", "an example's reason"]))
        for what, texts in (("Wrong masks", r.bad_masks), ("Crashes", r.crashed)):
            if texts:
                parts.append(table(f"{cases}: {what} of {backend}", [[t] for t in texts], ["case"]))
    return "\n".join(parts)


def _by_group(found: Sequence[tuple[str, str]]) -> list[tuple[str, int, str]]:
    groups: dict[str, list[str]] = collections.defaultdict(list)
    for group, example in found:
        groups[group].append(f"`{example}`")
    return [(g, len(groups[g]), "; ".join(groups[g][:EXAMPLES])) for g in sorted(groups)]


@dataclass(frozen=True)
class Auto(GrammarBackend):
    """Backend that uses the first one that compiles a schema, like an engine."""

    backends: Sequence[GrammarBackend]
    name = "auto"

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        messages = []
        for backend in self.backends:
            try:
                return backend.compile(spec)
            except RequestError as error:
                messages.append(error.message)
        raise RequestError(" | ".join(dict.fromkeys(messages)))


def make_backends(names: Sequence[str], model: str) -> tuple[Vocabulary, dict[str, GrammarBackend]]:
    """Return a model's tokens, and backends for them."""
    from octavo.structured_output.llguidance_backend import LLGuidanceBackend
    from octavo.structured_output.vocabulary import Vocabulary

    path = resolve_model(model)
    spec = read_spec(open_checkpoint(path))
    tokenizer = Tokenizer.from_folder(path)
    vocabulary = Vocabulary.from_tokenizer(tokenizer, spec.vocab_size, spec.eos_token_ids)
    made: dict[str, GrammarBackend] = {"llguidance": LLGuidanceBackend(vocabulary)}
    if HAS_XGRAMMAR:
        from octavo.structured_output.xgrammar_backend import XGrammarBackend

        made["xgrammar"] = XGrammarBackend(vocabulary)
    made["auto"] = Auto(list(made.values()))
    return vocabulary, {name: made[name] for name in names}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--suite", type=Path, help="the JSON-Schema-Test-Suite's tests")
    parser.add_argument("--functions", type=Path, help="function-calling data")
    parser.add_argument("--schemas", type=Path, action="append", default=[], help="schemas")
    parser.add_argument("--model", default=BUILTIN_MODEL, help="whose tokenizer; the built-in one")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=[*BACKENDS])
    parser.add_argument("--walks", type=int, default=3, help="random answers for each schema")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    vocabulary, backends = make_backends(args.backends, args.model)
    sets: dict[str, list[Case]] = {}
    if args.suite is not None:
        sets["test suite"] = list(read_suite(args.suite))
    if args.functions is not None:
        sets["functions"] = list(read_functions(args.functions))
    for folder in args.schemas:
        sets[folder.name] = list(read_schemas(folder))
    results = {
        (cases, name): Judge(backend, vocabulary, args.walks, args.seed).run(sets[cases])
        for cases in sets
        for name, backend in backends.items()
    }
    sys.stdout.write(report(results))


if __name__ == "__main__":
    main()
