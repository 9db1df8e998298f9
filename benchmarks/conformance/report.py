"""Results of the tests: classified by `expected.toml`, and as a table."""

from __future__ import annotations

import collections
import json
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from benchmarks.conformance.shim import OWN_CODE

Kind = Literal["pass", "missing feature", "deviation", "UNEXPECTED", "skipped", "own code"]
_KINDS: tuple[Kind, ...] = ("pass", "missing feature", "deviation", "UNEXPECTED", "skipped")
_SAID_CHARS = 200


@dataclass(frozen=True)
class Result:
    """Result of one test."""

    test: str
    outcome: str
    """Outcome: passed, failed or skipped."""
    message: str
    """Reason, as reported by pytest."""
    refusals: Sequence[str]
    """Rejections by Octavo during the test."""


@dataclass(frozen=True)
class Expected:
    """Reason for expected failures, with patterns of test names."""

    kind: Literal["missing feature", "deviation"]
    reason: str
    """Missing feature, or the deviation and its reason."""
    tests: Sequence[str]

    def covers(self, test: str) -> bool:
        """Return True if the reason applies to this test."""
        return any(_matches(test, pattern) for pattern in self.tests)


@dataclass(frozen=True)
class Line:
    """Line of the table."""

    test: str
    kind: Kind
    why: str


def read_expected(path: Path) -> list[Expected]:
    """Read the reasons in a file: `[[deviation]]` and `[[missing]]` entries."""
    data = tomllib.loads(path.read_text())
    deviations = [
        Expected("deviation", entry["reason"], entry["tests"]) for entry in data["deviation"]
    ]
    return deviations + [
        Expected("missing feature", entry["feature"], entry["tests"]) for entry in data["missing"]
    ]


def read_results(path: Path) -> list[Result]:
    """Read the output of `inside.py`; the last line about a test counts."""
    lines = [Result(**json.loads(line)) for line in path.read_text().splitlines()]
    return list({line.test: line for line in lines}.values())


def classify(results: Iterable[Result], expected: Sequence[Expected]) -> list[Line]:
    """Classify each test.

    A feature counts as missing only if Octavo reported that, in the test or at a start.
    """
    lines = []
    for result in results:
        if result.outcome == "passed":
            lines.append(Line(result.test, "pass", ""))
        elif result.outcome == "skipped":
            own = result.message.startswith(OWN_CODE)
            lines.append(
                Line(
                    result.test,
                    "own code" if own else "skipped",
                    result.message.removeprefix(OWN_CODE),
                )
            )
        else:
            lines.append(_failed(result, expected))
    return lines


def _failed(result: Result, expected: Sequence[Expected]) -> Line:
    reason = next((entry for entry in expected if entry.covers(result.test)), None)
    if reason is None:
        return Line(result.test, "UNEXPECTED", _short(result.message))
    if reason.kind == "deviation":
        return Line(result.test, "deviation", reason.reason)
    if not result.refusals:
        return Line(
            result.test, "UNEXPECTED", f"{reason.reason}, but accepted: {_short(result.message)}"
        )
    return Line(result.test, "missing feature", f"{reason.reason}: {_short(result.refusals[0])}")


def unused(results: Sequence[Result], expected: Sequence[Expected]) -> list[str]:
    """Return patterns without a failing test: they can be removed."""
    failed = [result.test for result in results if result.outcome == "failed"]
    return [
        pattern
        for entry in expected
        for pattern in entry.tests
        if not any(_matches(test, pattern) for test in failed)
    ]


def _matches(test: str, pattern: str) -> bool:
    """Match like `fnmatchcase`, but without brackets as wildcards: names of tests contain them."""
    return fnmatchcase(test.replace("[", "("), pattern.replace("[", "("))


def table(lines: Sequence[Line], version: str) -> str:
    """Format the report in Markdown: counts, and a line for each test that uses a server."""
    counts = collections.Counter(line.kind for line in lines)
    text = [f"# vLLM {version}'s tests of its server, against Octavo", ""]
    text += ["| result | tests |", "| --- | ---: |"]
    text += [f"| {kind} | {counts[kind]} |" for kind in _KINDS]
    text += [
        "",
        f"Another {counts['own code']} tests in these files use no server, or use a part of vLLM's "
        "own code, and do not test Octavo.",
        "",
        "| test | result | why |",
        "| --- | --- | --- |",
    ]
    text += [
        f"| {_cell(line.test)} | {line.kind} | {_cell(line.why)} |"
        for line in sorted(lines, key=lambda line: line.test)
        if line.kind != "own code"
    ]
    return "\n".join(text) + "\n"


def _short(text: str) -> str:
    return " ".join(text.split())[:_SAID_CHARS]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
