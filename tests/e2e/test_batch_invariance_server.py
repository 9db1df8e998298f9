"""Bits of a server's answers among others, equal to those offline and alone."""

import concurrent.futures

from octavo import LLM, SamplingParams
from tests.e2e.harness import serve

PROMPT = list(range(300, 437))
SETTINGS = [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.95, "seed": 7}]
COMMON = {"max_tokens": 24, "ignore_eos": True}


def test_server_answers_are_those_of_offline_use(tmp_path):
    with LLM(dtype="bfloat16", max_model_len=512, enable_prefix_caching=False) as llm:
        expected = []
        for settings in SETTINGS:
            params = SamplingParams(logprobs=3, **COMMON, **settings)
            (answer,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
            output = answer.outputs[0]
            logprobs = [
                row[token].logprob
                for row, token in zip(output.logprobs, output.token_ids, strict=True)
            ]
            expected.append((output.token_ids, logprobs))

    flags = ["--dtype", "bfloat16", "--max-model-len", "512"]
    flags += ["--long-prefill-token-threshold", "50"]
    with serve(tmp_path, *flags) as server, concurrent.futures.ThreadPoolExecutor(32) as pool:

        def ask(body):
            response = server.post("/v1/completions", {"model": "octavo/stories", **body})
            assert response.status_code == 200, response.text
            return response.json()["choices"][0]

        def target(settings):
            body = {"prompt": PROMPT, "logprobs": 3, "return_token_ids": True}
            choice = ask({**body, **COMMON, **settings})
            return choice["token_ids"], choice["logprobs"]["token_logprobs"]

        def other(i):
            prompt = list(range(500 + i, 520 + 3 * i))
            ask({"prompt": prompt, "max_tokens": 5 + i, "temperature": 1.0, "ignore_eos": True})

        assert [target(settings) for settings in SETTINGS] == expected
        crowd = [pool.submit(other, i) for i in range(64)]
        targets = [pool.submit(target, settings) for settings in SETTINGS * 2]
        assert [t.result() for t in targets] == expected * 2
        for future in crowd:
            future.result()
