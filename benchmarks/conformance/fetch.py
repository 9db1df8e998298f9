"""vLLM's tests, from its source distribution."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

VERSION = "0.33.0"

# Packages that the tests import and a development environment of Octavo lacks.
PACKAGES = (
    "pytest-asyncio",
    "requests",
    "aiohttp",
    "pybase64",
    "anthropic",
    "soundfile",
)

# pip queries the metadata of a source distribution, even for a download, and vLLM's build would
# need another PyTorch for that. This replaces the build.
_BACKEND = f"""
from pathlib import Path

def prepare_metadata_for_build_wheel(folder, config_settings=None):
    info = Path(folder, "vllm-{VERSION}.dist-info")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: vllm\\nVersion: {VERSION}\\n")
    return info.name
"""


def fetch_sdist(folder: Path) -> Path:
    """Download the source distribution into `folder`, if it is missing; return its file.

    Raises:
        subprocess.CalledProcessError: pip failed; its output contains the cause.
    """
    sdist = folder / f"vllm-{VERSION}.tar.gz"
    if not sdist.exists():
        package = folder / "backend" / "setuptools"
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").touch()
        (package / "build_meta.py").write_text(_BACKEND)
        words = ["download", "--no-deps", "--no-build-isolation", "--no-binary", "vllm", "--dest"]
        _pip([*words, str(folder), f"vllm=={VERSION}"], PYTHONPATH=str(package.parent))
    return sdist


def install_packages(folder: Path) -> None:
    """Install the packages that the tests import into `folder`, if they are missing."""
    done = folder / ".done"
    if not done.exists():
        _pip(["install", "--target", str(folder), *PACKAGES])
        done.touch()


def unpack_tests(sdist: Path, folder: Path) -> None:
    """Extract the tests from the source distribution, and the chat templates of its examples.

    The fixtures at their top and their server are omitted; `shim.py` replaces them.

    Raises:
        tarfile.TarError, OSError: the archive cannot be read.
    """
    with tarfile.open(sdist) as archive:
        for member in archive:
            member.name = member.name.partition("/")[2]
            left_out = member.name in ("tests/conftest.py", "tests/utils.py")
            template = re.fullmatch(r"examples/\w+\.jinja", member.name)
            if template or (member.name.startswith("tests/") and not left_out):
                archive.extract(member, folder, filter="data")


def _pip(words: list[str], **variables: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", *words]
    subprocess.run(command, check=True, env={**os.environ, **variables}, stdout=sys.stderr)
