import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

import octavo
from octavo import cli
from octavo.config import (
    EngineConfig,
    EplbConfig,
    KVEventsConfig,
    KVTransferConfig,
    PoolerConfig,
    ServerConfig,
    SpeculativeConfig,
    config_fields,
    is_size,
    section_fields,
)
from octavo.errors import EngineDeadError
from tests.served import stand_in


def test_ctrl_c_while_modules_are_imported_is_quiet():
    code = """
import signal, sys
class Interrupts:
    def find_spec(self, name, *rest):
        if name == "octavo.config":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
from octavo.__main__ import main
assert [name for name in sys.modules if "octavo." in name] == ["octavo.__main__"]
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")
    scripts = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert scripts["scripts"] == {"octavo": "octavo.__main__:main"}


@pytest.fixture
def served(monkeypatch):
    """Return the settings that `octavo serve` would have served."""
    seen = {}
    stand_in(monkeypatch, seen)
    return seen


def example(field):
    """Return a value other than the default, as typed, and as stored in the config."""
    if field.choices is not None:
        other = [c for c in field.choices if c != field.default] or [field.default]
        return [str(other[0])], other[0]
    if field.type == bool | None:
        return ["yes"], True
    if field.type is bool:
        return (["no"] if field.default else []), not field.default
    if field.name == "lora_hub_repos":
        return ["a/a", "b/*"], ["a/a", "b/*"]
    if field.name == "lora_modules":
        return ["a=/a", "b=/b"], ["a=/a", "b=/b"]
    if field.name == "lora_modules_to_save":
        return ["embed_tokens", "lm_head"], ["embed_tokens", "lm_head"]
    if field.type == list[str]:
        return ["a", "b"], ["a", "b"]
    if is_size(field.name):
        return ["2M"], 2 * 2**20
    if field.name == "kv_events_config":
        return ['{"enable_kv_cache_events": true}'], KVEventsConfig(enable_kv_cache_events=True)
    if field.name == "kv_transfer_config":
        return ['{"kv_connector": "A"}'], KVTransferConfig(kv_connector="A")
    if field.name == "speculative_config":
        return ['{"method": "suffix"}'], SpeculativeConfig(method="suffix")
    if field.name == "eplb_config":
        return ['{"window_size": 5}'], EplbConfig(window_size=5)
    if field.name == "pooler_config":
        return ['{"pooling_type": "CLS"}'], PoolerConfig(pooling_type="CLS")
    if field.name == "hf_overrides":
        return ['{"a": {"b": 1}}'], {"a": {"b": 1}}
    if field.name == "default_mm_loras":
        return ['{"audio": "/a"}'], {"audio": "/a"}
    if field.name == "limit_mm_per_prompt":
        return ['{"image": 4}'], {"image": 4}
    if field.name == "media_io_kwargs":
        return ['{"video": {"num_frames": 4}}'], {"video": {"num_frames": 4}}
    if field.name == "gpu_memory_utilization":
        return ["0.5"], 0.5
    if "float" in str(field.type):
        return ["3.5"], 3.5
    if "int" in str(field.type):
        return ["7777" if "batched" in field.name else "77"], (
            7777 if "batched" in field.name else 77
        )
    if field.name in ("default_chat_template_kwargs", "hf_overrides", "mm_processor_kwargs"):
        return ['{"a": 1}'], {"a": 1}
    if field.name == "distributed_executor_backend":
        return ["mp"], "mp"
    if field.name == "pipeline_layers":
        return ["12"], "12"
    if field.name == "root_path":
        return ["/text"], "/text"
    if field.name == "otlp_traces_endpoint":
        return ["http://host:4318"], "http://host:4318"
    return ["text"], "text"


ALL_FIELDS = [*config_fields(EngineConfig), *section_fields(ServerConfig, "server")]


NEEDED = {
    "enable_expert_parallel": ["-tp", "2"],
    "enable_sequence_parallel": ["-tp", "2"],
    "enable_eplb": ["-tp", "2", "-ep"],
    "eplb_config": ["-tp", "2", "-ep", "--enable-eplb"],
    "default_mm_loras": ["--enable-lora"],
    "lora_modules": ["--enable-lora"],
    "lora_modules_to_save": ["--enable-lora"],
    "lora_target_modules": ["--enable-lora"],
    "lora_root": ["--enable-lora"],
    "lora_hub_repos": ["--enable-lora"],
    "lora_resolvers": ["--enable-lora"],
}
"""Other flags that a setting needs."""


@pytest.mark.parametrize("field", ALL_FIELDS, ids=lambda f: f.name)
def test_every_setting_has_a_flag(served, field):
    words, value = example(field)
    flag = field.flag
    if field.type is bool:
        flag = flag.replace("--", "--no-", 1) if words else flag
        words = []
    needed = NEEDED.get(field.name, [])
    for spelling in (flag, "--" + flag[2:].replace("-", "_")):
        served.clear()
        assert cli.main(["serve", spelling, *words, *needed]) == 0
        config = served["server" if field.section == "server" else "engine"]
        section = config if field.section == "server" else getattr(config, field.section)
        assert getattr(section, field.name) == value


def test_without_flags_all_is_default(served):
    assert cli.main(["serve"]) == 0
    assert served["engine"] == EngineConfig()
    assert served["server"] == ServerConfig()


def test_vllms_well_known_command(served):
    flags = ["--max-model-len", "4k", "--tensor-parallel-size", "1", "--dtype", "auto"]
    assert cli.main(["serve", "Qwen/Qwen3-0.6B", *flags, "--api-key", "token-abc123"]) == 0
    model = served["engine"].model
    assert (model.model, model.max_model_len) == ("Qwen/Qwen3-0.6B", 4000)
    assert served["server"].api_key == ["token-abc123"]


def test_the_model_is_an_argument_or_a_flag(served):
    for argv in (["serve", "org/m"], ["serve", "--model", "org/m"], ["serve", "--model=org/m"]):
        assert cli.main([*argv, "--max-model-len", "64"]) == 0
        assert served["engine"].model.model == "org/m"
        assert served["engine"].model.max_model_len == 64


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["router", "a", "--model", "b", "--replicas", "1"], "Two models"),
        (["serve", "a", "--model", "b", "--model", "b"], "Two models have the name"),
        (["serve", "--max-model-lenn", "5"], "did you mean --max-model-len?"),
        (["serve", "--prot", "1"], "did you mean --port?"),
        (["serve", "--zzzz"], "unknown flag --zzzz"),
        (["serve", "a", "b"], "unexpected argument 'b'"),
        (["serve", "--port", "x"], "--port"),
        (["serve", "--port", "70000"], "--port=70000"),
        (["serve", "--dtype", "int3"], "--dtype"),
        (["serve", "--kv-cache-memory-bytes", "4X"], "--kv-cache-memory-bytes='4X'"),
        (["serve", "--max-model-len", "0"], "--max-model-len=0"),
        (["serve", "--max-num-batched-tokens", "4"], "--max-num-batched-tokens=4"),
        (["serve", "--max-model"], "unknown flag"),
        (["serv"], "serv"),
        (["run", "a", "b", "c"], "quotes"),
        (["run", "--model", "m", "a", "b"], "quotes"),
        (["run", "--temperature", "-1", "x"], "--temperature=-1.0"),
        (["serve", "-tp", "2", "-dpb", "ray", "-dp", "2"], "--data-parallel-backend="),
        (["serve", "--plot", "x"], "unknown flag --plot (see"),
        (["serve", "--task", "x"], "unknown flag --task (see"),
        (["serve", "-tpp", "2"], "unknown flag -tpp (see"),
        (["serve", "--seed", "x"], "--seed: 'x' is not a whole number (see"),
        (["serve", "--max-model-len", "x"], "'x' is not a whole number; write for example 4096"),
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


def test_failures_are_one_line_and_status_1(monkeypatch, capsys):
    def fail(server, engine):
        raise EngineDeadError("out of\nmemory")

    stand_in(monkeypatch, fail)
    assert cli.main(["serve"]) == 1
    assert capsys.readouterr().err == "octavo: error: out of memory\n"


def test_version_and_module():
    done = subprocess.run([sys.executable, "-m", "octavo", "--version"], capture_output=True)
    assert done.stdout.decode().strip() == f"octavo {octavo.__version__}"


@pytest.mark.parametrize("words", [["version"], ["--version"]])
def test_version(words, capsys):
    assert cli.main(words) == 0
    assert capsys.readouterr().out == f"octavo {octavo.__version__}\n"


@pytest.mark.parametrize("words", [[], ["serve"], ["bench"], ["bench", "tune"], ["help"]])
def test_help_is_the_help_of_a_command(words, capsys):
    assert cli.main([*words, "--help"]) == 0
    expected = capsys.readouterr().out
    assert cli.main(["help", *words]) == 0
    assert capsys.readouterr().out == expected
    assert cli.main(["help", "serv"]) == 2
    assert "there is no command 'serv'; did you mean serve?" in capsys.readouterr().err


def test_the_command_line_is_light():
    code = "import sys, octavo.cli; octavo.cli.build_parser(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {"torch", "fastapi", "pydantic", "httpx", "uvicorn", "rich", "transformers"}


COMMANDS = "serve", "run", "chat", "complete", "list", "pull", "run-batch", "collect-env", "bench"
COMMANDS += "completion", "version", "help"
BENCHMARKS = "latency", "throughput", "serve", "startup", "sweep", "tune"
PAGES = [[], *([name] for name in COMMANDS), *(["bench", name] for name in BENCHMARKS)]


@pytest.mark.parametrize("words", PAGES, ids=" ".join)
def test_a_help_page_fits_80_columns_and_has_examples(words, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main([*words, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith(" ".join(["usage: octavo", *words]))
    assert lines[2].endswith(".")  # a description, before any flag
    page = "\n".join(lines)
    if "flags" in lines[0] or not words:
        examples = page.partition("\nexample")[2]
        assert " ".join(["  octavo", *words]) in examples


def test_examples_of_the_help_pages_have_flags_that_there_are():
    for words in PAGES:
        parser = cli.build_parser(words)
        for word in words:
            (commands,) = parser._subparsers._group_actions
            parser = commands.choices[word]
        for line in (parser.epilog or "").splitlines():
            if line.startswith(" ".join(["  octavo", *words])):
                for flag in re.findall(r" (--[a-z-]+)", line.partition("'")[0]):
                    assert flag in [*parser._option_string_actions, "--help"], line


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("serv", "there is no command 'serv'; did you mean serve? (see octavo --help)"),
        ("bench lat", "there is no benchmark 'lat'; did you mean latency? (see octavo bench"),
        ("serve --dtype foo", "--dtype 'foo' is not allowed; choose one of auto, float32,"),
        ("serve -q int7", "--quantization 'int7' is not allowed; did you mean int8?"),
        ("serve --block-size 5", "--block-size 5 is not allowed; choose one of 8, 16,"),
        ("serve --port", "--port needs a value (see octavo serve --help)"),
        ("chat --temperature x", "--temperature 'x' is not a number (see octavo chat"),
        ("bench latency --n x", "--n 'x' is not a whole number (see octavo bench latency"),
        ("bench tune", "--slo is missing (see octavo bench tune --help)"),
        ("bench", "BENCHMARK is missing (see octavo bench --help)"),
    ],
)
def test_what_argparse_finds_is_said_in_our_words(capsys, argv, said):
    assert cli.main(argv.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"octavo: error: {said}")


def test_the_key_of_a_routers_servers_may_come_from_the_environment(monkeypatch):
    seen = []
    module = SimpleNamespace(run_router=lambda server, router, flags: seen.append(router) or 0)
    monkeypatch.setitem(sys.modules, "octavo.router.run", module)
    monkeypatch.setenv("OCTAVO_SERVER_API_KEY", "from-env")
    words = ["router", "--servers", "http://a:1"]
    assert cli.main(words) == 0
    assert cli.main([*words, "--server-api-key", "from-flag"]) == 0
    assert [router.server_api_key for router in seen] == ["from-env", "from-flag"]
