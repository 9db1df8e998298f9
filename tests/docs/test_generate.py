"""Generated documents: they match the code, and their examples work."""

import importlib.util
import re
import shlex
from pathlib import Path

import httpx
import openai
import pytest

from octavo.config import EngineConfig, ServerConfig, config_fields, section_fields
from octavo.server.field_docs import field_doc
from octavo.server.openapi import OPERATIONS, InvocationBody
from octavo.server.schema import ChatBody
from tests.adapters import builtin_model, make_factors, write_adapter
from tests.server.fake_engine import with_server
from tests.server.test_run import serving

DOCS = Path(__file__).parents[2] / "docs"


def load():
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = load()


@pytest.mark.parametrize("name", generate.DOCUMENTS)
def test_documents_are_up_to_date(name):
    written = (DOCS / name).read_text(encoding="utf-8")
    assert written == generate.DOCUMENTS[name](), "run `python docs/generate.py`"


def test_every_setting_is_there():
    text = generate.settings()
    for field in [*config_fields(EngineConfig), *section_fields(ServerConfig)]:
        assert f"\n| `{field.flag}` |" in text


def test_defaults_are_shown_as_they_are_typed():
    text = generate.settings()
    for row in (
        "| `--enable-prefix-caching` | `enable_prefix_caching` | `on` |",
        "| `--max-request-bytes` | `8M` |",
        "| `--root-path` |  |",
    ):
        assert row in text
    assert not re.search(r"\| `(True|False|None|\[.*|\{.*|)` \|", text)


POSTED = (
    *("/sleep", "/wake_up", "/pause", "/resume", "/is_scaling_elastic_ep"),
    *("/reset_prefix_cache", "/reset_encoder_cache", "/reset_mm_cache"),
)


def test_every_route_and_every_field_is_there():
    text = generate.api()
    for path, operation in OPERATIONS.items():
        if generate.described_elsewhere(path.rpartition(" ")[2]):
            continue
        post = operation.body is not None or "profile" in path or path in POSTED
        verb = "POST" if post else "GET"
        assert f"\n## {verb} {path.replace(':path', '')}\n" in text
        if operation.body is None or operation.body is InvocationBody:
            continue
        for name, info in operation.body.model_fields.items():
            assert f"\n| `{info.alias or name}` |" in text


def test_a_field_without_a_docstring_is_named():
    with pytest.raises(KeyError, match=r"ChatBody\.new has no docstring"):
        field_doc(ChatBody, "new")


def test_openapi_has_the_meanings():
    async def scenario(served):
        schemas = (await served.http.get("/openapi.json")).json()["components"]["schemas"]
        for name in ("ChatBody", "CompletionBody", "TokenizeBody", "DetokenizeBody", "Message"):
            for field, described in schemas[name]["properties"].items():
                assert described["description"], (name, field)

    with_server(scenario)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profiles")
    flags = [
        "--enable-admin",
        "--enable-elastic-ep",
        "--num-threads",
        "1",
        "--enable-sleep-mode",
        "--enable-tokenizer-info-endpoint",
    ]
    flags += ["--profiler-dir", str(folder), "--resume-grace", "600"]
    write_adapter(folder / "poems-v2", make_factors(builtin_model()))
    flags += ["--enable-lora", "--lora-root", str(folder)]
    with serving("ready", *flags) as process:
        body = {"prompt": "Once", "stream": True, "request_id": "abc"}
        httpx.post(f"{process.url}/v1/completions", json=body).raise_for_status()
        yield process.url


def test_curl_lines_work(url):
    lines = re.findall(r"^curl .*$", generate.api(), re.MULTILINE)
    assert len(lines) == len(list(generate.routes()))
    for line in lines:
        _, address, *options = shlex.split(line)
        given = dict(zip(options[::2], options[1::2], strict=True))
        assert set(given) <= {"-H", "-d", "-X"}
        name, _, value = given.get("-H", "accept: */*").partition(": ")
        method = given.get("-X", "POST" if "-d" in given else "GET")
        answer = httpx.request(
            method,
            address.replace(generate.ADDRESS, url),
            headers={name: value},
            content=given.get("-d"),
        )
        assert answer.status_code == 200, (line, answer.text)


def test_openai_lines_work(url):
    lines = re.findall(r"```python\n(client\..*?)\n```", generate.api(), re.DOTALL)
    assert len(lines) == len(list(generate.routes()))
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for line in lines:
            assert eval(line.replace(generate.ADDRESS, url), {"client": client}) is not None, line
