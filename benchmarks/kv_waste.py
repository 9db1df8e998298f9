"""Measure allocated but unused KV memory, at 90 % occupancy on a ShareGPT-like mix.

Only the scheduler and the KV-cache bookkeeping run; no model. Requests have lognormal lengths with
ShareGPT's means (161 prompt and 338 output tokens: Kwon et al., "Efficient Memory Management for
Large Language Model Serving with PagedAttention", 2023, section 6.1), and arrive whenever less than
90 % of the blocks are in use. Waste is the share of slots in allocated blocks without a token's KV;
prefixes are not shared, since sharing would improve the figure.

    python benchmarks/kv_waste.py [--block-size 16] [--steps 2000] [--seed 0]
"""

from __future__ import annotations

import argparse
import math
import random
from dataclasses import dataclass

from octavo.config import SchedulerConfig
from octavo.kv_cache.groups import KVCacheConfig, make_kv_cache_groups
from octavo.messages import CoreSamplingParams, EngineCoreRequest, ModelRunnerOutput, RequestOptions
from octavo.models.cache import AttentionCache
from octavo.request import Request
from octavo.scheduler.scheduler import Scheduler

MEAN_PROMPT, MEAN_OUTPUT, SIGMA = 161.0, 338.0, 1.0
MAX_MODEL_LEN = 2048
KV_TOKENS = 65536
OCCUPANCY = 0.9
WARM_UP_STEPS = 1000  # until the mix of short and long requests is steady


@dataclass
class Waste:
    """Means over the measured steps."""

    wasted: float
    occupancy: float
    num_running: float


def lognormal_length(rng: random.Random, mean: float, limit: int) -> int:
    """Return a random length of at least 1 and at most `limit`."""
    length = rng.lognormvariate(math.log(mean) - SIGMA**2 / 2, SIGMA)
    return max(1, min(limit, round(length)))


def measure(block_size: int = 16, num_steps: int = 2000, seed: int = 0) -> Waste:
    """Run `num_steps` steps at 90 % occupancy and measure the waste."""
    rng = random.Random(seed)
    groups = make_kv_cache_groups([AttentionCache(1, 1)])
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=1024),
        KVCacheConfig(KV_TOKENS // block_size + 1, block_size, groups),
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=2048,
    )
    manager = scheduler.kv_cache_manager
    wasted = occupancy = running = 0.0
    arrivals = 0
    for step in range(WARM_UP_STEPS + num_steps):
        # Blocks that waiting requests are about to use count as used.
        coming = sum(r.num_tokens for r in scheduler.waiting) / KV_TOKENS
        while manager.usage + coming < OCCUPANCY:
            prompt = [0] * lognormal_length(rng, MEAN_PROMPT, MAX_MODEL_LEN // 2)
            output = lognormal_length(rng, MEAN_OUTPUT, MAX_MODEL_LEN - len(prompt))
            params = CoreSamplingParams(max_tokens=output)
            core = EngineCoreRequest(str(arrivals), prompt, params, RequestOptions(float(arrivals)))
            scheduler.add_request(Request(core))
            arrivals += 1
            coming += len(prompt) / KV_TOKENS
        work = scheduler.schedule()
        if step >= WARM_UP_STEPS:
            used = sum(r.num_computed_tokens for r in scheduler.running)
            wasted += 1 - used / (manager.num_used_blocks * block_size)
            occupancy += manager.usage
            running += len(scheduler.running)
        req_ids = [request.req_id for request in work.scheduled_reqs]
        started = {r.request_id for r in scheduler.running if r.num_output_placeholders}
        tokens = [[0] if req_id in started else [] for req_id in req_ids]
        scheduler.update_from_output(work, ModelRunnerOutput(req_ids, tokens))
    return Waste(wasted / num_steps, occupancy / num_steps, running / num_steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    waste = measure(args.block_size, args.steps, args.seed)
    print(
        f"block size {args.block_size}: {waste.wasted:.2%} of the allocated KV memory wasted, "
        f"{waste.occupancy:.1%} of the blocks in use, {waste.num_running:.0f} requests running, "
        f"mean of {args.steps} steps"
    )


if __name__ == "__main__":
    main()
