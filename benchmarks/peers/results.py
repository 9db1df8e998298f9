"""Results file, which is rewritten atomically after every measurement."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peers.installing import CompareError, write_json

FORMAT = 2


class Results:
    """Measurements with their settings.

    A sample is `{engine, case, turn, iteration, metrics, time}`; a failure `{engine, case, turn,
    reason}`; a limit `{group, turn, ...}` with the results of `machine.measure`; an absence
    `{engine, case, reason}` explains why an engine has no figure for a case.

    Args:
        path: the file.
        settings: settings that must be equal for results to belong together.
        resume: continue the file if it exists.

    Raises:
        CompareError: the file exists without `resume`, or is of another comparison.
    """

    def __init__(self, path: Path, settings: dict[str, Any], *, resume: bool) -> None:
        self.path = path
        if path.exists():
            if not resume:
                raise CompareError(f"{path} exists; continue with --resume, or use another --out.")
            self.data = load(path)
            self._merge(settings)
        else:
            if not path.parent.is_dir():
                raise CompareError(f"There is no folder {path.parent} for the results.")
            self.data = {
                "format": FORMAT,
                "settings": settings,
                "machine": {},
                "versions": {},
                "samples": [],
                "limits": [],
                "failures": [],
                "absences": [],
            }

    def _merge(self, settings: dict[str, Any]) -> None:
        """Merge settings; tables may have new entries, but no changed ones."""
        for name, value in settings.items():
            old = self.data["settings"][name]
            if isinstance(value, dict):
                differ = [key for key in value if old.get(key, value[key]) != value[key]]
                name = f"{name}[{differ[0]!r}]" if differ else name
                old.update({} if differ else value)
                same = not differ
            else:
                same = old == value
            if not same:
                raise CompareError(
                    f"{self.path} was measured with another {name}; use the same or another --out."
                )

    def describe(self, machine: dict[str, Any], versions: dict[str, Any]) -> None:
        """Record the machine and the versions of the engines.

        Raises:
            CompareError: earlier results are from another machine or another version.
        """
        old_machine, old_versions = self.data["machine"], self.data["versions"]
        if old_machine and old_machine != machine:
            raise CompareError(f"{self.path} was measured on another machine: {old_machine}.")
        for engine, version in versions.items():
            if old_versions.get(engine, version) != version:
                raise CompareError(
                    f"{self.path} holds figures of {engine} {old_versions[engine]}, and here is "
                    f"{version}; use another --out."
                )
        self.data["machine"] = machine
        self.data["versions"] = {**old_versions, **versions}

    def add_sample(
        self, engine: str, case: str, turn: int, iteration: int, metrics: dict[str, float]
    ) -> None:
        """Add a measurement; remove a failure of the same case and turn."""
        self._forget_failure(engine, case, turn)
        self.data["samples"].append(
            {
                "engine": engine,
                "case": case,
                "turn": turn,
                "iteration": iteration,
                "metrics": metrics,
                "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
            }
        )
        self.save()

    def add_failure(self, engine: str, case: str, turn: int, reason: str) -> None:
        """Record why a measurement failed, replacing an earlier reason."""
        self._forget_failure(engine, case, turn)
        failure = {"engine": engine, "case": case, "turn": turn, "reason": reason}
        self.data["failures"].append(failure)
        self.save()

    def _forget_failure(self, engine: str, case: str, turn: int) -> None:
        self.data["failures"] = [
            f
            for f in self.data["failures"]
            if (f["engine"], f["case"], f["turn"]) != (engine, case, turn)
        ]

    def add_absence(self, engine: str, case: str, reason: str) -> None:
        """Record why an engine has no figure for a case."""
        absence = {"engine": engine, "case": case, "reason": reason}
        if absence not in self.data["absences"]:
            self.data["absences"].append(absence)
            self.save()

    def add_limit(self, group: str, turn: int, figures: dict[str, Any]) -> None:
        """Record the machine's limits before a group's turn."""
        self.data["limits"].append({"group": group, "turn": turn, **figures})
        self.save()

    def samples(self, engine: str, case: str, turn: int) -> Iterator[dict[str, Any]]:
        """Yield the measurements of a case in a turn."""
        for sample in self.data["samples"]:
            if (sample["engine"], sample["case"], sample["turn"]) == (engine, case, turn):
                yield sample

    def save(self) -> None:
        """Write the file."""
        write_json(self.path, self.data)


def load(path: Path) -> dict[str, Any]:
    """Read a results file.

    Raises:
        CompareError: the file does not exist, or is invalid.
    """
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise CompareError(f"There is no results file {path}.") from None
    except ValueError as error:
        raise CompareError(f"{path} is no JSON file: {error}.") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise CompareError(f"{path} is no results file of this comparison (format {FORMAT}).")
    return data
