"""Run tests of vLLM's in this process: `python -m benchmarks.conformance.inside`.

    PACKAGES RESULTS TEST ...

PACKAGES is the folder of the packages that the tests import; a line of JSON for each test is
written to RESULTS.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest

from benchmarks.conformance import shim

_MESSAGE_CHARS = 500
_STARTS_SERVER = re.compile(r"Remote\w+Server\w*\(|Popen\(|getfixturevalue\(|subprocess\.run\(")


class Recorder:
    """Plug-in that records the result of each test, and Octavo's rejections in it."""

    def __init__(self, results: TextIO) -> None:
        self._results = results
        self._file: str | None = None

    @pytest.fixture(scope="session")
    def local_asset_server(self) -> shim.LocalAssetServer:
        return shim.LocalAssetServer()

    @pytest.fixture(scope="session")
    def hf_runner(self) -> type[shim.HFRunner]:
        return shim.HFRunner

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Skip tests without a server: they are about vLLM's Python code."""
        for item in items:
            if not any(_STARTS_SERVER.search(source) for source in _sources(item)):
                item.add_marker(pytest.mark.skip(f"{shim.OWN_CODE}no server is used"))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Record all tests as unfinished; later results overwrite that."""
        for item in session.items:
            self._write_line(item.nodeid, "failed", "not finished in time", [])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        file = nodeid.partition("::")[0]
        if file != self._file:
            self._file = file
            shim.file_refusals.clear()
        shim.test_refusals.clear()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self._write(report.nodeid, report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._write(report.nodeid, report)

    def _write(self, test: str, report: Any) -> None:
        message = ""
        if report.skipped:
            message = report.longrepr[2] if isinstance(report.longrepr, tuple) else "xfail"
        elif report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = str(report.longrepr) if crash is None else crash.message
        self._write_line(
            test,
            report.outcome,
            message.removeprefix("Skipped: ")[:_MESSAGE_CHARS],
            [*shim.test_refusals, *shim.file_refusals],
        )

    def _write_line(self, test: str, outcome: str, message: str, refusals: list[str]) -> None:
        line = {
            "test": test.removeprefix("tests/entrypoints/"),
            "outcome": outcome,
            "message": message,
            "refusals": refusals,
        }
        self._results.write(json.dumps(line) + "\n")
        self._results.flush()


def _sources(item: Any) -> Iterator[str]:
    """Yield the source of a test and of all its fixtures."""
    yield inspect.getsource(item.function)
    for definitions in item._fixtureinfo.name2fixturedefs.values():
        for definition in definitions:
            yield inspect.getsource(definition.func)


def main(packages: str, results: str, tests: list[str]) -> int:
    sys.path.append(packages)  # after the environment's packages
    shim.install()
    shim.watch_clients()
    for test in tests:
        shim.offer_all(Path(test).read_text())
    options = ["-p", "no:cacheprovider", "-p", "no:xdist"]
    options += ["-c", "/dev/null", "--rootdir", str(Path.cwd()), "--timeout", "60", "-q"]
    options += ["--tb", "short", "--continue-on-collection-errors"]
    with Path(results).open("w") as file:
        return int(pytest.main([*options, *tests], plugins=[Recorder(file)]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
