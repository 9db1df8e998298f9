"""Trial of the wheel of `make wheel`, as by a user. It is installed into an empty environment,
where nothing can be compiled, and generates; with qemu-user also on old processors.

    python tests/try_wheel.py dist
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
OLD_PROCESSORS = {"Nehalem": "portable", "Haswell": "avx2"}
"""Names of qemu's processors, and the kernels for each of them."""

GENERATE = """
import json
from octavo import LLM, SamplingParams, _native
llm = LLM("octavo/stories")
params = SamplingParams(temperature=0, max_tokens=16)
text = llm.generate("Once upon a time", params, use_tqdm=False)[0].outputs[0].text
print(json.dumps([_native.available_isas()[0], text]))
"""


def check_files(wheel: Path) -> None:
    """Check that the wheel has every file of the package, one native module, and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        packed = {
            entry.filename
            for entry in archive.infolist()
            if not entry.is_dir() and ".dist-info/" not in entry.filename
        }
    native = {name for name in packed if name.endswith(".so")}
    assert len(native) == 1, native
    tracked = subprocess.run(
        ["git", "ls-files", "octavo"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    differ = (packed - native) ^ set(tracked.stdout.splitlines())
    assert not differ, differ


def size_of(env: Path, suffix: str = "") -> float:
    """Return the size of an environment's packages in MB, without pip and setuptools."""
    (packages,) = env.glob("lib/python3*/site-packages")
    return sum(
        file.stat().st_size / 1e6
        for file in packages.rglob(f"*{suffix}")
        if file.is_file()
        and not file.relative_to(packages).parts[0].startswith(("pip", "setuptools", "pkg_res"))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("dist", type=Path, help="Folder with one wheel and one sdist.")
    args = parser.parse_args()
    (wheel,) = args.dist.resolve().glob("*.whl")
    (sdist,) = args.dist.resolve().glob("*.tar.gz")
    check_files(wheel)
    for file in (sdist, wheel):
        print(f"{file.name}: {file.stat().st_size / 2**20:.1f} MiB", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        env = Path(folder) / "env"
        venv.create(env, with_pip=True)
        python = env / "bin" / "python"
        # Only the environment's commands: no compiler, no cmake, no git.
        variables = {**os.environ, "PATH": str(env / "bin"), "HOME": folder}
        variables.pop("PYTHONPATH", None)

        def run(*command: str | Path) -> str:
            done = subprocess.run(
                command, cwd=folder, env=variables, capture_output=True, text=True, check=False
            )
            if done.returncode:
                sys.exit(f"{done.stdout}{done.stderr}\n{' '.join(map(str, command))} failed.")
            return done.stdout

        pip = (python, "-m", "pip", "--disable-pip-version-check")
        run(*pip, "install", "--quiet", "--only-binary", ":all:", wheel)
        print(f"site-packages: {size_of(env):.0f} MB without pip, ", end="")
        print(f"{size_of(env, '.pyc'):.0f} MB of it byte code", flush=True)
        installed = {line.split("==")[0] for line in run(*pip, "freeze").splitlines()}
        assert not installed & {"torch", "triton", "transformers", "xgrammar"}, installed
        words = ("run", "--raw", "Once upon a time", "--max-tokens", "20")
        story = run(env / "bin" / "octavo", *words)
        assert story.strip(), story
        isa, text = json.loads(run(python, "-c", GENERATE))
        assert text, text
        print(f"runs on this processor ({isa})", flush=True)
        qemu = shutil.which("qemu-x86_64")
        if qemu is None:
            print("not tried as an older processor: no qemu-x86_64 (Debian's qemu-user)")
            return
        for processor, expected in OLD_PROCESSORS.items():
            isa, text = json.loads(run(qemu, "-cpu", processor, python, "-c", GENERATE))
            assert (isa, bool(text)) == (expected, True), (processor, isa, text)
            print(f"runs on {processor} ({isa})", flush=True)


if __name__ == "__main__":
    main()
