"""Spine of Octavo: scheduler, KV cache and executor, without a server and without `LLM`.

    python examples/spine.py

The file does in plain steps what `LLM` and the server do:

1. settings, model folder, config.json -> `EngineConfig`, `ModelSpec`, `Tokenizer`
2. plan the memory, before anything is loaded -> `MemoryPlan`, `KVCacheConfig`
3. load the model -> `UniProcExecutor` (one worker, on a thread of this process)
4. loop: `schedule` -> `execute` -> `sample` -> `update_from_output`

`octavo/engine/assemble.py` does 1 to 3 with all options. `octavo/engine/core.py` does 4 with
several steps in flight, grammars and recovery from failures. Run this file with a debugger to see
a request become tokens.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from octavo.checkpoints.registry import open_checkpoint
from octavo.config import EngineConfig
from octavo.executor.uniproc import UniProcExecutor
from octavo.kv_cache.groups import KVCacheConfig
from octavo.kv_cache.hashing import make_block_hasher
from octavo.messages import CoreSamplingParams, EngineCoreRequest, RequestOptions
from octavo.models.hub import resolve_folders
from octavo.models.registry import read_spec
from octavo.models.spec import ModelSpec
from octavo.plan.memory_plan import make_memory_plan, resolve_dtype
from octavo.plan.setup import WorkerSetup
from octavo.platforms.registry import get_platform
from octavo.request import Request
from octavo.scheduler.scheduler import Scheduler
from octavo.system import clock
from octavo.text.tokenizer import Tokenizer

# Both prompts begin with the same words: the second request finds them in the prefix cache.
BEGINNING = "Once upon a time, there was a little girl named Lily. She had a small red ball and"
PROMPTS = [f"{BEGINNING} a dog. One day,", f"{BEGINNING} a cat. One day,"]
MAX_TOKENS = 24
STEPS_BETWEEN = 3  # the second request arrives while the first one runs

# The settings, with the names that `LLM(...)` and `octavo serve` use. The step budget is small, so
# that prompts are computed in chunks.
CONFIG = EngineConfig.from_kwargs(
    model="octavo/stories",
    device="cpu",
    max_model_len=256,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    num_gpu_blocks_override=60,
    block_size=16,
)


def load(
    config: EngineConfig, spec: ModelSpec, folder: Path
) -> tuple[UniProcExecutor, KVCacheConfig]:
    """Plan the memory of an engine, load its model and allocate its KV cache."""
    budget = config.scheduler.max_num_batched_tokens
    assert budget is not None
    # Setup of a worker. It is pure data, so that the control plane can plan with it.
    setup = WorkerSetup(
        config=config,
        spec=spec,
        model_path=folder,
        dtype=resolve_dtype(config, spec),
        max_model_len=config.model.max_model_len or spec.max_model_len,
        max_num_batched_tokens=budget,
    )
    platform = get_platform(config.device.device)
    # Record the largest step of a model whose tensors have no memory: this gives the exact size
    # of the buffers.
    estimate = platform.estimate_memory(setup)
    assert estimate is not None, "a CPU's memory is planned; a GPU's is measured after loading"
    plan, kv_cache = make_memory_plan(config, spec, estimate, max_num_batched_tokens=budget)
    print(plan.report(), end="\n\n")
    setup = replace(setup, max_model_len=plan.max_model_len, scratches=estimate.scratches)
    # Create the worker, which loads the model: `Worker` -> `ModelRunner` -> `load_model`.
    executor = UniProcExecutor(setup, platform)
    # Allocate the KV cache and capture the forward pass as a plan of kernel calls.
    executor.initialize_kv_cache(kv_cache)
    return executor, kv_cache


def make_request(
    name: str, prompt: str, spec: ModelSpec, tokenizer: Tokenizer, block_size: int
) -> Request:
    """Tokenize a prompt and make the scheduler's record of the request."""
    core_request = EngineCoreRequest(
        request_id=name,
        prompt_token_ids=tokenizer.encode(prompt),
        sampling_params=CoreSamplingParams(
            temperature=0.0,  # greedy
            max_tokens=MAX_TOKENS,
            all_stop_token_ids=frozenset(spec.eos_token_ids),
        ),
        options=RequestOptions(arrival_time=clock.now()),
    )
    # The hasher gives each full block of tokens the hash by which other requests find it.
    return Request(core_request, make_block_hasher(block_size))


def run(executor: UniProcExecutor, scheduler: Scheduler, requests: list[Request]) -> None:
    """Run steps until every request has ended; print what each step computes."""
    arriving = list(requests)
    step = 0
    while arriving or scheduler.has_requests():
        if arriving and step % STEPS_BETWEEN == 0:
            scheduler.add_request(arriving.pop(0))
        step += 1
        # Control plane: which requests compute how many tokens, in which KV-cache blocks.
        work = scheduler.schedule()
        # Data plane: the worker's thread starts the forward pass; this call returns at once.
        handle = executor.execute(work)
        # Tokens are sampled on request: the engine core makes grammar masks in between.
        result = handle.sample().result()
        # Control plane again: append the tokens, end requests, free blocks.
        outputs = scheduler.update_from_output(work, result)
        parts = [f"{part.req_id} {part.num_tokens}" for part in work.scheduled_reqs]
        blocks = scheduler.kv_cache_manager.num_used_blocks
        print(f"step {step:2}  tokens computed: {', '.join(parts) or '-':10}  blocks: {blocks}")
        for output in outputs:
            if output.finish_reason is not None:
                cached = output.num_cached_tokens
                print(f"  {output.request_id} ends: {output.finish_reason}; {cached} tokens cached")


def main() -> None:
    """Generate the answers to both prompts and print them."""
    # 1. A name becomes a folder; its config.json becomes a `ModelSpec`, by the model's family.
    folder, tokenizer_folder = resolve_folders(CONFIG)
    spec = read_spec(open_checkpoint(folder))
    tokenizer = Tokenizer.from_folder(tokenizer_folder)
    # 2. and 3.
    executor, kv_cache = load(CONFIG, spec, folder)
    try:
        # 4. The scheduler owns the KV-cache manager; neither imports torch.
        scheduler = Scheduler(
            CONFIG.scheduler,
            kv_cache,
            max_model_len=CONFIG.model.max_model_len or spec.max_model_len,
            max_num_batched_tokens=CONFIG.scheduler.max_num_batched_tokens or 0,
        )
        requests = [
            make_request(name, prompt, spec, tokenizer, kv_cache.block_size)
            for name, prompt in zip("AB", PROMPTS, strict=True)
        ]
        run(executor, scheduler, requests)
        scheduler.check_integrity()  # every block is back in the pool, or in the prefix cache
    finally:
        executor.shutdown()
    for request, prompt in zip(requests, PROMPTS, strict=True):
        tokens = request.all_token_ids[request.num_prompt_tokens :]
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        print(f"\n{request.request_id}: {prompt}\n-> {text!r}")


if __name__ == "__main__":
    main()
