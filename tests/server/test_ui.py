"""The page's addresses, headers and files; its code in a browser is tested in tests/browser."""

import asyncio
import base64
import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from octavo.config import ServerConfig
from octavo.server import ui
from octavo.server.schema import ChatBody
from octavo.server.structured_outputs import StructuredOutputsBody
from tests.router.servers import Routed, whole
from tests.server.fake_engine import with_server

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
SCRIPTS = sorted(name for name in ui.static_files() if name.endswith(".js"))


def test_browsers_get_the_page_and_programs_the_index():
    async def scenario(served):
        page = await served.http.get("/", headers=BROWSER)
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert page.content == ui.static_files()["index.html"].content
        for accept in ("*/*", "application/json", ""):
            response = await served.http.get("/", headers={"Accept": accept})
            assert response.json()["name"] == "octavo"
            assert response.headers["vary"] == "Accept"
        assert (await served.http.head("/", headers=BROWSER)).content == b""

    with_server(scenario)


def test_headers_of_the_page_and_its_files():
    async def scenario(served):
        policies = set()
        for path in ("/", *(f"/ui/{name}" for name in ui.static_files())):
            response = await served.http.get(path, headers=BROWSER)
            assert response.status_code == 200
            assert response.headers["x-content-type-options"] == "nosniff"
            assert response.headers["referrer-policy"] == "no-referrer"
            assert response.headers["cache-control"] == "no-cache"
            policies.add(response.headers["content-security-policy"])
            etag = response.headers["etag"]
            again = await served.http.get(path, headers=BROWSER | {"If-None-Match": etag})
            assert (again.status_code, again.content) == (304, b"")
            assert again.headers["etag"] == etag
        (policy,) = policies
        rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
        assert rules.pop("img-src") == "'self' data:"
        for name in ("script-src", "connect-src"):
            assert rules.pop(name) == "'self'"
        # The only styles are those in the page, which come from style.css.
        page = ui.static_files()["index.html"].content
        (style,) = re.findall(rb"<style>(.*?)</style>", page, re.DOTALL)
        assert style == (Path(ui.__file__).parent / "static" / "style.css").read_bytes()
        digest = base64.b64encode(hashlib.sha256(style).digest()).decode()
        assert rules.pop("style-src") == f"'sha256-{digest}'"
        assert rules.pop("require-trusted-types-for") == "'script'"
        assert set(rules) == {
            *("default-src", "frame-ancestors", "base-uri", "form-action", "trusted-types")
        }
        assert set(rules.values()) == {"'none'"}

    with_server(scenario)


def test_the_page_needs_no_key_and_what_it_fetches_does():
    async def scenario(served):
        assert (await served.http.get("/", headers=BROWSER)).status_code == 200
        for name in ui.static_files():
            assert (await served.http.get(f"/ui/{name}")).status_code == 200
        assert (await served.http.get("/")).status_code == 401
        assert (await served.http.post("/ui/main.js")).status_code == 401
        for path in ("/v1/models", "/ui", "/v1/ui/main.js"):
            assert (await served.http.get(path, headers=BROWSER)).status_code == 401

    with_server(scenario, api_key=["a"])


@pytest.mark.parametrize("name", ["nothing.js", "..%2fui.py", "%2e%2e/ui.py", ".", "index.html/"])
def test_there_are_no_other_files(name):
    async def scenario(served):
        response = await served.http.get(f"/ui/{name}")
        assert response.status_code in (404, 401)
        assert b"import" not in response.content

    with_server(scenario)


def test_no_ui():
    async def scenario(served):
        assert (await served.http.get("/", headers=BROWSER)).json()["name"] == "octavo"
        assert (await served.http.get("/ui/main.js")).status_code == 404

    with_server(scenario, ui=False)

    async def with_key(served):
        for path in ("/", "/ui/main.js"):
            assert (await served.http.get(path, headers=BROWSER)).status_code == 401

    with_server(with_key, ui=False, api_key=["a"])


def test_the_page_at_a_path_of_a_proxy():
    async def scenario(served):
        for prefix in ("", "/llm"):  # a proxy may leave its path in front or not
            for path in ("/", "/ui/main.js"):
                response = await served.http.get(prefix + path, headers=BROWSER)
                assert response.status_code == 200
                assert response.headers["etag"]

    with_server(scenario, root_path="/llm", api_key=["a"])
    # All addresses in the page and its scripts are relative.
    for name, file in ui.static_files().items():
        text = file.content.decode()
        assert not re.search(
            r"""(src|href)=["']/|fetch\(["'`]/|(json|events|request)\(["'`]/""", text
        ), name


