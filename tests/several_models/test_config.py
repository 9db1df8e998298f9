"""Settings of several models: the forms of --model, names, and settings for all or for one."""

import json

import pytest

from octavo.cli import main
from octavo.config import EngineConfig, ServerConfig, build_section, section_fields
from octavo.errors import ConfigError
from octavo.several_models import run as run_module
from octavo.several_models.config import SeveralModelsConfig, read_models, served_models
from octavo.system.device import num_cpus
from tests.served import stand_in


@pytest.mark.parametrize(("name", "value"), [("max_loaded_models", 0), ("model_load_timeout", 0)])
def test_a_wrong_value_is_named(name, value):
    with pytest.raises(ConfigError, match=name):
        build_section(SeveralModelsConfig, {name: value})


def test_each_setting_is_tested_above():
    marks = test_a_wrong_value_is_named.pytestmark[0].args[1]
    assert [name for name, _ in marks] == [f.name for f in section_fields(SeveralModelsConfig)]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["a", "org/b"], [{"model": "a"}, {"model": "org/b"}]),
        (
            ['{"path": "a", "name": "x", "max-model-len": 512}'],
            [{"model": "a", "served_model_name": ["x"], "max_model_len": 512}],
        ),
        (['{"model": "a", "name": ["x", "y"]}'], [{"model": "a", "served_model_name": ["x", "y"]}]),
        (['["a", {"path": "b"}]'], [{"model": "a"}, {"model": "b"}]),
    ],
)
def test_forms_of_models(given, expected):
    assert read_models(given) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{path: a}", "is not valid JSON"),
        ('{"name": "x"}', "has no path"),
        ('{"path": 5}', "has no path"),
        ('{"path": ""}', "has no path"),
        ("[5]", "model=5 is not a path"),
        ('{"path": "a", "model": "b"}', "has model twice"),
    ],
)
def test_malformed_models(given, message):
    with pytest.raises(ConfigError, match=message):
        read_models([given])


def made(*models, engine=None, server=None, environment=None, most=2):
    given = read_models([m if isinstance(m, str) else json.dumps(m) for m in models])
    return served_models(given, engine or {}, server or {}, environment or {}, most)


