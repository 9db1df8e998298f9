"""Compare Octavo, limited to each instruction set, with llama.cpp built for the same one.

    python benchmarks/compare.py install --peers llama --into FOLDER
    python benchmarks/widths.py --models FOLDER/models --out widths.json

Measures, with the code of compare.py: W1 latency at batch 1 and 8, W1q latency with int8 and int4
weights, W5 prefill of 2,048 tokens. Engines take turns, the two of an instruction set one after the
other. Missing kernels of llama.cpp for an instruction set are built first, which takes about two
minutes on two cores.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compare import ROOT, interrupt, names, note_of, octavo_version
from peers import report, workloads
from peers.base import Case, Peer
from peers.cases import SMALL, Group, ModelSize, shorten
from peers.installing import CompareError, read_marker
from peers.llama import Llama, make_model
from peers.machine import describe
from peers.octavo import Octavo
from peers.results import Results
from peers.runner import Runner

WEIGHTS = ("bf16", "int8", "int4")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status: 0, 1 (failed), 130 (interrupted)."""
    args = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, interrupt)
    try:
        return _run(args)
    except CompareError as error:
        print(f"widths: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("widths: interrupted; continue with --resume", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--models", type=Path, required=True, metavar="FOLDER")
    add("--peers", type=Path, metavar="FOLDER", help="folder of llama.cpp [the parent of --models]")
    add("--out", type=Path, required=True, metavar="FILE")
    add("--isas", type=names, metavar="A,B", help="instruction sets [all that this machine has]")
    add("--sizes", type=names, default=[SMALL], metavar="A,B", help=f"models [{SMALL}]")
    add("--repeats", type=int, default=3, metavar="N")
    add("--data", type=Path, default=ROOT.parent / "shared" / "data" / "workloads")
    add("--quick", action="store_true", help="few, short requests, to test drivers")
    add("--resume", action="store_true", help="continue the results file")
    add(
        "--silence",
        type=float,
        default=900.0,
        metavar="S",
        help="seconds without progress until an engine fails",
    )
    return parser


def _run(args: argparse.Namespace) -> int:
    from octavo.kernels.native import available_isas

    isas = args.isas or [isa for isa in available_isas() if isa != "amx_emulated"]
    for isa in isas:
        if isa not in available_isas():
            raise CompareError(f"This machine has no {isa}; it has {', '.join(available_isas())}.")
    models = args.models.resolve()
    root = (args.peers or models.parent).resolve()
    note = read_marker(root / "llama")
    if note is None:
        raise CompareError(
            f"llama.cpp is not installed in {root / 'llama'}; run `compare.py install --peers "
            f"llama --into {root}`."
        )
    wanted = [group for model in args.sizes for group in groups(model, args.data, args.quick)]
    sizes = {model: ModelSize.of(models / model) for model in args.sizes}
    peers: dict[str, Peer] = {}
    for isa in isas:
        llama = Llama(isa)
        llama.build_kernels(root)
        for peer in (Octavo(isa=isa), llama):
            peers[peer.name] = peer
    for group in wanted:
        make_model(root, models, group.model, group.weights, root / "llama" / "install.log")

    settings = {
        "quick": args.quick,
        "models": {name: vars(size) for name, size in sizes.items()},
        "cases": {case.name: note_of(group, case) for group in wanted for case in group.cases},
    }
    results = Results(args.out, settings, resume=args.resume)
    results.describe(describe(), {"octavo": octavo_version(), "llama": note})
    logs = args.out.with_name(args.out.name + ".logs").resolve()
    logs.mkdir(exist_ok=True)
    runner = Runner(peers, root, models, results, logs, quick=args.quick, silence=args.silence)
    runner.run(wanted, args.repeats)
    print(table(results.data, isas))
    return int(bool(results.data["failures"]))


def groups(model: str, data: Path, quick: bool) -> list[Group]:
    """Return the groups of a model: one for each weight format.

    Raises:
        CompareError: a workload is invalid or unknown.
    """

    def case(name: str, kind: str, file: str, iterations: int) -> Case:
        rows = workloads.read(file, data)
        if quick:
            rows, iterations = shorten(kind, rows), 1
        return Case(name, kind, file, iterations, rows=rows)

    found = []
    for weights in WEIGHTS:
        head = f"W1 {model}" if weights == "bf16" else f"W1q {model} {weights}"
        cases = [
            case(f"{head} batch {n}", "latency", f"w1_b{n}_{model}", times)
            for n, times in ((1, 5), (8, 3))
        ]
        if weights == "bf16":
            cases.append(case(f"W5 {model}", "prefill", f"w5_{model}", 3))
        found.append(Group(f"{model} {weights}", model, tuple(cases), weights=weights))
    return found


def table(data: dict[str, Any], isas: Sequence[str]) -> str:
    """Format a line for each case and instruction set, Markdown; above 1 Octavo is ahead."""
    lines = ["| | | Octavo | llama.cpp | |", "| --- | --- | --- | --- | --- |"]
    for case, note in data["settings"]["cases"].items():
        metric = report.METRICS[note["kind"]][0]
        for isa in isas:
            spreads = [
                report.Spread.of(report.values(data, f"{engine}-{isa}", case, metric.name))
                for engine in ("octavo", "llama")
            ]
            cells = ["failed" if s is None else s.show(metric.digits) for s in spreads]
            own, other = spreads
            factor = None
            if own is not None and other is not None:
                factor = report.advantage(own, other, less=metric.less)
            shown = "" if factor is None else f"{factor:.2f}x"
            lines.append(f"| {case}: {metric.label} | {isa} | {' | '.join(cells)} | {shown} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
