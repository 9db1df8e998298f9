"""Process that `octavo bench startup` starts and times; it imports nothing else of octavo.bench.

`python -m octavo.bench.start_child JSON` with the arguments for `LLM` prints one JSON line. Times
are seconds of `time.monotonic`, which is the same in every process.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path


def resident_nbytes(pid: int | str) -> dict[str, int]:
    """Return the memory of a process in bytes: rss and pss, as far as the system reports them."""
    sizes: dict[str, int] = {}
    for name, path, field in (("rss", "status", "VmRSS:"), ("pss", "smaps_rollup", "Pss:")):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/{path}").read_text().splitlines():
                if line.startswith(field):
                    sizes[name] = int(line.split()[1]) * 1024
    return sizes


def main() -> None:
    """Import, load, generate one token, and print the time of each."""
    kwargs = json.loads(sys.argv[1])
    from octavo import LLM, SamplingParams

    imported = time.monotonic()
    with LLM(**kwargs) as llm:
        ready = time.monotonic()
        memory = resident_nbytes("self")
        params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
        next(llm.stream([0] * 8, params))
        first_token = time.monotonic()
        report = {
            "import": imported,
            "ready": ready,
            "first_token": first_token,
            **memory,
            "plan": llm.memory_plan.total,
            "plan_but_kv_cache": llm.memory_plan.total - llm.memory_plan.kv_cache,
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