def test_settings_of_one_model_override_those_for_all():
    engine = {"max_model_len": 100, "dtype": "float32"}
    own = {"path": "b", "name": "e", "max_model_len": 50, "tool_call_parser": "hermes"}
    a, b = made("a", own, engine=engine, server={"log_level": "debug", "port": 1})
    assert (a.names, b.names) == (["a"], ["e"])
    assert (a.config.model.max_model_len, b.config.model.max_model_len) == (100, 50)
    assert b.config.model.dtype == "float32"
    flags = b.flags(2**20, warm_spare=False)
    for words in (
        ["--max-model-len", "50"],
        ["--model", "b"],
        ["--served-model-name", "e"],
        ["--kv-cache-memory-bytes", str(2**20)],
        ["--tool-call-parser", "hermes"],
        ["--log-level", "debug"],
        ["--num-threads", str(max(1, num_cpus() // 2))],
    ):
        assert words in [flags[i : i + 2] for i in range(len(flags))], words
    assert "--no-warm-spare" in flags
    assert "--port" not in flags
    assert "--no-enable-admin" in flags
    assert "--kv-cache-memory-bytes" not in a.flags(None, warm_spare=True)


def test_a_server_lets_the_front_load_adapters():
    (model,) = made({"path": "a", "enable_lora": True, "lora_root": "/adapters"})
    assert "--enable-admin" in model.flags(None, warm_spare=False)


def test_the_memory_of_requests_is_divided_among_loaded_models():
    a, b = made("a", {"path": "b", "request_memory_bytes": "8M"})
    assert a.request_memory == ServerConfig().request_memory_bytes // 2
    assert b.request_memory == 8 * 2**20


def test_variables_of_the_environment_count():
    a, _ = made("a", "b", environment={"kv_cache_memory_bytes": 5, "log_level": "debug"})
    assert a.config.cache.kv_cache_memory_bytes == 5


@pytest.mark.parametrize(
    ("models", "options", "message"),
    [
        (["a", "a"], {}, "Two models have the name 'a': a and a; give one another name"),
        ([{"path": "a", "name": "x"}, {"path": "b", "name": "x"}], {}, "Two models have the name"),
        ([{"path": "a", "name": ["x", "b"]}, "b"], {}, "Two models have the name 'b'"),
        ([{"path": "a", "name": ""}], {}, "a has an empty name"),
        ([{"path": "a", "max_len": 5}], {}, "a: There is no setting called 'max_len'"),
        ([{"path": "a", "dtype": "x"}], {}, "a: dtype='x' is not allowed"),
        ([{"path": "a", "port": 5}], {}, "port cannot be a setting of one model; give it as a"),
        ([{"path": "a", "gpu_memory_utilization": 0.5}], {}, "it limits all models together"),
        ([{"path": "a", "numa_node": 0}], {}, "numa_node cannot be a setting of one model"),
        ([{"path": "a", "record": "f"}], {}, "record cannot be given with several models"),
        (["a"], {"server": {"state_dir": "d"}}, "state_dir cannot be given with several models"),
        (["a", "b"], {"engine": {"enable_lora": True, "lora_modules": ["x=y"]}}, "the name 'x'"),
        (["a"], {"server": {"headless": True}}, "a node serves one model"),
        (["a"], {"engine": {"served_model_name": ["x"]}}, "would name all models alike"),
        (
            ["a"],
            {"engine": {"kv_events_config": {"enable_kv_cache_events": True}}},
            "each model needs its own",
        ),
    ],
)
def test_settings_that_several_models_cannot_have(models, options, message):
    with pytest.raises(ConfigError, match=message):
        made(*models, **options)


def test_names_may_have_any_characters():
    odd = 'a "b"\n{c}/ü%20'
    (model,) = made({"path": "a", "name": odd})
    assert model.names == [odd]


# The command line


def serve(monkeypatch, *words):
    """Return what `octavo serve` would run: settings of one model, or of several."""
    seen = {}
    stand_in(monkeypatch, seen)

    def run_models(config, several, served, common):
        seen.update(config=config, several=several, served=served, common=common)
        return 0

    monkeypatch.setattr(run_module, "run_models", run_models)
    status = main(["serve", *words])
    return status, seen


@pytest.mark.parametrize(
    "words", [["a"], ["--model", "a"], ["a", "--model", "a"], ["--model", '{"path": "a"}']]
)
def test_one_model(monkeypatch, words):
    status, seen = serve(monkeypatch, *words, "--max-model-len", "99")
    assert status == 0
    assert seen["engine"] == EngineConfig.from_kwargs(model="a", max_model_len=99)


def test_one_model_with_settings_of_its_own(monkeypatch):
    own = '{"path": "a", "name": "x", "max_model_len": 5, "response_role": "r"}'
    _, seen = serve(monkeypatch, "--model", own, "--max-model-len", "99")
    assert seen["engine"].model.served_model_name == ["x"]
    assert seen["engine"].model.max_model_len == 5
    assert seen["server"].response_role == "r"


@pytest.mark.parametrize("words", [["a", "--model", "b"], ["--model", "a", "--model", "b"]])
def test_several_models(monkeypatch, words):
    flags = ["--max-loaded-models", "1", "--port", "5", "--dtype", "float32"]
    status, seen = serve(monkeypatch, *words, *flags)
    assert status == 0
    assert [model.path for model in seen["served"]] == ["a", "b"]
    assert all(model.config.model.dtype == "float32" for model in seen["served"])
    assert (seen["several"].max_loaded_models, seen["config"].port) == (1, 5)
    threads = seen["served"][0].engine["num_threads"]
    assert threads == num_cpus()  # one model at a time has all cores


def test_several_models_of_a_file(monkeypatch, tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("model:\n- a\n- path: b\n  name: x\n  max-model-len: 7\n")
    _, seen = serve(monkeypatch, "--config", str(file))
    assert [model.names for model in seen["served"]] == [["a"], ["x"]]
    assert seen["served"][1].config.model.max_model_len == 7


def test_wrong_command_lines(monkeypatch, capsys):
    for words, message in (
        (["a", "--max-loaded-models", "1"], "are for several models"),
        (["--model", '{"path": "a", "max_len": 1}'], "no setting called 'max_len'"),
        (["a", "--model", "b", "--served-model-name", "x"], "--served-model-name would name all"),
        (["a", "--model", "b", "--state-dir", "x"], "--state-dir cannot be given with several"),
    ):
        status, _ = serve(monkeypatch, *words)
        assert status == 2
        assert message in capsys.readouterr().err
