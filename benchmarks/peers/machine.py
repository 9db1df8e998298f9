"""Measured limits of the machine, read bandwidth and bfloat16 matrix products; and its description.

`python -m peers.machine CORES FOLDER` prints one JSON line. `bandwidth_gb_s` is the median over
repeated reads of several blocks of 256 MiB by one thread per core (C, compiled for the machine's
own instruction set), by the best of several prefetch methods, `bandwidth_by`. The speed of a block
depends on its location, so blocks are allocated one by one and all held; `bandwidth_low_gb_s` and
`bandwidth_high_gb_s` are the medians of the slowest and the fastest block. `peak_gflop_s` is a 2048
x 2048 x 2048 bfloat16 product, the better of torch's, which is oneDNN's, and Octavo's: `peak_by`.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from peers.base import best_reads
from peers.installing import CompareError, need_tool

BENCHMARKS = Path(__file__).resolve().parent.parent
BLOCKS, READS = 6, 9
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

#define READ(name, fetch)                                            \
  static uint64_t name(const char* data) {                           \
    vec sum[STREAMS] = {0};                                          \
    for (const char* at = data; at < data + CHUNK;)                  \
      for (int k = 0; k < STREAMS; k++, at += sizeof(vec)) {         \
        fetch;                                                       \
        sum[k] ^= *(const vec*)at;                                   \
      }                                                              \
    uint64_t sink = 0;                                               \
    for (int k = 0; k < STREAMS; k++) sink ^= sum[k][0] ^ sum[k][7]; \
    return sink;                                                     \
  }
READ(plain, )
READ(nta, __builtin_prefetch(at + 2048, 0, 0))
READ(t2, __builtin_prefetch(at + 4096, 0, 1))
READ(t1, __builtin_prefetch(at + 4096, 0, 2))
READ(t0, __builtin_prefetch(at + 4096, 0, 3))
static const struct {
  const char* name;
  uint64_t (*read)(const char*);
} WAYS[] = {{"plain", plain}, {"nta", nta}, {"t2", t2}, {"t1", t1}, {"t0", t0}};

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
    for (int i = 0; i < blocks; i++)
      for (int k = 0; k < sizeof WAYS / sizeof *WAYS; k++) {
        double begin = omp_get_wtime();
#pragma omp parallel for schedule(dynamic) reduction(^ : sink)
        for (size_t j = 0; j < BYTES; j += CHUNK) sink ^= WAYS[k].read(data[i] + j);
        printf("%s %d %.3f\n", WAYS[k].name, i, BYTES / (omp_get_wtime() - begin) / 1e9);
      }
  return sink == 12345;
}
"""


def reader(folder: Path) -> Path:
    """Return the program that measures the read bandwidth, compiled if missing.

    Raises:
        CompareError: there is no C compiler or it fails.
    """
    program, source = folder / "bandwidth", folder / "bandwidth.c"
    if not program.exists() or source.read_text() != _SOURCE:
        source.write_text(_SOURCE)
        compiler = [need_tool("gcc"), "-O3", "-march=native", "-fopenmp"]
        command = [*compiler, str(source), "-o", str(program)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise CompareError(f"gcc failed on {source}: {done.stderr[-800:]}")
    return program


def bandwidth(threads: int, folder: Path) -> dict[str, Any]:
    """Return the read bandwidth in GB/s: median of all reads, of the slowest and fastest block.

    Raises:
        CompareError: the bandwidth cannot be measured.
    """
    command = [str(reader(folder)), str(threads), str(BLOCKS), str(READS)]
    return summary(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def summary(output: str) -> dict[str, Any]:
    """Return the figures of the C program's output: those of the best method."""
    way, blocks = best_reads(output)
    medians = [statistics.median(speeds) for speeds in blocks.values()]
    return {
        "bandwidth_gb_s": statistics.median(chain.from_iterable(blocks.values())),
        "bandwidth_low_gb_s": min(medians),
        "bandwidth_high_gb_s": max(medians),
        "bandwidth_by": way,
    }


def peak(threads: int) -> dict[str, Any]:
    """Return GFLOP/s of a bfloat16 product, and its implementation."""
    from octavo.bench.machine import measure_peak
    from octavo.kernels.native import set_num_threads

    set_num_threads(threads)
    flops, by = measure_peak("bfloat16")
    return {"peak_gflop_s": flops / 1e9, "peak_by": by}


def measure(threads: int, folder: Path) -> dict[str, Any]:
    """Measure both figures in a separate process; `folder` keeps the compiled program.

    Raises:
        CompareError: the measurement failed.
    """
    command = [sys.executable, "-m", "peers.machine", str(threads), str(folder)]
    done = subprocess.run(command, env=environment({}), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CompareError(f"The machine could not be measured: {done.stderr[-800:]}")
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that runs a module of this folder."""
    return {**os.environ, "PYTHONPATH": str(BENCHMARKS), **more}


def describe() -> dict[str, Any]:
    """Return processor, cores, memory, and system."""
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
    print(json.dumps(bandwidth(cores, where) | peak(cores)))
