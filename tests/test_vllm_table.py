"""docs/vllm.md, equal to its generator's output and with all names of vLLM."""

import importlib.util
from pathlib import Path

import pytest

from octavo.compat.routes import ELSEWHERE

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("make_vllm_table", DOCS / "make_vllm_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(generator):
    assert (DOCS / "vllm.md").read_text() == generator.document(), (
        "run python docs/make_vllm_table.py"
    )


def test_a_flag_that_is_missed_or_there_twice_fails(generator, monkeypatch):
    with pytest.raises(LookupError, match="--frobnicate"):
        generator.flag_status(["--frobnicate"])
    with pytest.raises(LookupError, match="-zz"):
        generator.flag_status(["--port", "-zz"])
    with pytest.raises(LookupError, match="frobnicate is unknown"):
        generator.flag_status(["frobnicate"])
    monkeypatch.setitem(generator.FOREIGN, "port", generator.FOREIGN["watermark"])
    with pytest.raises(LookupError, match="port is Octavo's own"):
        generator.flag_status(["--port"])


@pytest.mark.parametrize(
    ("section", "name"),
    [
        ("fields of /v1/completions", "frobnicate"),
        ("fields of /detokenize", "frobnicate"),
        ("fields of SamplingParams", "frobnicate"),
        ("routes", "GET /frobnicate"),
        ("routes", "PUT /health"),
        ("metrics", "frobnicate"),
    ],
)
def test_a_name_that_nobody_explains_fails(generator, section, name):
    with pytest.raises(LookupError, match=name):
        generator.STATUS[section]([name])


def test_a_name_with_a_reason_not_to_be_there_is_not_there(generator, monkeypatch):
    monkeypatch.setattr(generator, "elsewhere", lambda path: "reason")
    with pytest.raises(LookupError, match="either"):
        generator.route_status(["GET /health"])
    monkeypatch.setitem(generator.ABSENT_METRICS, "prompt_tokens", "reason")
    with pytest.raises(LookupError, match="either"):
        generator.metric_status(["prompt_tokens"])


def test_a_section_that_nobody_knows_fails(generator, monkeypatch):
    monkeypatch.setattr(
        generator, "names", lambda: {**dict.fromkeys(generator.STATUS, ()), "x": ()}
    )
    with pytest.raises(LookupError, match="unknown sections: x"):
        generator.document()


def test_no_table_has_a_name_that_vllm_does_not_have(generator):
    sections = generator.names()
    flags = [word for words in sections["flags and arguments"] for word in words]
    assert set(generator.FOREIGN) <= {w.removeprefix("--").replace("-", "_") for w in flags}
    routes = [words[0].split()[1] for words in sections["routes"]]
    for path in ELSEWHERE:
        assert any(route == path or route.startswith(path + "/") for route in routes), path
    metrics = [words[0] for words in sections["metrics"]]
    for name in generator.ABSENT_METRICS:
        assert any(metric.startswith(name) for metric in metrics), name
