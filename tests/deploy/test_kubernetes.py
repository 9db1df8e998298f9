"""Manifests of deploy/: Octavo has the commands that they run."""

import shutil
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from octavo import cli
from octavo.config import EngineConfig, build_section, section_fields
from octavo.config.arguments import engine_kwargs, expand_dotted, given_settings
from octavo.router.config import RouterConfig

FOLDER = Path(__file__).parents[2] / "deploy"
# kubectl contains kustomize.
BUILD = next(
    (
        [tool, *words]
        for tool, words in (("kustomize", ["build"]), ("kubectl", ["kustomize"]))
        if shutil.which(tool)
    ),
    None,
)
KUSTOMIZATIONS = [path.parent for path in sorted(FOLDER.rglob("kustomization.yaml"))]


def build(folder):
    done = subprocess.run([*BUILD, folder], capture_output=True, text=True, check=True)
    return list(yaml.safe_load_all(done.stdout))


def versions():
    """Return the objects of each version of the deployment, by its folder's name."""
    files = [
        path
        for path in sorted((FOLDER / "kubernetes").glob("*.yaml"))
        if path.stem != "kustomization"
    ]
    found = {"files": [o for path in files for o in yaml.safe_load_all(path.read_text())]}
    if BUILD is not None:
        found |= {folder.name: build(folder) for folder in KUSTOMIZATIONS}
    return found


VERSIONS = versions()
OBJECTS = [
    pytest.param(found, id=f"{version}-{found['kind']}-{found['metadata']['name']}")
    for version, objects in VERSIONS.items()
    for found in objects
]
WORKLOADS = [
    pytest.param(found, version, id=f"{version}-{found['metadata']['name']}")
    for version, objects in VERSIONS.items()
    for found in objects
    if "template" in found["spec"]
]


def test_kustomizations_name_what_there_is():
    """Also without kustomize: all files exist, and replicas and patches name objects."""
    names = {(found["kind"], found["metadata"]["name"]) for found in VERSIONS["files"]}
    assert {folder.name for folder in KUSTOMIZATIONS} == {"kubernetes", "example"}
    for folder in KUSTOMIZATIONS:
        content = yaml.safe_load((folder / "kustomization.yaml").read_text())
        for resource in content["resources"]:
            path = folder / resource
            assert path.is_file() or (path / "kustomization.yaml").is_file(), path
        assert {item["name"] for item in content.get("replicas", [])} <= {n for _, n in names}
        for patch in content.get("patches", []):
            target = patch["target"]
            assert any(
                kind == target["kind"] and target.get("name") in (None, name)
                for kind, name in names
            )
            assert all(step["path"].startswith("/spec/") for step in yaml.safe_load(patch["patch"]))


@pytest.mark.skipif(BUILD is None, reason="needs kustomize or kubectl")
def test_the_base_changes_nothing():
    def key(found):
        return found["kind"], found["metadata"]["name"]

    assert sorted(VERSIONS["kubernetes"], key=key) == sorted(VERSIONS["files"], key=key)


@pytest.mark.skipif(BUILD is None, reason="needs kustomize or kubectl")
def test_the_overlay():
    assert {o["metadata"]["namespace"] for o in VERSIONS["example"]} == {"llm"}
    found = {o["metadata"]["name"]: o for o in VERSIONS["example"] if "template" in o["spec"]}
    decode = found["octavo-decode"]["spec"]
    [container] = decode["template"]["spec"]["containers"]
    [copy] = decode["template"]["spec"]["initContainers"]
    assert container["image"] == copy["image"] == "registry.example.com/octavo:0.1.0"
    assert container["args"][0] == "Qwen/Qwen3-4B"
    assert [volume["metadata"]["name"] for volume in decode["volumeClaimTemplates"]] == ["models"]
    [router] = found["octavo-router"]["spec"]["template"]["spec"]["containers"]
    assert "octavo-decode-2" in router["args"][-1]


@pytest.mark.parametrize("found", OBJECTS)
def test_manifests_are_what_kubernetes_knows(found):
    kubernetes_validate.validate(found, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize(("found", "version"), WORKLOADS)
def test_commands_are_understood(found, version):
    (container,) = found["spec"]["template"]["spec"]["containers"]
    program, command = container["command"]
    words = expand_dotted([command, *container["args"]])
    args = cli.build_parser(words).parse_args(words)
    assert program == "octavo"
    config = EngineConfig.from_kwargs(**engine_kwargs(args, args.model_arg))
    if command == "router":
        router = build_section(RouterConfig, given_settings(args, section_fields(RouterConfig)))
        router.check()
        for kind in ("prefill", "decode"):
            spec = next(
                o["spec"]
                for o in VERSIONS[version]
                if (o["kind"], o["metadata"]["name"]) == ("StatefulSet", f"octavo-{kind}")
            )
            assert getattr(router, f"{kind}_servers") == [
                f"http://octavo-{kind}-{i}.{spec['serviceName']}:8000"
                for i in range(spec["replicas"])
            ]
    else:
        role = {"octavo-prefill": "kv_producer", "octavo-decode": "kv_consumer"}
        assert config.cache.kv_transfer_config.kv_role == role[found["metadata"]["name"]]


@pytest.mark.parametrize(("found", "version"), WORKLOADS)
def test_what_is_mounted_and_asked_for_is_there(found, version):
    spec = found["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    containers = [container, *spec.get("initContainers", [])]
    mounted = {mount["name"] for c in containers for mount in c.get("volumeMounts", [])}
    claims = found["spec"].get("volumeClaimTemplates", [])
    volumes = [volume["name"] for volume in spec.get("volumes", [])]
    volumes += [claim["metadata"]["name"] for claim in claims]
    assert sorted(mounted) == sorted(volumes)
    ports = {port["name"] for port in container["ports"]}
    probes = [v for k, v in container.items() if k.endswith("Probe")]
    assert {probe["httpGet"]["port"] for probe in probes} <= ports
    labels = found["spec"]["template"]["metadata"]["labels"]
    assert found["spec"]["selector"]["matchLabels"] == labels
