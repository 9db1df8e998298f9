"""Prefill in one process, decode in another: keys and values are exchanged through a folder.

This is vLLM's example with the import changed: the first process computes the prompts and saves
their KV data, the second one loads the data and writes the answers.
"""

import tempfile
from multiprocessing import Process

from octavo import LLM, SamplingParams
from octavo.config import KVTransferConfig

CONTEXT = "Once upon a time there was a little dog who liked to run in the park with his friend. "
PROMPTS = [CONTEXT * 8 + end for end in ("One day, Tom", "The next day, Lily", "In the end, they")]


def make_llm(role: str, folder: str) -> LLM:
    return LLM(
        model="octavo/stories",
        kv_transfer_config=KVTransferConfig(
            kv_connector="SharedStorageConnector",
            kv_role=role,
            kv_connector_extra_config={"shared_storage_path": folder},
        ),
    )


def prefill(folder: str) -> None:
    llm = make_llm("kv_producer", folder)
    llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=1))
    print("The prompts are computed.")


def decode(folder: str) -> None:
    llm = make_llm("kv_consumer", folder)
    for output in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=20)):
        num_tokens = len(output.prompt_token_ids)
        print(f"{output.num_cached_tokens} of {num_tokens} prompt tokens were loaded")
        print(f"Prompt: {output.prompt[-20:]!r}, generated text: {output.outputs[0].text!r}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for work in (prefill, decode):
            process = Process(target=work, args=(f"{folder}/kv",))
            process.start()
            process.join()
            if process.exitcode != 0:
                raise SystemExit(f"{work.__name__} failed")
