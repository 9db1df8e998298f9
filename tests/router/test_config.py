"""Settings of a router, and the flags of the servers that it starts."""

import json

import pytest

from octavo.config import EngineConfig, ServerConfig, build_section, section_fields
from octavo.errors import ConfigError
from octavo.router.config import PASSED_ON, REFUSED, SHARED, RouterConfig, own_server_settings
from octavo.router.server_flags import HOST, flags_of_kinds
from octavo.system.device import num_cpus

A, B = "http://a:8000", "http://b:8000"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "There is no server: give --servers"),
        ({"servers": [A], "prefill": 1}, "servers and replicas run whole requests"),
        ({"prefill": 1}, "There is no decode server"),
        ({"decode_servers": [A]}, "There is no prefill server"),
        ({"servers": ["a:8000"]}, "'a:8000' is not the address of a server"),
        ({"servers": ["ftp://a"]}, "is not the address"),
        ({"servers": ["http://a:99999"]}, "is not the address"),
        ({"servers": ["http://user@a"]}, "is not the address"),
        ({"servers": [f"{A}/v1"]}, "has a path"),
        ({"servers": [A, f"{A}/"]}, "named twice"),
        ({"prefill_servers": [A], "decode_servers": [A]}, "named twice"),
        ({"servers": [A], "backend": "ray"}, "backend='ray' is for servers that the router starts"),
        ({"replicas": 1, "max_replicas": 2}, "go together"),
        ({"servers": [A], "min_replicas": 1, "max_replicas": 2}, "for servers that --replicas"),
        ({"replicas": 3, "min_replicas": 1, "max_replicas": 2}, "starts with 3 servers"),
    ],
)
def test_settings_that_contradict(settings, message):
    with pytest.raises(ConfigError, match=message):
        build_section(RouterConfig, settings).check()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("servers", [1]),
        ("prefill_servers", {}),
        ("decode_servers", 1),
        ("replicas", -1),
        ("prefill", 5000),
        ("decode", "x"),
        ("backend", "slurm"),
        ("min_replicas", 0),
        ("max_replicas", 0),
        ("target_load", 0),
        ("server_api_key", 1),
        ("health_check_interval", 0),
        ("health_check_timeout", -1),
        ("failover_timeout", -1),
    ],
)
def test_a_wrong_value_is_named(name, value):
    with pytest.raises(ConfigError, match=name):
        build_section(RouterConfig, {name: value})


def test_each_setting_is_tested_above():
    marks = test_a_wrong_value_is_named.pytestmark[0].args[1]
    assert [name for name, _ in marks] == [f.name for f in section_fields(RouterConfig)]


@pytest.mark.parametrize(
    "settings",
    [
        {"servers": [A, B]},
        {"servers": [A], "replicas": 1},
        {"prefill_servers": [A], "decode": 2},
        {"replicas": 2, "min_replicas": 1, "max_replicas": 4},
    ],
)
def test_settings_that_agree(settings):
    build_section(RouterConfig, settings).check()


def test_settings_of_servers_are_either_shared_or_passed_on_or_refused():
    names = {f.name for f in section_fields(ServerConfig)}
    assert SHARED | PASSED_ON | REFUSED.keys() <= names
    given = {"port": 1, "strict_fields": True, "log_level": "debug"}
    assert own_server_settings(given) == {"strict_fields": True, "log_level": "debug"}
    secrets = {f.name for f in section_fields(ServerConfig) if f.secret}
    assert secrets <= SHARED | REFUSED.keys(), "no key stands on the command line of a server"
    for name in REFUSED:
        with pytest.raises(ConfigError, match=name):
            own_server_settings({name: 1})


def flags(router, engine=(), server=()):
    engine = dict(engine)
    config = EngineConfig.from_kwargs(**engine)
    made = build_section(RouterConfig, router)
    return flags_of_kinds(made, dict(server), engine, config)


def value(words, flag):
    return words[words.index(flag) + 1]


def test_servers_share_cores_and_memory():
    words = flags({"replicas": 2}, {"dtype": "bfloat16"}, {"strict_fields": True})["replica"]
    assert value(words, "--dtype") == "bfloat16"
    assert "--strict-fields" in words
    assert int(value(words, "--num-threads")) == max(1, num_cpus() // 2)
    whole = EngineConfig.from_kwargs().cache.gpu_memory_utilization
    assert float(value(words, "--gpu-memory-utilization")) == pytest.approx(whole / 2)
    words = flags({"replicas": 1, "min_replicas": 1, "max_replicas": 3}, {"num_threads": 1})
    assert float(value(words["replica"], "--gpu-memory-utilization")) == pytest.approx(whole / 3)
    assert value(words["replica"], "--num-threads") == "1"
    assert "--kv-transfer-config" not in words["replica"]


def test_prefill_servers_hand_over_and_decode_servers_fetch():
    words = flags({"prefill": 1, "decode": 1})
    configs = {k: json.loads(value(w, "--kv-transfer-config")) for k, w in words.items()}
    roles = {kind: (c["kv_connector"], c["kv_role"]) for kind, c in configs.items()}
    assert roles == {
        "prefill": ("P2PConnector", "kv_producer"),
        "decode": ("P2PConnector", "kv_consumer"),
    }
    given = {"kv_connector": "Mine", "kv_connector_module_path": "my.module"}
    words = flags({"prefill": 1, "decode_servers": [A]}, {"kv_transfer_config": given})
    assert list(words) == ["prefill"]
    config = json.loads(value(words["prefill"], "--kv-transfer-config"))
    assert (config["kv_connector"], config["kv_role"]) == ("Mine", "kv_producer")


def test_servers_on_ray():
    ray = {"backend": "ray"}
    for settings in ({}, {"num_threads": 2, "tensor_parallel_size": 2}):
        with pytest.raises(ConfigError, match="backend='ray' needs num_threads"):
            flags(ray | {"replicas": 1}, settings)
    words = flags(ray | {"replicas": 2}, {"num_threads": 2})["replica"]
    assert value(words, "--num-threads") == "2"
    assert "--gpu-memory-utilization" not in words
    with pytest.raises(ConfigError, match="need cluster_key_file"):
        flags(ray | {"prefill": 1, "decode": 1}, {"num_threads": 1})
    words = flags(ray | {"prefill": 1, "decode": 1}, {"num_threads": 1, "cluster_key_file": "/key"})
    config = json.loads(value(words["decode"], "--kv-transfer-config"))
    assert config["kv_connector_extra_config"]["host"] == HOST


def test_what_makes_no_sense_for_the_servers_there_are():
    with pytest.raises(ConfigError, match="dtype is for servers that the router starts"):
        flags({"servers": [A]}, {"dtype": "bfloat16"})
    with pytest.raises(ConfigError, match="strict_fields is for servers"):
        flags({"servers": [A]}, server={"strict_fields": True})
    assert flags({"servers": [A]}, server={"log_level": "debug"}) == {}, "it is the router's, too"
    events = {"kv_events_config": {"enable_kv_cache_events": True}}
    with pytest.raises(ConfigError, match="kv_events_config names one address"):
        flags({"replicas": 2}, events)
    assert flags({"replicas": 1}, events)
