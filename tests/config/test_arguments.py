"""Flags as vLLM's users write them."""

import pytest

from octavo import cli
from octavo.config.arguments import expand_dotted, name_flags
from octavo.errors import ConfigError
from tests.served import stand_in


@pytest.fixture
def serve(monkeypatch):
    """Return a run of `octavo serve`: the config that it would serve, or the error's line."""

    def run(*words):
        seen = {}
        stand_in(monkeypatch, seen)
        lines = []
        monkeypatch.setattr(cli, "print_error", lines.append)
        status = cli.main(["serve", *words])
        assert (status == 0) == bool(seen)
        return seen.get("engine") or lines[0]

    return run


@pytest.mark.parametrize(
    "words",
    [
        ["-tp", "1", "-pp", "1", "-dp=1"],
        ["--tensor_parallel_size=1", "--aggregate-engine-logging"],
        ["-O0"],
        ["-O", "3", "-cc", "{}"],
        ["-O=2", "--no-enable-lora", "--no-disable_log_stats"],
        ["--cpu-offload-params", "a", "b", "--enable-log-deltas"],
        ["--limit-mm-per-prompt", "{}", "--hf-overrides", "{}"],
    ],
)
def test_what_asks_for_nothing_changes_nothing(serve, words):
    assert serve(*words) == serve()


def test_flags_of_llama_cpp(serve):
    assert serve("--no-mmproj").load.mmproj == "off"
    assert serve("--mmproj", "m.gguf").load.mmproj == "m.gguf"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-pcp", "2"], "--prefill-context-parallel-size='2' is not supported: "),
        (["--enable-tower-connector-lora"], "--enable-tower-connector-lora is not supported: "),
        (["-cc.mode=3"], "--compilation-config='{\"mode\": 3}' is not supported: "),
        (["--max-num-seqs", "1.5"], "'1.5' is not a whole number"),
        (["--port", "1", "--port", "1"], "--port is given twice"),
        (["-tp", "1", "--tensor-parallel-size", "1"], "--tensor-parallel-size is given twice"),
        (["--enforce-eager", "--no-enforce-eager"], "--enforce-eager is given twice"),
        (["-sc", '{"method": "ngram"}', "-sc.method", "ngram"], "--speculative-config is given"),
        (["--mmproj", "m.gguf", "--no-mmproj"], "--no-mmproj is given twice"),
        (["--frobnicate"], "unknown flag --frobnicate (see octavo serve --help)"),
        (["--max-model-len", "4X"], "4k (4,000)"),
    ],
)
def test_what_asks_for_more_is_one_line(serve, words, said):
    line = serve(*words)
    assert said in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("4096", 4096),
        ("4k", 4000),
        ("32K", 32768),
        ("25.6k", 25600),
        ("auto", -1),
        ("-1", -1),
        ("1.5m", 1_500_000),
    ],
)
def test_lengths(serve, text, length):
    assert serve("--max-model-len", text).model.max_model_len == length


def test_names_of_values(serve):
    assert serve("--dtype", "half").model.dtype == "float16"
    assert serve("--dtype", "float").model.dtype == "float32"
    assert serve("--attention-backend", "TRITON_ATTN").device.attention_backend == "triton"
    assert serve("--device-memory-utilization", "0.5").cache.gpu_memory_utilization == 0.5
    assert serve("-q", "int8").model.quantization == "int8"


@pytest.mark.parametrize(
    "words",
    [
        ["--speculative-config.method", "ngram", "--speculative-config.num_speculative_tokens=3"],
        ["--speculative_config.method=ngram", "--speculative_config.num_speculative_tokens", "3"],
        ["-sc.method", "ngram", "-sc.num_speculative_tokens", "3"],
        ["--spec-method", "ngram", "--spec-tokens", "3"],
        ["-sc", '{"method": "ngram", "num_speculative_tokens": 3}'],
    ],
)
def test_a_setting_with_parts(serve, words):
    config = serve(*words).speculation.speculative_config
    assert (config.method, config.num_speculative_tokens) == ("ngram", 3)


@pytest.mark.parametrize(
    ("words", "expanded"),
    [
        (["a", "--b.c", "1"], ["a", "--b", '{"c": 1}']),
        (["--b.c.d", "x", "--b.c.e=true", "f"], ["--b", '{"c": {"d": "x", "e": true}}', "f"]),
        (["--b.c+", "x", "--b.c+=y,2"], ["--b", '{"c": ["x", "y", 2]}']),
        (["--b.c", '{"d": [1]}'], ["--b", '{"c": {"d": [1]}}']),
        (["--", "--b.c", "1"], ["--", "--b.c", "1"]),
        (["--url=http://a.b", "1.5", "-1.5", "a.b"], ["--url=http://a.b", "1.5", "-1.5", "a.b"]),
    ],
)
def test_dotted_flags(words, expanded):
    assert expand_dotted(words) == expanded


@pytest.mark.parametrize(
    "words",
    [
        ["--b.c"],
        ["--b.c", "1", "--b.c", "1"],
        ["--b.c", "1", "--b.c.d", "1"],
        ["--b.c", "1", "--b.c+", "1"],
    ],
)
def test_dotted_flags_that_contradict(words):
    with pytest.raises(ConfigError, match=r"--b\.c"):
        expand_dotted(words)


def test_the_environment_comes_before_flags(serve, monkeypatch, capsys):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "1")
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")
    assert serve().cache.kv_cache_memory_bytes == 2**30
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("octavo: warning: ")
    assert line.endswith(": VLLM_USE_DEEP_GEMM")
    assert serve("--kv-cache-memory-bytes", "4M").cache.kv_cache_memory_bytes == 4 * 2**20
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "much")
    assert "VLLM_CPU_KVCACHE_SPACE='much'" in serve()


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("max_model_len=0 leaves no room", "--max-model-len=0 leaves no room"),
        (
            "set enforce_eager=false, or enforce_eager=True",
            "set --no-enforce-eager, or --enforce-eager",
        ),
        (
            "seed=-1 is not a seed: the seed of this model",
            "--seed=-1 is not a seed: the seed of this model",
        ),
        ("headless: a node has no server", "--headless: a node has no server"),
        ("needs a model: dtype and seed", "needs a model: dtype and seed"),
        ("hf_overrides={}", "--hf-overrides={}"),
        ("/a/max_model_len/b 'max_model_len' x.max_model_len", None),
        ("VLLM_max_model_len --max-model-len no_such_setting=5", None),
        ("speculative_config.method='x'", "--speculative-config.method='x'"),
    ],
)
def test_names_of_settings_become_flags(message, shown):
    (commands,) = cli.build_parser()._subparsers._group_actions
    assert name_flags(message, commands.choices["serve"]) == (shown or message)
