"""File of settings: `--config`."""

from types import SimpleNamespace

import pytest

from octavo import cli
from tests.served import stand_in


@pytest.fixture
def serve(monkeypatch, tmp_path):
    """Return a run of `octavo serve --config FILE`: the config to serve, or the error."""

    def run(content, *words):
        path = tmp_path / "settings.yaml"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        seen, lines = {}, []
        stand_in(monkeypatch, seen)
        monkeypatch.setattr(cli, "print_error", lines.append)
        status = cli.main(["serve", "--config", str(path), *words])
        assert (status == 0) == bool(seen)
        return SimpleNamespace(**seen) if seen else lines[0]

    return run


CONTENT = """
model: org/m
port: 12
max_model_len: 4k
enforce-eager: true
enable-prefix-caching: false
served-model-name: [a, b]
speculative-config:
  method: ngram
  num_speculative_tokens: 3
pipeline-parallel-size: 1
disable-log-stats: true
gpu-memory-utilization: 0.5
"""


def test_keys_are_settings(serve):
    served = serve(CONTENT)
    model = served.engine.model
    assert (model.model, model.max_model_len, model.enforce_eager) == ("org/m", 4000, True)
    assert model.served_model_name == ["a", "b"]
    assert served.server.port == 12
    assert served.engine.cache.enable_prefix_caching is False
    assert served.engine.cache.gpu_memory_utilization == 0.5
    assert served.engine.speculation.speculative_config.num_speculative_tokens == 3


def test_flags_win(serve):
    served = serve(CONTENT, "other/m", "--port", "13", "--no-enforce-eager", "-sc.method=suffix")
    assert served.server.port == 13
    assert served.engine.model.model == "other/m"
    assert served.engine.model.enforce_eager is False
    assert served.engine.speculation.speculative_config.method == "suffix"
    assert serve(CONTENT, "--model", "other/m").engine.model.model == "other/m"


def test_an_empty_file_says_nothing(serve):
    assert serve("").engine == serve("# nothing").engine


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("prot: 1", "settings.yaml: there is no setting called 'prot'; did you mean port?"),
        ("config: x", "no setting called 'config'"),
        ("port: 1\nport: 2", "settings.yaml: port appears twice"),
        ("max-model-len: 1\nmax_model_len: 2", "max_model_len repeats max-model-len"),
        ("port:", "settings.yaml: port has no value"),
        ("port: x", "settings.yaml: port: --port: 'x' is not a whole"),
        ("port: true", "settings.yaml: port=True"),
        ("enforce-eager: 1", "settings.yaml: enforce-eager=1"),
        ("dtype: int3", "settings.yaml: dtype: "),
        ("prefill-context-parallel-size: 2", "--prefill-context-parallel-size='2' is not"),
        ("- port", "has no keys"),
        ("port: [", "is not valid YAML"),
        (b"\xff\xfe\x00", "is not valid YAML"),
        ("[" * 5000, "is not valid YAML"),
        ("port: !!python/object/apply:os.system [exit]", "is not valid YAML"),
        ("? [a]\n: 1", "settings.yaml"),
        ("1: 2", "there is no setting called '1'"),
    ],
)
def test_what_is_wrong_is_one_line_with_file_and_key(serve, content, said):
    line = serve(content)
    assert isinstance(line, str)
    assert said in line
    assert "\n" not in line


def test_no_file(serve, tmp_path, capsys):
    line = serve("", "--config", "x")
    assert "--config is given twice" in line
    assert cli.main(["serve", "--config", str(tmp_path / "none.yaml")]) == 2
