"""docs/openai_fields.md, equal to its generator's output, and true of a server."""

import importlib.util
import json
from pathlib import Path

import pytest

from tests.server.fake_engine import FakeAsyncLLM, make_tokenizer, with_server
from tests.server.pooled import EMBED
from tests.server.test_tools import TEMPLATE

openai = pytest.importorskip("openai")
DOCS = Path(__file__).parent.parent / "docs"
BASE = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/embeddings": {"input": "hi"},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/conversations": {},
    "/v1/batches": {"endpoint": "/v1/completions", "completion_window": "24h"},
}
# Values that would have an effect if the server did not ignore the field.
IGNORED = {
    "max_tool_calls": 1,
    "metadata": {"a": "b"},
    "prediction": {"type": "content", "content": "Hello"},
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
    "service_tier": "priority",
    "store": True,
    "verbosity": "low",
}
# Values that OpenAI's API allows.
REFUSED = {
    "modalities": ["text", "audio"],
    "service_tier": "flex",
    "suffix": "end",
    "truncation": "auto",
}


def load_generator():
    spec = importlib.util.spec_from_file_location(
        "make_openai_table", DOCS / "make_openai_table.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generator = load_generator()


def test_the_page_is_up_to_date():
    page = (DOCS / "openai_fields.md").read_text()
    if f"`openai` {openai.__version__}." not in page.replace("\n", " "):
        pytest.skip("the page is of another version of the package")
    assert page == generator.document(), "run python docs/make_openai_table.py"


def test_a_field_that_nobody_explains_fails(monkeypatch):
    monkeypatch.setattr(generator, "names", lambda route: ["frobnicate"])
    for route in generator.ROUTES:
        with pytest.raises(LookupError, match="frobnicate"):
            list(generator.fields(route))
    monkeypatch.setattr(generator, "names", lambda route: ["audio"])
    monkeypatch.setattr(generator, "REASONS", {})
    with pytest.raises(LookupError, match="write a reason for audio"):
        list(generator.fields("/v1/chat/completions"))


@pytest.mark.parametrize("route", BASE)
def test_the_page_tells_the_truth(route):
    """Each field has the status of the page: read, ignored, or refused by name."""

    async def scenario(served):
        base = dict(BASE[route])
        if route == "/v1/batches":
            upload = {"file": ("a", b"{}")}
            file = await served.http.post("/v1/files", files=upload, data={"purpose": "batch"})
            base["input_file_id"] = file.json()["id"]

        async def send(name, value):
            response = await served.http.post(route, json={**base, name: value})
            ignored = response.headers.get("X-Octavo-Ignored-Fields", "")
            found = response.json()
            return response.status_code, found.get("error"), ignored, found

        plain = None
        for name, status, note in generator.fields(route):
            if status == "supported":
                # A wrong value is found in the field, or in a field of the object.
                code, error, ignored, _ = await send(name, {"wrong": []})
                assert (code == 400 and error["param"].startswith(name)) or (
                    code == 200 and ignored == f"{name}.wrong"
                ), (name, error)
            elif status == "no effect":
                code, error, ignored, found = await send(name, IGNORED.get(name, "x"))
                assert (code, ignored) == (200, ""), (name, error)
                text = found.get("choices") or found.get("data")
                text = text or found["output"][0]["content"]
                plain = plain or text
                assert text == plain
            else:
                code, error, _, _ = await send(name, REFUSED.get(name, {"type": "x"}))
                assert (code, error["param"]) == (400, name), (name, error)
                for accepted in note.partition("Accepted: ")[2].rstrip(".").split(", "):
                    code, error, ignored, _ = await send(name, json.loads(accepted.strip("`")))
                    assert (code, ignored) == (200, ""), (name, accepted, error)

    poolers = (EMBED,) if route == "/v1/embeddings" else ()
    with_server(scenario, lambda: FakeAsyncLLM(tokenizer=make_tokenizer(TEMPLATE), poolers=poolers))


def test_the_form_of_a_file():
    async def scenario(served):
        for wrong, param in [
            ({"purpose": "x"}, "purpose"),
            ({"purpose": "batch", "expires_after[anchor]": "x"}, "expires_after[anchor]"),
        ]:
            response = await served.http.post("/v1/files", files={"file": ("a", b"")}, data=wrong)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        form = {"purpose": (None, "batch"), "other": ("a", b"")}
        response = await served.http.post("/v1/files", files=form)
        assert response.json()["error"]["param"] == "file"

    with_server(scenario)
