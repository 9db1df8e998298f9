"""Memory of real processes, against the memory plan: each test in a separate process."""

import json
import os
import subprocess
import sys

import pytest

from octavo.system import device
from tests.adapters import builtin_model, make_factors, write_adapter
from tests.plugins import NO_REPEAT

SCRIPT = """
import json, sys
from octavo import LLM, SamplingParams
from octavo.system.device import resident_memory

sizes = []
with LLM(kv_cache_memory_bytes="48M", max_num_seqs=8, max_num_batched_tokens=512) as llm:
    plan = llm.memory_plan
    sizes.append(resident_memory())
    tokens = (plan.num_blocks - 8) * plan.block_size // 8
    assert tokens <= plan.max_model_len
    vocab = len(llm.get_tokenizer())
    prompts = [[(i + j) % (vocab - 8) + 4 for j in range(tokens - 8)] for i in range(8)]
    llm.generate(prompts, SamplingParams(max_tokens=4, logprobs=3, presence_penalty=0.1,
                                         ignore_eos=True), use_tqdm=False)
    sizes.append(resident_memory())
print(json.dumps([*sizes, plan.steady, plan.kv_cache, plan.nbytes("runtime")]))
"""


@pytest.mark.skipif(device.resident_memory() is None, reason="the system does not tell the size")
def test_the_resident_size_keeps_to_the_plan():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    start, full, planned, kv_cache, runtime = json.loads(done.stdout)
    assert start < full <= planned
    # The KV cache is allocated on use: nothing at the start, all of it in the end.
    assert start <= planned - kv_cache
    assert full >= start + 0.8 * kv_cache
    # Of the plan only the allowance for libraries and some buffers may be unused.
    assert planned - full < 0.5 * runtime
    assert "memory plan: " in done.stderr


@pytest.mark.skipif(device.resident_memory() is None, reason="the system does not tell the size")
def test_the_plan_counts_plug_ins(tmp_path):
    """The class's module holds 64 MiB, and the plug-in needs torch."""
    (tmp_path / "heavy.py").write_text(NO_REPEAT + "\nHELD = bytes(2**26).replace(b'\\0', b'x')\n")
    script = SCRIPT.replace("LLM(", "LLM(logits_processors=['heavy:NoRepeat'], ")
    script = script.replace('plan.nbytes("runtime")', 'plan.nbytes("plug-ins")')
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    start, full, planned, kv_cache, plugins = json.loads(done.stdout)
    assert plugins > 96 * 2**20
    assert start <= planned - kv_cache
    assert full <= planned
    assert start > planned - kv_cache - plugins


@pytest.mark.skipif(device.resident_memory() is None, reason="the system does not tell the size")
def test_the_plan_counts_adapters_of_the_draft_model(tmp_path):
    """The model drafts for itself, so each adapter is in memory twice."""
    model = builtin_model()
    linear = [name for name in model.modules if ".layers." in name]
    for i in range(4):
        write_adapter(tmp_path / str(i), make_factors(model, linear, rank=256, seed=i), r=256)
    script = f"""
import json
from octavo import LLM, LoRARequest, SamplingParams
from octavo.system.device import resident_memory

lora = {{"enable_lora": True, "max_loras": 4, "max_lora_rank": 256}}
lora["speculative_config"] = {{"model": "octavo/stories", "num_speculative_tokens": 2}}
with LLM(kv_cache_memory_bytes="48M", max_num_seqs=8, **lora) as llm:
    start = resident_memory()
    paths = [f"{tmp_path}/{{i}}" for i in range(4)]
    adapters = [LoRARequest(it, i, it, draft_path=it) for i, it in enumerate(paths, 1)]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    llm.generate(["x"] * 4, params, lora_request=adapters, use_tqdm=False)
    plan = llm.memory_plan
    print(json.dumps([start, resident_memory(), plan.steady, plan.nbytes("adapters")]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    start, full, planned, adapters = json.loads(done.stdout)
    size = (tmp_path / "0" / "adapter_model.safetensors").stat().st_size / 2  # in bfloat16
    assert 8 * size < full - start < adapters < 20 * size
    assert full <= planned
