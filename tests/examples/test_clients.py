"""examples/clients with a server of the built-in model: each client in an environment of its own.

`make clients` installs the clients and runs these tests; OCTAVO_CLIENT_ENVS names the folder of the
environments.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.e2e import harness
from tests.examples.client_environments import PACKAGES, interpreter

EXAMPLES = Path(__file__).parents[2] / "examples" / "clients"
WANTED = {
    "anthropic_client": r"^\d+ tokens\n12 \* 7 = 84\n$",
    "instructor_client": (
        r"^tool_call Person\(name='Ben.*', age=\d+\)\n"
        r"json_schema_mode Person\(name='Ben', age=25\)\n$"
    ),
    "langchain_chat": r"^12 \* 7 = 84\nCity\(name='.+', sunny=(True|False)\)\n$",
    "litellm_client": r"^12 \* 7 = 84\n$",
    "ollama_client": (
        r"^octavo/stories \['completion', 'tools'\]\n12 \* 7 = 84\n"
        r"City\(name='.+', sunny=(True|False)\)\n$"
    ),
    "openai_agents": (
        r"^12 \* 7 = 84\n  tool_called\n  tool_output\n  message_output_created\n.+\n$"
    ),
    "pydantic_ai_agent": r"^12 \* 7 = 84\nCity\(name='.+', sunny=(True|False)\)\n$",
}


def test_every_example_has_an_environment():
    scripts = {path.stem for path in EXAMPLES.glob("*.py")}
    assert scripts == PACKAGES.keys() == WANTED.keys()
    for client, package in PACKAGES.items():
        install = re.search(
            r"pip install \"?([\w\[\]-]+)\"?`", (EXAMPLES / f"{client}.py").read_text()
        )
        assert install[1] == package


@pytest.fixture(scope="module")
def environments():
    folder = os.environ.get("OCTAVO_CLIENT_ENVS")
    if folder is None:
        pytest.skip("OCTAVO_CLIENT_ENVS is not set: `make clients` installs the clients")
    return Path(folder)


@pytest.fixture(scope="module")
def url(environments, tmp_path_factory):
    with harness.serve(tmp_path_factory.mktemp("server")) as server:
        yield f"{server.url}/v1"


@pytest.mark.parametrize("client", PACKAGES)
def test_the_example_works(client, environments, url):
    python = interpreter(environments, client)
    if not python.exists():
        pytest.skip(f"{python} is missing: `make clients` installs it")
    # LiteLLM would fetch a table of prices.
    settings = {"OCTAVO_URL": url, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(
        [str(python), str(EXAMPLES / f"{client}.py")],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **settings},
    )
    assert done.returncode == 0, done.stderr
    assert re.search(WANTED[client], done.stdout), done.stdout + done.stderr
