"""Kernels for ARM: cross-compiled, and tested under emulation by kernels_test.cpp, since tests
in Python would need a Python for ARM. The build is kept in build/: only a change costs time."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "kernels_test-aarch64"
COMPILER = "aarch64-linux-gnu-g++"
TOOLS = {COMPILER: "g++-aarch64-linux-gnu", "qemu-aarch64": "qemu-user", "cmake": "cmake"}
"""Commands, and the Debian packages that have them."""

MISSING = [package for command, package in TOOLS.items() if shutil.which(command) is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
    pytest.mark.timeout(900),  # the first build takes most of it
]

VARIANTS = ["neon_bf16", "neon_dotprod", "neon"]
"""Variants, best first."""


def run(*command: str | Path) -> str:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def program() -> Path:
    settings = {
        "OCTAVO_KERNELS_TEST": "ON",
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_CXX_FLAGS_RELEASE": "-O1 -DNDEBUG",
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": "aarch64",
        "CMAKE_CXX_COMPILER": COMPILER,
        "CMAKE_EXE_LINKER_FLAGS": "-static",
    }
    defines = [f"-D{name}={value}" for name, value in settings.items()]
    run("cmake", "-S", ROOT, "-B", BUILD, *defines)
    run("cmake", "--build", BUILD, "--parallel", "2")
    return BUILD / "kernels_test"


# Processors with all of it, with dot products of bytes but not of bfloat16, and with neither: a
# missing instruction ends the program.
@pytest.mark.parametrize(
    ("cpu", "best"), [("max", "neon_bf16"), ("neoverse-n1", "neon_dotprod"), ("cortex-a72", "neon")]
)
def test_best_variant(program: Path, cpu: str, best: str) -> None:
    out = run("qemu-aarch64", "-cpu", cpu, program, best)
    assert out.split() == VARIANTS[VARIANTS.index(best) :]
