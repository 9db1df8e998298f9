"""vLLM's tests run against Octavo: the parts that need neither network nor server."""

from __future__ import annotations

import json
import os
import tarfile

import pytest

from benchmarks.conformance import __main__ as conformance
from benchmarks.conformance import fetch, report, shim
from benchmarks.conformance.report import Expected, Result

EXPECTED = [
    Expected("missing feature", "tools", ["chat.py::test_tool*", "chat.py::*[lora]"]),
    Expected("deviation", "its own words", ["chat.py::test_words"]),
]


def kind_of(test, outcome="failed", message="", refusals=()):
    (line,) = report.classify([Result(test, outcome, message, refusals)], EXPECTED)
    return line.kind, line.why


def test_a_missing_feature_must_have_been_refused():
    refused = kind_of("chat.py::test_tool", refusals=["400: tools are not supported yet"])
    assert refused == ("missing feature", "tools: 400: tools are not supported yet")
    assert kind_of("chat.py::test_tool", message="assert 1 == 2") == (
        "UNEXPECTED",
        "tools, but accepted: assert 1 == 2",
    )


def test_brackets_of_patterns_are_brackets():
    assert kind_of("chat.py::test_x[lora]", refusals=["no"])[0] == "missing feature"
    assert kind_of("chat.py::test_x[l]", refusals=["no"])[0] == "UNEXPECTED"


@pytest.mark.parametrize(
    ("test", "outcome", "message", "kind"),
    [
        ("chat.py::test_words", "failed", "", "deviation"),
        ("chat.py::test_words", "passed", "", "pass"),
        ("chat.py::test_new", "failed", "", "UNEXPECTED"),
        ("chat.py::test_new", "skipped", "no GPU", "skipped"),
        ("chat.py::test_new", "skipped", f"{shim.OWN_CODE}vllm.x", "own code"),
    ],
)
def test_kinds(test, outcome, message, kind):
    assert kind_of(test, outcome, message)[0] == kind


def test_patterns_that_cover_no_failure_are_named():
    results = [Result("chat.py::test_tools", "failed", "", ["no"])]
    results += [Result("chat.py::test_words", "passed", "", [])]
    assert report.unused(results, EXPECTED) == ["chat.py::*[lora]", "chat.py::test_words"]


def test_the_table():
    results = [
        Result("b.py::test_b", "passed", "", []),
        Result("a.py::test_a[x|y]", "failed", "assert a\n  | b", []),
        Result("c.py::test_c", "skipped", f"{shim.OWN_CODE}vllm.x", []),
    ]
    text = report.table(report.classify(results, EXPECTED), "0.0")
    assert "| pass | 1 |" in text
    assert "| UNEXPECTED | 1 |" in text
    assert "Another 1 tests" in text
    assert text.endswith(
        "| a.py::test_a[x\\|y] | UNEXPECTED | assert a \\| b |\n| b.py::test_b | pass |  |\n"
    )


def test_of_several_results_of_a_test_the_last_counts(tmp_path):
    lines = [("test_a", "failed"), ("test_b", "failed"), ("test_a", "passed")]
    file = tmp_path / "results.jsonl"
    file.write_text(
        "\n".join(
            json.dumps({"test": test, "outcome": outcome, "message": "", "refusals": []})
            for test, outcome in lines
        )
    )
    found = {result.test: result.outcome for result in report.read_results(file)}
    assert found == {"test_a": "passed", "test_b": "failed"}


def test_the_list_of_reasons_can_be_read():
    expected = report.read_expected(conformance.EXPECTED)
    assert {entry.kind for entry in expected} == {"missing feature", "deviation"}
    assert all(entry.reason and entry.tests for entry in expected)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv(shim.MODEL_VARIABLE, str(model))
    return tmp_path / "hub" / "hub"


def test_models_are_offered_under_the_names_that_tests_have(hub):
    shim.offer_all('MODEL = "org/name"; words = ["text/with space", "plain"]')
    assert os.listdir(hub) == ["models--org--name"]
    assert (hub / "models--org--name/snapshots" / ("0" * 40) / "config.json").read_text() == "{}"


def test_of_a_flag_that_is_given_twice_the_last_counts(hub):
    command = shim.octavo_command(
        ["serve", "org/name", "--max-model-len", "8", "--temperature", "-1", "--max-model-len=9"]
    )
    given = ["--max-model-len", "9", "--temperature", "-1", "--metrics-prefix", "vllm"]
    assert command[1:] == ["-m", "octavo", "serve", "org/name", *given]


def test_which_flag_a_refusal_is_about():
    said = "enable_lora=True is not supported"
    assert shim._names(said, "--enable-lora")
    assert not shim._names(said, "--lora-modules")
    assert shim._names("unknown flag --lora-modules", "--lora-modules")


def test_own_code_can_be_imported_and_named_but_not_used(monkeypatch):
    protocol = shim.absent("vllm.protocol")
    annotated = protocol.Request | None
    assert annotated is not None
    assert not protocol.SETTING
    assert issubclass(shim.absent("vllm.exceptions.SomeError"), Exception)
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    assert not protocol.Constant(1).value  # of a file that is being imported
    monkeypatch.undo()
    for use in (protocol.Request, lambda: protocol.LIMIT + 1, lambda: list(protocol.NAMES)):
        with pytest.raises(pytest.skip.Exception, match=shim.OWN_CODE):
            use()


def test_only_the_tests_are_unpacked_and_not_their_server(tmp_path):
    source = tmp_path / "vllm-0"
    for name in ("tests/test_a.py", "tests/utils.py", "tests/conftest.py", "vllm/a.py"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).touch()
    sdist = tmp_path / "vllm-0.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        archive.add(source, "vllm-0")
    fetch.unpack_tests(sdist, tmp_path / "out")
    files = [file for file in (tmp_path / "out").rglob("*") if file.is_file()]
    assert files == [tmp_path / "out/tests/test_a.py"]


def test_the_stand_in_model_has_more_positions(tmp_path):
    conformance.make_model(tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    assert config["max_position_embeddings"] == 40960
    assert (tmp_path / "model/model.safetensors").is_symlink()


def test_a_file_is_run_in_a_process_of_its_own(tmp_path):
    """Tests of the file that use no server are left out; one that ends the process has failed."""
    tests = tmp_path / "src" / "tests" / "entrypoints" / "openai"
    tests.mkdir(parents=True)
    (tests / "test_a.py").write_text(
        "import os\nfrom vllm.unknown import Thing\n"
        "def test_own(): pass\n"
        "def test_end():\n    os._exit(1)  # RemoteOpenAIServer(\n"
    )
    for name in ("logs", "results", "packages", "model"):
        (tmp_path / name).mkdir()
    (tmp_path / "packages/requests.py").write_text("class Session:\n    send = None\n")
    (file,) = conformance.server_tests(tmp_path / "src")
    found = {r.test: (r.outcome, r.message) for r in conformance.run(tmp_path, file)}
    assert found == {
        "openai/test_a.py::test_own": ("skipped", f"{shim.OWN_CODE}no server is used"),
        "openai/test_a.py::test_end": ("failed", "not finished in time"),
    }


def test_nothing_to_run_is_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(conformance, "prepare", lambda work, sdist: None)
    assert conformance.main(["--work", str(tmp_path)]) == 1
