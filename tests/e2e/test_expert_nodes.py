"""Engines here and on a node, which divide the experts of a model: the answers of one process.

The tests are in order: each begins with the engines that the one before has left.
"""

import json
import shutil
import time
from pathlib import Path

import pytest

import octavo
from octavo import LLM, SamplingParams
from tests.e2e import harness
from tests.e2e.test_elastic_experts import NUM_TOKENS, PARAMS, PROMPTS, Load
from tests.e2e.test_nodes import Cluster

SETTINGS = {"max_model_len": 256, "kv_cache_memory_bytes": "4M", "num_threads": 1}
SETTINGS |= {"load_format": "dummy"}
FLAGS = ["--enable-expert-parallel"]
FLAGS += [word for key, value in SETTINGS.items() for word in (f"--{key}".replace("_", "-"), value)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A mixture with random weights, and the tokenizer of the built-in model."""
    folder, builtin = tmp_path_factory.mktemp("model"), Path(octavo.__file__).parent / "builtin"
    config = json.loads((builtin / "stories" / "config.json").read_text())
    config |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    config |= {"hidden_size": 64, "num_hidden_layers": 3, "head_dim": 16}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    config |= {"moe_intermediate_size": 32, "num_experts": 12, "num_experts_per_tok": 2}
    config |= {"norm_topk_prob": True, "max_position_embeddings": 256}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(builtin / "stories" / name, folder)
    return str(folder)


@pytest.fixture(scope="module")
def expected(model):
    llm = LLM(model, **SETTINGS)
    params = [SamplingParams(**p, ignore_eos=True) for p in PARAMS]
    answers = llm.generate(PROMPTS, params, use_tqdm=False)
    return [[list(output.token_ids) for output in answer.outputs] for answer in answers]


def engines(process):
    """Return the engine processes of a machine, the oldest first."""
    return harness.processes(process.pid, harness.ENGINE)


def wait_for(server, reason):
    harness.wait_until(
        lambda: server.get("/health").json()["reason"] == reason, server.log.read_text
    )


def stands_still(load):
    """Return True if there is no further answer for a while."""
    done = load.num_answers
    time.sleep(0.3)
    return load.num_answers == done


@pytest.fixture(scope="module")
def cluster(model, tmp_path_factory):
    return Cluster(tmp_path_factory.mktemp("cluster"), 2, 1, list(map(str, FLAGS)), model)


@pytest.fixture(scope="module")
def server(cluster):
    with (
        cluster.node() as (node, _),
        harness.serve(cluster.folder, *cluster.flags(), model=cluster.model) as made,
    ):
        made.node = node
        yield made


def test_the_answers_are_those_of_one_process_also_when_an_engine_is_killed(server, expected):
    with Load(server, expected, adapted=()) as load:
        load.wait_for_answers(len(expected))
        (victim,) = engines(server.process)
        victim.kill()
        server.wait_for_metric("octavo:engine_restarts_total", 2)  # of both engines
        wait_for(server, "ok")
    count = server.metric("octavo:generation_tokens_total")
    assert count == load.num_answers * NUM_TOKENS  # each token once


def test_a_lost_node_is_waited_for(server, cluster, expected):
    with Load(server, expected, adapted=()) as load:
        server.node.kill()
        wait_for(server, "engine 1 waits for its node; the others wait for it")
        harness.wait_until(lambda: stands_still(load))  # after answers that were complete
        with cluster.node():
            load.wait_for_answers(len(expected))
            wait_for(server, "ok")
            load.end()
