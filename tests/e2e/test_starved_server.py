"""KV memory for two long requests, 32 arrive: all finish, and /metrics shows the preemptions."""

import concurrent.futures
import threading

import httpx

from octavo import LLM, SamplingParams
from tests.e2e.harness import serve

PROMPTS = [list(range(100 + i, 200 + i)) for i in range(32)]
COMMON = {"temperature": 0.7, "top_p": 1.0, "seed": 1, "max_tokens": 100, "ignore_eos": True}


def test_a_starved_server_gives_the_answers_of_an_unstarved_engine(tmp_path):
    with LLM(max_model_len=256) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": p} for p in PROMPTS], SamplingParams(**COMMON), use_tqdm=False
        )
        expected = [o.outputs[0].token_ids for o in outputs]

    flags = ["--max-model-len", "256", "--num-gpu-blocks-override", str(2 * 16 + 1)]
    with (
        serve(tmp_path, *flags) as server,
        httpx.Client(base_url=server.url, timeout=240) as client,
        concurrent.futures.ThreadPoolExecutor(32) as pool,
    ):
        together = threading.Barrier(32)

        def ask(prompt):
            body = {"model": "octavo/stories", "prompt": prompt, "return_token_ids": True, **COMMON}
            together.wait()
            return client.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]

        assert list(pool.map(ask, PROMPTS)) == expected
        assert server.metric("octavo:num_preemptions_total") > 0
        assert server.metric("octavo:request_success_total") == 32
        assert server.metric("octavo:kv_cache_usage_perc") == 0
