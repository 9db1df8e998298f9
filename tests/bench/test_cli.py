"""`octavo bench`: its commands, their flags, and how they end."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from octavo import cli
from octavo.config import EngineConfig, config_fields
from octavo.config.arguments import setting_flags
from octavo.errors import BenchError

NAMES = ["latency", "throughput", "serve", "startup", "sweep", "tune"]


@pytest.fixture
def benchmark(monkeypatch):
    """Return a benchmark that replaces `sweep`."""
    fake = SimpleNamespace(seen=None, result={})

    def run(args):
        fake.seen = args
        if isinstance(fake.result, BaseException):
            raise fake.result
        return fake.result

    module = SimpleNamespace(add_arguments=lambda parser: parser.add_argument("--rates"), run=run)
    monkeypatch.setitem(sys.modules, "octavo.bench.sweep", module)
    return fake


def test_help_names_all_and_imports_none():
    code = (
        "import sys; from octavo import cli; status = cli.main(['bench', '--help']); "
        "print(*(m for m in sys.modules if m.startswith(('octavo.bench', 'torch', 'rich')))); "
        "sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *text, imported = done.stdout.splitlines()
    assert imported == ""
    for name in NAMES:
        assert any(line.split()[:1] == [name] for line in text)


def test_flags_reach_the_benchmark(benchmark):
    assert cli.main(["bench", "sweep", "--rates", "1,2"]) == 0
    assert vars(benchmark.seen) == {"rates": "1,2"}


def test_interrupted_is_130(benchmark):
    benchmark.result = {"interrupted": True}
    assert cli.main(["bench", "sweep"]) == 130
    benchmark.result = KeyboardInterrupt()
    assert cli.main(["bench", "sweep"]) == 130


def test_failures_are_one_line(benchmark, capsys):
    benchmark.result = BenchError("no server\nthere")
    assert cli.main(["bench", "sweep"]) == 1
    assert capsys.readouterr().err == "octavo: error: no server there\n"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["bench"], "BENCHMARK"),
        (["bench", "latenzy"], "latenzy"),
        (["bench", "sweep", "--rate", "1"], "did you mean --rates?"),
        (["bench", "latency", "--batchsize", "1"], "did you mean --batch-size?"),
        (["bench", "latency", "--dtype", "int3"], "--dtype"),
        (["bench", "latency", "--quantization", "int3"], "--quantization"),
        (["bench", "throughput", "--dataset-name", "shakespeare"], "--dataset-name"),
        (["bench", "latency", "--num-iters", "0"], "--num-iters 0"),
        (["bench", "throughput", "--dataset-name", "sonnet"], "--dataset-path"),
    ],
)
def test_wrong_usage_is_one_clear_line(benchmark, capsys, argv, said):
    assert cli.main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("octavo: error: ")
    assert said in line


@pytest.mark.parametrize("name", ["latency", "throughput", "startup"])
def test_all_engine_settings_are_flags(name, capsys):
    assert cli.main(["bench", name, "--help"]) == 0
    text = capsys.readouterr().out
    for field in config_fields(EngineConfig):
        assert field.flag in text


def test_engine_flags_say_the_settings():
    kwargs = {
        "model": "org/m",
        "max_model_len": -1,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "served_model_name": ["a", "b"],
        "quantization": None,
        "kv_cache_memory_bytes": "4G",
    }
    words = setting_flags(kwargs, config_fields())
    args = cli.build_parser().parse_args(["serve", *words])
    assert vars(args).pop("model") == [kwargs.pop("model")]  # there may be several
    assert cli.engine_kwargs(args) == {k: v for k, v in kwargs.items() if v is not None}


def test_from_command_line_to_file(tmp_path):
    path = tmp_path / "result.json"
    words = "--max_model_len 64 --kv-cache-memory-bytes 16M --input-len 4 --output-len 2"
    words += f" --num-iters 1 --num-iters-warmup 0 --max-num-seqs 8 --output-json {path}"
    assert cli.main(["bench", "latency", *words.split()]) == 0
    assert json.loads(path.read_text())["arguments"]["batch_size"] == 8