def test_other_sites_cannot_show_or_use_the_page():
    async def scenario(served):
        response = await served.http.get("/", headers=BROWSER | {"Host": "evil.example"})
        assert response.status_code == 421
        other = {"Host": "localhost", "Origin": "https://evil.example"}
        page = await served.http.get("/", headers=BROWSER | other)
        assert "access-control-allow-origin" not in page.headers
        assert page.headers["x-frame-options"] == "DENY"

    with_server(scenario, host="127.0.0.1")


def test_the_router_has_the_page():
    async def run(**settings):
        async with Routed([whole()], config=ServerConfig(**settings)) as router:
            pages = [await router.client.get("/", headers=BROWSER)]
            pages.append(await router.client.get("/ui/main.js"))
            return (*pages, await router.client.get("/"))

    page, script, index = asyncio.run(run(api_key=["a"]))
    assert page.content == ui.static_files()["index.html"].content
    assert (script.status_code, index.status_code) == (200, 401)
    page, script, index = asyncio.run(run(ui=False))
    assert page.json() == index.json()
    assert index.json()["name"] == "octavo router"
    assert script.status_code == 404


def test_the_fields_of_the_page_are_those_of_a_chat():
    page = ui.static_files()["index.html"].content.decode()
    own = {"system", "logprobs", "other", "schema", "tools", "choice"}
    names = set(re.findall(r'id="set-(\w+)" name="\1"', page)) - own
    assert len(names) > 25
    assert names <= set(ChatBody.model_fields)
    elsewhere = {
        *("messages", "model", "stream", "stream_options", "tools", "tool_choice", "logprobs"),
        *("top_logprobs", "response_format"),
    }
    # For programs, not for a visitor; the box of other fields takes them.
    unusual = {
        *(
            "request_id",
            "cache_salt",
            "kv_transfer_params",
            "user",
            "vllm_xargs",
            "echo",
            "functions",
        ),
        *("function_call", "documents", "add_generation_prompt", "continue_final_message"),
        *("add_special_tokens", "return_token_ids", "return_tokens_as_token_ids", "return_metrics"),
        *("return_progress", "explain", "prompt_logprobs", "use_beam_search", "length_penalty"),
        *("early_stopping", "max_completion_tokens", "mm_processor_kwargs"),
        "media_io_kwargs",
    }
    forms = set(StructuredOutputsBody.model_fields)
    assert set(ChatBody.model_fields) - names - elsewhere - unusual - forms == set()


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_make_elements_from_texts_only(name):
    text = ui.static_files()[name].content.decode()
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|DOMParser"
        r"|createContextualFragment|setHTML|srcdoc|javascript:|setAttribute\(.style|\bvar\b|debugger"
        r"|console\.|[^=!]==[^=]|!=[^=]|https?://(?!www\.w3\.org/)[a-z]"
    )
    code = re.sub(r"//.*|/\*.*?\*/", "", text.replace("https://", "https:"), flags=re.DOTALL)
    assert not re.findall(forbidden, code)
    assert all(line == line.rstrip() for line in text.splitlines())
    assert text.endswith(("}\n", ";\n"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_valid(name):
    node = shutil.which("node")
    if node is None:
        pytest.skip("Node.js is not installed")
    text = ui.static_files()[name].content
    command = [node, "--check", "--input-type=module"]
    done = subprocess.run(command, input=text, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_few_files_are_asked_for_before_the_first_paint():
    files = ui.static_files()
    head, _ = files["index.html"].content.decode().split("</head>")
    assert re.findall(r'"ui/([^"]+)"', head) == ["icon.svg", "api.js", "main.js"]
    imports = r'^import .* from "\./(.*)";$'
    first = {n: files[n].content.decode() for n in ("api.js", "main.js")}
    found = {name: re.findall(imports, text, re.MULTILINE) for name, text in first.items()}
    assert found == {"api.js": [], "main.js": ["api.js"]}


def test_the_page_is_small():
    scripts = [ui.static_files()[name].content for name in SCRIPTS]
    assert sum(map(len, scripts)) <= 80_000
    assert sum(text.count(b"\n") for text in scripts) <= 1_500


def test_the_setting():
    assert ServerConfig().ui
