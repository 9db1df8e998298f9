"""Renderer of the output of `make demo` as docs/demo.svg, the picture in the README."""

import io
import subprocess
import sys
from pathlib import Path

from rich.console import Console

HERE = Path(__file__).parent


def main() -> None:
    """Run the demo and write the picture."""
    demo = subprocess.run(
        [sys.executable, HERE.parent / "examples" / "demo.py"],
        check=True,
        capture_output=True,
        text=True,
    )
    console = Console(record=True, width=100, file=io.StringIO())
    console.print("[bold green]$[/] make demo")
    console.print(demo.stdout.strip(), markup=False, highlight=False)
    console.save_svg(str(HERE / "demo.svg"), title="octavo")


if __name__ == "__main__":
    main()
