"""Status of `python -m octavo`."""

import subprocess
import sys
from pathlib import Path

INTERRUPTED = """
import sys
import octavo.__main__, octavo.cli

def run():
    try:
        exec("import signal; signal.raise_signal(signal.SIGINT)")
    except KeyboardInterrupt:
        return 130

octavo.cli.main = run
sys.exit(octavo.__main__.main())
"""


def test_status_after_ctrl_c_within_exec(tmp_path: Path) -> None:
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    command = [sys.executable, "-m", "interrupted"]
    assert subprocess.run(command, cwd=tmp_path, check=False).returncode == 130
