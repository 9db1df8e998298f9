"""Manifests of deploy/: Octavo has the commands that they run."""

from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from octavo import cli
from octavo.config import EngineConfig, build_section, section_fields
from octavo.config.arguments import engine_kwargs, expand_dotted, given_settings
from octavo.router.config import RouterConfig

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
OBJECTS = [
    pytest.param(found, id=f"{found['kind']}-{found['metadata']['name']}")
    for path in sorted(FOLDER.glob("*.yaml"))
    for found in yaml.safe_load_all(path.read_text())
]
WORKLOADS = [p for p in OBJECTS if "template" in p.values[0]["spec"]]


@pytest.mark.parametrize("found", OBJECTS)
def test_manifests_are_what_kubernetes_knows(found):
    kubernetes_validate.validate(found, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("found", WORKLOADS)
def test_commands_are_understood(found):
    (container,) = found["spec"]["template"]["spec"]["containers"]
    program, command = container["command"]
    words = expand_dotted([command, *container["args"]])
    args = cli.build_parser(words).parse_args(words)
    assert program == "octavo"
    config = EngineConfig.from_kwargs(**engine_kwargs(args, args.model_arg))
    if command == "router":
        router = build_section(RouterConfig, given_settings(args, section_fields(RouterConfig)))
        router.check()
        names = {p.values[0]["metadata"]["name"]: p.values[0]["spec"] for p in WORKLOADS}
        for kind in ("prefill", "decode"):
            spec = names[f"octavo-{kind}"]
            assert getattr(router, f"{kind}_servers") == [
                f"http://octavo-{kind}-{i}.{spec['serviceName']}:8000"
                for i in range(spec["replicas"])
            ]
    else:
        role = {"octavo-prefill": "kv_producer", "octavo-decode": "kv_consumer"}
        assert config.cache.kv_transfer_config.kv_role == role[found["metadata"]["name"]]


@pytest.mark.parametrize("found", WORKLOADS)
def test_what_is_mounted_and_asked_for_is_there(found):
    spec = found["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
    assert mounted == {volume["name"] for volume in spec.get("volumes", [])}
    ports = {port["name"] for port in container["ports"]}
    probes = [v for k, v in container.items() if k.endswith("Probe")]
    assert {probe["httpGet"]["port"] for probe in probes} <= ports
    labels = found["spec"]["template"]["metadata"]["labels"]
    assert found["spec"]["selector"]["matchLabels"] == labels
