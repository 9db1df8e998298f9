import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest

import octavo
from octavo import cli
from octavo.config import (
    EngineConfig,
    ServerConfig,
    SpeculativeConfig,
    config_fields,
    section_fields,
)
from octavo.errors import EngineDeadError


@pytest.fixture
def served(monkeypatch):
    """What `octavo serve` would have served."""
    seen = {}
    module = SimpleNamespace(
        run_server=lambda server, engine: seen.update(server=server, engine=engine) or 0
    )
    monkeypatch.setitem(sys.modules, "octavo.server.run", module)
    return seen


def example(field):
    """A value other than the default, as it is typed, and as the config holds it."""
    if field.choices is not None:
        other = [c for c in field.choices if c != field.default] or [field.default]
        return [str(other[0])], other[0]
    if field.type is bool:
        return (["no"] if field.default else []), not field.default
    if field.type == list[str]:
        return ["a", "b"], ["a", "b"]
    if field.name.endswith("_bytes"):
        return ["2M"], 2 * 2**20
    if field.name == "speculative_config":
        return ['{"method": "suffix"}'], SpeculativeConfig(method="suffix")
    if field.name == "gpu_memory_utilization":
        return ["0.5"], 0.5
    if "float" in str(field.type):
        return ["3.5"], 3.5
    if "int" in str(field.type):
        return ["7777" if "batched" in field.name else "77"], (
            7777 if "batched" in field.name else 77
        )
    if field.name == "default_chat_template_kwargs":
        return ['{"a": 1}'], {"a": 1}
    if field.name == "root_path":
        return ["/text"], "/text"
    return ["text"], "text"


ALL_FIELDS = [*config_fields(EngineConfig), *section_fields(ServerConfig, "server")]


@pytest.mark.parametrize("field", ALL_FIELDS, ids=lambda f: f.name)
def test_every_setting_has_a_flag(served, field):
    words, value = example(field)
    flag = field.flag
    if field.type is bool:
        flag = flag.replace("--", "--no-", 1) if words else flag
        words = []
    for spelling in (flag, "--" + flag[2:].replace("-", "_")):
        served.clear()
        assert cli.main(["serve", spelling, *words]) == 0
        config = served["server" if field.section == "server" else "engine"]
        section = config if field.section == "server" else getattr(config, field.section)
        assert getattr(section, field.name) == value


def test_without_flags_all_is_default(served):
    assert cli.main(["serve"]) == 0
    assert served["engine"] == EngineConfig()
    assert served["server"] == ServerConfig()


def test_the_model_is_an_argument_or_a_flag(served):
    for argv in (["serve", "org/m"], ["serve", "--model", "org/m"], ["serve", "--model=org/m"]):
        assert cli.main([*argv, "--max-model-len", "64"]) == 0
        assert served["engine"].model.model == "org/m"
        assert served["engine"].model.max_model_len == 64


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["serve", "a", "--model", "b"], "Two models"),
        (["serve", "--max-model-lenn", "5"], "did you mean --max-model-len?"),
        (["serve", "--zzzz"], "unknown flag --zzzz"),
        (["serve", "a", "b"], "unexpected argument 'b'"),
        (["serve", "--port", "x"], "--port"),
        (["serve", "--port", "70000"], "port=70000"),
        (["serve", "--dtype", "int3"], "--dtype"),
        (["serve", "--kv-cache-memory-bytes", "4X"], "kv_cache_memory_bytes='4X'"),
        (["serve", "--max-model-len", "0"], "max_model_len=0"),
        (["serve", "--max-num-batched-tokens", "4"], "max_num_batched_tokens=4"),
        (["serve", "--max-model"], "unknown flag"),
        (["serv"], "serv"),
        (["run", "a", "b", "c"], "quotes"),
        (["run", "--model", "m", "a", "b"], "quotes"),
        (["run", "--temperature", "-1", "x"], "temperature"),
        (["run", "--block-size", "5", "x"], "--block-size"),
        (["chat", "--frobnicate"], "--frobnicate"),
    ],
)
def test_wrong_usage_is_one_clear_line(served, capsys, argv, said):
    assert cli.main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("octavo: error: ")
    assert said in line
    assert not served


def test_no_command_shows_the_help(capsys):
    assert cli.main([]) == 2
    assert "serve" in capsys.readouterr().out
    assert cli.main(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    for field in ALL_FIELDS:
        assert field.flag in text


def examples():
    for name in cli._BENCHMARKS:
        for words in cli._EXAMPLES[name]:
            yield ["bench", name, *shlex.split(words)]


@pytest.mark.parametrize("argv", list(examples()), ids=" ".join)
def test_examples_of_the_benchmarks(argv):
    args, unknown = cli.build_parser(argv).parse_known_args(argv)
    assert (args.command, unknown) == (cli._bench, [])


def test_failures_are_one_line_and_status_1(monkeypatch, capsys):
    def fail(server, engine):
        raise EngineDeadError("out of\nmemory")

    monkeypatch.setitem(sys.modules, "octavo.server.run", SimpleNamespace(run_server=fail))
    assert cli.main(["serve"]) == 1
    assert capsys.readouterr().err == "octavo: error: out of memory\n"


def test_version_and_module():
    done = subprocess.run([sys.executable, "-m", "octavo", "--version"], capture_output=True)
    assert done.stdout.decode().strip() == f"octavo {octavo.__version__}"


def test_the_command_line_is_light():
    code = "import sys, octavo.cli; octavo.cli.build_parser(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {"torch", "fastapi", "pydantic", "httpx", "uvicorn", "rich", "transformers"}
