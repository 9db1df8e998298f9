"""Compare Octavo with its peers: same requests and weights, in turn, on this machine.

    python benchmarks/compare.py install --into FOLDER
    python benchmarks/compare.py run --models FOLDER/models --out results.json
    python benchmarks/compare.py report results.json

`install` installs each peer in a separate environment under FOLDER, makes missing models (random
weights, real shapes), and converts them as the peers need them. `run` measures the engines one
after the other, each turn in a fresh process, and repeats this (`--repeats`); the machine's own
limits are measured in between. Every measurement is written to the results file at once; `--resume`
continues after an interruption. `report` prints the tables and writes them to docs/performance.md.

With `run --before PYTHON`, the interpreter of an environment with another build of Octavo (a
checkout of the commit that a change began from), that build is measured in turn with this one:

    python benchmarks/compare.py run --models FOLDER/models --out results.json \\
        --engines octavo --before OTHER/.venv/bin/python --workloads W1,W3,W7

Workloads: W1 latency, W1q latency with int8 and int4 weights, W1c quantized checkpoints, W2
offline throughput, W3 serving, W4 shared prefix, W5 prefill, W6 start and memory, W7 toy model (the
engine's own costs), W8 speculative decoding.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers import report
from peers.base import Case, Peer
from peers.cases import WORKLOADS, Group, ModelSize, groups
from peers.installing import CompareError, read_marker
from peers.machine import describe
from peers.models import make_models
from peers.octavo import Before, Octavo
from peers.results import Results, load
from peers.runner import Runner

ROOT = Path(__file__).resolve().parent.parent
ENGINES = ("octavo", "vllm", "openvino", "llama", "transformers")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status: 0, 1 (failed), 130 (interrupted)."""
    args = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, interrupt)
    try:
        return int(args.command(args))
    except CompareError as error:
        print(f"compare: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("compare: interrupted; continue with `run --resume`", file=sys.stderr)
        return 130


def interrupt(number: int, frame: Any) -> None:
    """End the program on a signal as Ctrl-C does."""
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    install = commands.add_parser("install", help="install peers, make and convert models")
    install.add_argument("--peers", type=names, default=list(ENGINES[1:]), metavar="A,B")
    install.add_argument("--into", type=Path, required=True, metavar="FOLDER")
    install.add_argument("--again", action="store_true", help="reinstall peers that are installed")
    install.set_defaults(command=_install)

    run = commands.add_parser("run", help="measure all engines")
    run.add_argument("--workloads", type=names, default=list(WORKLOADS), metavar="W1,W2")
    run.add_argument("--engines", type=names, default=list(ENGINES[:4]), metavar="A,B")
    run.add_argument(
        "--before",
        metavar="PYTHON",
        help="interpreter of another build of Octavo to measure as well",
    )
    run.add_argument("--repeats", type=int, default=3, metavar="N")
    run.add_argument("--models", type=Path, required=True, metavar="FOLDER")
    run.add_argument(
        "--peers", type=Path, metavar="FOLDER", help="folder of the peers [the parent of --models]"
    )
    run.add_argument("--out", type=Path, required=True, metavar="FILE")
    run.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "workloads")
    run.add_argument("--quick", action="store_true", help="few, short requests, to test drivers")
    run.add_argument("--skip-missing", action="store_true", help="leave out missing peers")
    run.add_argument("--resume", action="store_true", help="continue the results file")
    run.add_argument(
        "--silence",
        type=float,
        default=900.0,
        metavar="S",
        help="seconds without progress until an engine fails",
    )
    run.set_defaults(command=_run)

    show = commands.add_parser("report", help="print the tables, write docs/performance.md")
    show.add_argument("results", type=Path)
    show.add_argument("--into", type=Path, default=ROOT / "docs" / "performance.md")
    show.add_argument("--print-only", action="store_true")
    show.set_defaults(command=_report)
    return parser


def names(text: str) -> list[str]:
    """Return the names in `A,B`, each once."""
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise argparse.ArgumentTypeError("name at least one")
    return list(dict.fromkeys(found))


def peer_named(name: str) -> Peer:
    """Return the driver of an engine.

    Raises:
        CompareError: no engine has this name.
    """
    if name not in ENGINES:
        raise CompareError(f"There is no engine {name!r}; choose from {','.join(ENGINES)}.")
    peer: Peer = importlib.import_module(f"peers.{name}").PEER
    return peer


