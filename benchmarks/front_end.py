"""Measure the front end alone: engines with executors that make tokens at a given rate.

    python benchmarks/front_end.py [--rates 25000 50000 100000] [--engines 4] [--requests 64]

No model computes: each engine is real except for its executor, which returns a token for every
request of a step at its time. For each rate in tokens per second of all engines together, this
prints the tokens per second of the clock and per second of the front end's CPU time, and the age of
outputs when they are read, in the first and in the last quarter: if they get older, the front end
is too slow. Run it from the repository, with at least two free cores.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import statistics
import sys
import time
from concurrent.futures import Future

import uvloop

from octavo.config import EngineConfig
from octavo.fleet.start import EngineProcesses
from octavo.frontend.async_llm import AsyncLLM
from octavo.messages import EngineCoreOutputs, GrammarOutput, ModelRunnerOutput, SchedulerOutput
from octavo.plan.setup import WorkerSetup
from octavo.sampling_params import RequestOutputKind, SamplingParams
from octavo.simulation.simulation import BatchReader, ModellessExecutor
from octavo.system import clock
from octavo.system.device import SWITCH_INTERVAL
from octavo.worker.platform import Platform

RATE = "OCTAVO_BENCH_RATE"
"""Variable with the number of tokens that an engine's executor makes per second."""
TOKEN = 5


class PacedStep(Future[ModelRunnerOutput]):
    """Implementation of `StepHandle`, with a result that is available at its time."""

    def __init__(self, end: float, output: ModelRunnerOutput) -> None:
        super().__init__()
        self._end, self._output = end, output

    def drafts(self) -> dict[str, list[int]]:
        return {}

    def sample(self, grammar: GrammarOutput | None = None) -> Future[ModelRunnerOutput]:
        return self

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        """Wait for the result's time; return it."""
        time.sleep(max(0.0, self._end - time.monotonic()))
        return self._output


class PacedExecutor(ModellessExecutor):
    """Executor without a model that makes tokens at a given rate."""

    def __init__(self, setup: WorkerSetup, platform: Platform) -> None:
        self.max_in_flight = 2
        self._rate = float(os.environ[RATE])
        self._reader, self._free_at = BatchReader(), 0.0

    def execute(self, work: SchedulerOutput) -> PacedStep:
        _, sampled = self._reader.read(work)
        self._free_at = max(self._free_at, time.monotonic()) + sum(sampled) / self._rate
        output = ModelRunnerOutput(
            [scheduled.req_id for scheduled in work.scheduled_reqs],
            [[TOKEN] if gets_token else [] for gets_token in sampled],
        )
        return PacedStep(self._free_at, output)


async def measure(rate: float, engines: int, requests: int, seconds: float) -> None:
    """Measure a rate, and print the results."""
    os.environ[RATE] = str(rate / engines)
    max_tokens = int(rate * seconds / (engines * requests))
    config = EngineConfig.from_kwargs(
        model="octavo/stories",
        data_parallel_size=engines,
        num_threads=1,
        max_model_len=2048,
        max_num_seqs=requests,
        num_gpu_blocks_override=requests * 128,
        distributed_executor_backend="benchmarks.front_end.PacedExecutor",
    )
    engine = await AsyncLLM.start(config, EngineProcesses(log_level="warning", warm_spare=False))
    ages: list[float] = []
    get_output = engine._client.get_output

    async def watched() -> EngineCoreOutputs:
        outputs = await get_output()
        if outputs.outputs:
            ages.append(clock.now() - outputs.timestamp)
        return outputs

    engine._client.get_output = watched  # type: ignore[method-assign]
    await engine.wait_ready()
    gc.freeze()  # as servers do
    params = SamplingParams(
        max_tokens=max_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    num_tokens = 0

    async def ask(number: int) -> None:
        nonlocal num_tokens
        prompt = {"prompt_token_ids": [TOKEN + number % 90] * 4}
        async for output in engine.generate(prompt, params, str(number)):
            num_tokens += sum(len(answer.token_ids) for answer in output.outputs)

    began, cpu = time.monotonic(), time.process_time()
    await asyncio.gather(*(ask(number) for number in range(engines * requests)))
    wall, cpu = time.monotonic() - began, time.process_time() - cpu
    await engine.shutdown()
    quarter = len(ages) // 4
    first, last = (1000 * statistics.median(part) for part in (ages[:quarter], ages[-quarter:]))
    print(
        f"target {rate:9,.0f}/s  delivered {num_tokens / wall:9,.0f}/s  "
        f"per second of CPU {num_tokens / cpu:9,.0f}  age {first:7.2f} ms, then {last:7.2f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[25e3, 50e3, 100e3, 150e3])
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument(
        "--requests", type=int, default=64, help="number of requests of each engine"
    )
    parser.add_argument("--seconds", type=float, default=4.0)
    args = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL)  # as servers have it
    for rate in args.rates:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(measure(rate, args.engines, args.requests, args.seconds))


if __name__ == "__main__":
    main()
