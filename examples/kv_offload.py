"""Keys and values that survive: in memory below the KV cache, and in a file across a restart."""

import tempfile
import time

from octavo import LLM, SamplingParams

PROMPT = "Once upon a time there was a little dog who liked to run in the park. " * 60


def make_llm(folder: str) -> LLM:
    extra = {"cpu_bytes_to_use": 2**28, "file_path": folder, "file_bytes_to_use": 2**28}
    config = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
    return LLM(model="octavo/stories", kv_transfer_config=config)


def ask(llm: LLM, what: str) -> None:
    begin = time.perf_counter()
    (output,) = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    milliseconds = (time.perf_counter() - begin) * 1000
    num_tokens = len(output.prompt_token_ids)
    print(
        f"{what}: {output.num_cached_tokens} of {num_tokens} prompt tokens were there, "
        f"{milliseconds:.0f} ms"
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        llm = make_llm(folder)
        llm.generate(["a" * 20], SamplingParams(max_tokens=1), use_tqdm=False)  # warm-up
        ask(llm, "computed")
        ask(llm, "prefix cache")
        llm.reset_prefix_cache()
        ask(llm, "memory")
        llm.llm_engine.shutdown()
        llm = make_llm(folder)
        ask(llm, "file, after a restart")
        llm.llm_engine.shutdown()
