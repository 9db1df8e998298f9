"""examples/plugin, installed next to Octavo and used end to end."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.models.cases import CASES
from tests.models.harness import make_hf

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "examples" / "plugin"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder as pip installs it: the package, and its metadata."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(PACKAGE / "octavo_plugin", folder / "octavo_plugin")
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    info = folder / "octavo_plugin-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines: list[str] = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


def run(site: Path, code: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(site), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        check=False,
    )


def test_all_of_it_at_work(site: Path, tmp_path: Path) -> None:
    architecture, config = CASES["llama"]
    make_hf(architecture, **config).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps(fields | {"architectures": ["CappedLlamaForCausalLM"]}))
    done = run(
        site,
        f"""
from octavo import LLM, SamplingParams
llm = LLM({str(tmp_path)!r}, device="patient", skip_tokenizer_init=True, dtype="float32",
          max_model_len=64, max_num_seqs=2)
runner = llm._client.core.executor._worker.runner
params = [SamplingParams(max_tokens=20, ignore_eos=True, detokenize=False, seed=3, extra_args=args)
          for args in (None, {{"even_tokens": True}})]
outputs = llm.generate([{{"prompt_token_ids": [5, 6, 7]}}] * 2, params, use_tqdm=False)
print(runner.platform.name, type(runner.state.steps).__name__, runner.spec.head.soft_cap)
for output in outputs:
    print(len({{token % 2 for token in output.outputs[0].token_ids}}))
llm.shutdown()
""",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["patient", "EagerSteps", "30.0", "2", "1"]


def test_a_platform_says_what_there_is(site: Path) -> None:
    done = run(
        site,
        """
from octavo.errors import ConfigError
from octavo.platforms.registry import get_platform
print(get_platform("patient").server_batched_tokens, get_platform("auto").name != "patient")
try:
    get_platform("hasty")
except ConfigError as error:
    print(error)
""",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("128 True\ndevice='hasty' is unknown; choose auto, cpu, cuda, ")
    assert "patient" in done.stdout


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise ImportError('no driver')", "cannot be imported (ImportError: no driver)"),
        ("PatientPlatform = 5", "octavo_plugin.platform:PatientPlatform is not a subclass of"),
    ],
)
def test_a_platform_that_cannot_be_used_is_named(
    site: Path, tmp_path: Path, body: str, message: str
) -> None:
    shutil.copytree(site, tmp_path, dirs_exist_ok=True)
    (tmp_path / "octavo_plugin" / "platform.py").write_text(body)
    done = run(tmp_path, "from octavo import LLM; LLM(device='patient')")
    assert done.returncode != 0
    assert f"device=patient: {'its package ' if 'no driver' in message else ''}{message}" in (
        done.stderr
    )
