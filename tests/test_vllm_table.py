"""docs/vllm.md is what its generator writes, and no name of vLLM's is missing."""

import importlib.util
from pathlib import Path

import pytest

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


def test_a_name_that_is_missed_or_there_twice_fails(generator, monkeypatch):
    with pytest.raises(LookupError, match="--frobnicate"):
        generator._status(["--frobnicate"])
    with pytest.raises(LookupError, match="-zz"):
        generator._status(["--port", "-zz"])
    with pytest.raises(LookupError, match="frobnicate is unknown"):
        generator._status(["frobnicate"])
    monkeypatch.setitem(generator.FOREIGN, "port", generator.FOREIGN["watermark"])
    with pytest.raises(LookupError, match="port is Octavo's own"):
        generator._status(["--port"])


def test_the_table_has_no_name_that_vllm_does_not_have(generator):
    words = (DOCS / "vllm_names.txt").read_text().split()
    names = {word.removeprefix("--").replace("-", "_") for word in words}
    assert set(generator.FOREIGN) <= names