def _install(args: argparse.Namespace) -> int:
    peers = [peer_named(name) for name in args.peers]
    args.into.mkdir(parents=True, exist_ok=True)
    root = args.into.resolve()
    make_models(root / "models")
    failed = False
    for peer in peers:
        if read_marker(root / peer.name) is not None and not args.again:
            print(f"{peer.title}: installed already")
            continue
        print(f"{peer.title}: installing (progress in {root / peer.name / 'install.log'})")
        try:
            peer.install(root, root / "models")
        except CompareError as error:
            print(f"compare: error: {peer.title}: {error}", file=sys.stderr)
            failed = True
    return int(failed)


def _run(args: argparse.Namespace) -> int:
    if args.repeats < 1:
        raise CompareError(f"--repeats {args.repeats} measures nothing; use 1 or more.")
    models = args.models.resolve()
    root = (args.peers or models.parent).resolve()
    peers = {name: peer_named(name) for name in args.engines}
    if args.before is not None:
        peers["before"] = Before(args.before)
    wanted = groups(args.workloads, args.data, quick=args.quick)
    sizes = {group.model: ModelSize.of(models / group.model) for group in wanted}

    versions: dict[str, Any] = {}
    absent: list[str] = []
    for name in peers:
        if isinstance(peers[name], Octavo):
            note = octavo_version(peers[name].python(root))
        else:
            note = read_marker(root / name)
        if note is None:
            if not args.skip_missing:
                raise CompareError(
                    f"{name} is not installed in {root / name}; run `compare.py install --peers "
                    f"{name} --into {root}`, or leave it out with --skip-missing."
                )
            absent.append(name)
        else:
            versions[name] = note
    settings = {
        "quick": args.quick,
        "models": {name: vars(size) for name, size in sizes.items()},
        "cases": {case.name: note_of(group, case) for group in wanted for case in group.cases},
    }
    results = Results(args.out, settings, resume=args.resume)
    results.describe(describe(), versions)
    results.save()
    for name in absent:
        print(f"{name}: not installed, left out", file=sys.stderr)
        for group in wanted:
            for case in group.cases:
                results.add_absence(name, case.name, "not installed")

    logs = args.out.with_name(args.out.name + ".logs").resolve()
    logs.mkdir(exist_ok=True)
    present = {name: peer for name, peer in peers.items() if name not in absent}
    runner = Runner(present, root, models, results, logs, quick=args.quick, silence=args.silence)
    runner.run(wanted, args.repeats)
    print(report.tables(results.data))
    return int(bool(results.data["failures"]))


def octavo_version(interpreter: str = sys.executable) -> dict[str, Any]:
    """Return version and last change of the Octavo that an interpreter imports.

    Raises:
        CompareError: the interpreter cannot import Octavo.
    """
    code = (
        "import importlib.metadata as m, octavo;"
        " torch = [d.version for d in m.distributions(name='torch')];"
        " print(octavo.__file__, octavo.__version__, *torch)"
    )
    try:
        done = subprocess.run(
            [interpreter, "-c", code], capture_output=True, text=True, check=True, cwd="/"
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompareError(f"{interpreter} has no Octavo to measure: {error}.") from None
    file, number, *torch = done.stdout.split()

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(file).parent.parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    commit = git("log", "-1", "--format=%h", "--abbrev=12", "--", "octavo", "csrc")
    changed = " with changes" if git("status", "--porcelain", "octavo", "csrc") else ""
    version = f"octavo {number}" + (f" ({commit}{changed})" if commit else "")
    return {"version": version, "versions": dict(zip(["torch"], torch, strict=False))}


def note_of(group: Group, case: Case) -> dict[str, Any]:
    """Return the facts about a case for the report, and a short hash of its requests."""
    return {
        "kind": case.kind,
        "group": group.name,
        "model": group.model,
        "weights": group.weights,
        "batch": len(case.rows),
        "requests": hashlib.sha256(repr(case.rows).encode()).hexdigest()[:16],
    }


def _report(args: argparse.Namespace) -> int:
    text = report.tables(load(args.results))
    print(text)
    if not args.print_only:
        report.write(text, args.into)
    return 0


if __name__ == "__main__":
    sys.exit(main())
