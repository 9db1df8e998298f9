"""A batch of a real server that is killed, beside online requests."""

import json
import shutil
import signal
import time

import openai
from openai.types import Batch

from tests.e2e.harness import Server, serve, wait_until

FLAGS = ["--max-model-len", "256", "--kv-cache-memory-bytes", "8M", "--max-num-seqs", "4"]
NUM_LINES = 24


def lines() -> bytes:
    found = []
    for i in range(NUM_LINES):
        body = {"prompt": f"Story {i}: Once upon a time", "max_tokens": 100, "ignore_eos": True}
        body |= {"temperature": 0} if i % 2 else {"seed": i, "n": 2, "max_tokens": 60}
        request = {"custom_id": f"n{i}", "method": "POST", "url": "/v1/completions", "body": body}
        found.append(json.dumps(request))
    return "\n".join(found).encode()


def client_of(server: Server) -> openai.OpenAI:
    """Return a client, to be closed: garbage with open connections is a warning."""
    return openai.OpenAI(api_key="none", base_url=server.url + "/v1", max_retries=0)


def finish(client: openai.OpenAI, batch_id: str) -> bytes:
    def look() -> Batch | None:
        batch = client.batches.retrieve(batch_id)
        assert batch.status in ("in_progress", "finalizing", "completed"), batch
        return batch if batch.status == "completed" else None

    batch = wait_until(look)
    Batch.model_validate(batch.model_dump(), strict=True)
    assert batch.request_counts.completed == NUM_LINES
    assert batch.error_file_id is None
    return client.files.content(batch.output_file_id).content


def test_a_killed_server_continues_its_batch_with_the_same_bytes(tmp_path):
    for number in range(9):  # until a kill comes before the last answer
        state = tmp_path / f"state{number}"
        flags = [*FLAGS, "--state-dir", str(state)]
        with serve(tmp_path, *flags) as server, client_of(server) as client:
            file = client.files.create(file=lines(), purpose="batch")
            batch = client.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )
            # Lines hold every seat; this request takes one at the next step.
            while (now := client.batches.retrieve(batch.id)).request_counts.completed < 2:
                time.sleep(0.01)
            answer = server.post("/v1/completions", {"prompt": "Hello", "max_tokens": 4})
            assert answer.status_code == 200
            server.process.send_signal(signal.SIGKILL)
            server.process.wait()
        journal = state / "batches" / f"{batch.id}.journal"
        if journal.exists() and (answered := journal.read_bytes().count(b"\n")) < NUM_LINES:
            break
    assert now.request_counts.completed <= answered < NUM_LINES
    undisturbed = tmp_path / "undisturbed"
    shutil.copytree(state, undisturbed)
    (undisturbed / "batches" / journal.name).unlink()
    with serve(tmp_path, *flags, spare=True) as server, client_of(server) as client:
        while client.batches.retrieve(batch.id).request_counts.completed <= answered:
            time.sleep(0.01)
        server.engine_process().kill()  # its lines continue on the next engine
        continued = finish(client, batch.id)
    flags = [*FLAGS, "--state-dir", str(undisturbed)]
    with serve(tmp_path, *flags) as server, client_of(server) as client:
        whole = finish(client, batch.id)
    assert continued == whole
    answers = [json.loads(line) for line in whole.splitlines()]
    assert [answer["custom_id"] for answer in answers] == [f"n{i}" for i in range(NUM_LINES)]
    assert [len(a["response"]["body"]["choices"]) for a in answers] == [2, 1] * (NUM_LINES // 2)
