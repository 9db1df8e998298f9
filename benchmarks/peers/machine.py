"""What the machine can do, measured: read bandwidth and bfloat16 matrix products; and what it is.

`python -m peers.machine CORES FOLDER` prints one JSON line: `bandwidth_gb_s`, the median over
repeated reads of several blocks of 256 MiB by one thread a core (C, compiled with the machine's own
instruction set); how fast a block is depends on where it lies, so they are allocated one by one and
all held, and `bandwidth_low_gb_s` and `bandwidth_high_gb_s` are the medians of the slowest and the
fastest block; and `peak_gflop_s`, a 2048 x 2048 x 2048 bfloat16 linear layer of torch, which is
oneDNN's.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from peers.installing import CompareError, need_tool

BENCHMARKS = Path(__file__).resolve().parent.parent
BLOCKS, READS, PRODUCTS, SIZE = 6, 9, 25, 2048
_SOURCE = r"""
#include <omp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef uint64_t vec __attribute__((vector_size(64)));
enum { STREAMS = 8, MOST_BLOCKS = 64 };
static const size_t BYTES = (size_t)256 << 20, CHUNK = (size_t)1 << 20;

static uint64_t read_chunk(const char* data) {
  const vec* p = (const vec*)data;
  vec sum[STREAMS] = {0};
  for (size_t j = 0; j < CHUNK / sizeof(vec); j += STREAMS)
    for (int k = 0; k < STREAMS; k++) {
      __builtin_prefetch((const char*)(p + j + k) + 4096);
      sum[k] ^= p[j + k];
    }
  uint64_t sink = 0;
  for (int k = 0; k < STREAMS; k++) sink ^= sum[k][0] ^ sum[k][7];
  return sink;
}

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  int threads = atoi(argv[1]), blocks = atoi(argv[2]), reads = atoi(argv[3]);
  char* data[MOST_BLOCKS];
  if (blocks > MOST_BLOCKS) return 2;
  omp_set_num_threads(threads);
  for (int i = 0; i < blocks; i++) {
    data[i] = aligned_alloc(2 << 20, BYTES);
    if (!data[i]) return 3;
    madvise(data[i], BYTES, MADV_HUGEPAGE);
#pragma omp parallel for
    for (size_t j = 0; j < BYTES; j += CHUNK) memset(data[i] + j, i + 1, CHUNK);
  }
  uint64_t sink = 0;
  for (int n = 0; n < reads; n++)
    for (int i = 0; i < blocks; i++) {
      double begin = omp_get_wtime();
#pragma omp parallel for schedule(dynamic) reduction(^ : sink)
      for (size_t j = 0; j < BYTES; j += CHUNK) sink ^= read_chunk(data[i] + j);
      printf("%d %.3f\n", i, BYTES / (omp_get_wtime() - begin) / 1e9);
    }
  return sink == 12345;
}
"""


def reader(folder: Path) -> Path:
    """The program that measures the read bandwidth, compiled where it is not there yet.

    Raises:
        CompareError: if there is no C compiler or it fails.
    """
    program = folder / "bandwidth"
    if not program.exists():
        source = folder / "bandwidth.c"
        source.write_text(_SOURCE)
        compiler = [need_tool("gcc"), "-O3", "-march=native", "-fopenmp"]
        command = [*compiler, str(source), "-o", str(program)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise CompareError(f"gcc failed on {source}: {done.stderr[-800:]}")
    return program


def bandwidth(threads: int, folder: Path) -> dict[str, float]:
    """Read bandwidth, GB/s: the median of all reads, of the slowest and of the fastest block.

    Raises:
        CompareError: if it cannot be measured.
    """
    command = [str(reader(folder)), str(threads), str(BLOCKS), str(READS)]
    return summary(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def summary(output: str) -> dict[str, float]:
    """The figures of the C program's lines `BLOCK GB/S`."""
    blocks: dict[str, list[float]] = {}
    for line in output.splitlines():
        block, speed = line.split()
        blocks.setdefault(block, []).append(float(speed))
    medians = [statistics.median(speeds) for speeds in blocks.values()]
    return {
        "bandwidth_gb_s": statistics.median(chain.from_iterable(blocks.values())),
        "bandwidth_low_gb_s": min(medians),
        "bandwidth_high_gb_s": max(medians),
    }


def peak(threads: int) -> float:
    """GFLOP/s of a bfloat16 linear layer: the median of some products."""
    import torch

    torch.set_num_threads(threads)
    x, w = (torch.randn(SIZE, SIZE).bfloat16() for _ in range(2))
    seconds = []
    with torch.inference_mode():
        for _ in range(PRODUCTS + 5):
            begin = time.perf_counter()
            torch.nn.functional.linear(x, w)
            seconds.append(time.perf_counter() - begin)
    return 2 * SIZE**3 / statistics.median(seconds[5:]) / 1e9


def measure(threads: int, folder: Path) -> dict[str, float]:
    """Both figures, measured in a process of its own; `folder` keeps the compiled program.

    Raises:
        CompareError: if that fails.
    """
    command = [sys.executable, "-m", "peers.machine", str(threads), str(folder)]
    done = subprocess.run(command, env=environment({}), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CompareError(f"The machine could not be measured: {done.stderr[-800:]}")
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that runs a module of this folder."""
    return {**os.environ, "PYTHONPATH": str(BENCHMARKS), **more}


def describe() -> dict[str, Any]:
    """Processor, cores, memory, system."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    first = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in info)}
    wanted = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")
    flags = first.get("flags", "").split()
    total = next(
        int(line.split()[1])
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal")
    )
    return {
        "processor": first.get("model name", platform.machine()),
        "family": first.get("cpu family", ""),
        "cores": len(os.sched_getaffinity(0)),
        "instructions": [flag for flag in wanted if flag in flags],
        "memory_gib": round(total / 2**20, 1),
        "system": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    cores, where = int(sys.argv[1]), Path(sys.argv[2])
    print(json.dumps({**bandwidth(cores, where), "peak_gflop_s": peak(cores)}))
