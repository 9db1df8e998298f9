"""`octavo experts`: the engine's counts, and the heat map."""

import json

import pytest

from octavo import LLM, SamplingParams, cli
from octavo.errors import ConfigError
from octavo.model_tools.experts import draw, measure
from octavo.observability.scheduler_stats import SchedulerStats
from tests.model_tools.conftest import make_folder

CONFIG = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
CONFIG |= {"mlp_only_layers": [1]}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return folder, make_folder(folder, "Qwen3MoeForCausalLM", **CONFIG)


def test_counts_are_those_of_transformers(mixture, capsys):
    """Every computed token is counted once, in chunks, with other requests and by every rank."""
    import torch

    folder, hf = mixture
    prompts = ["Once upon a time", "There was a dog named Rex who lived near the farm."]
    with LLM(str(folder), max_num_batched_tokens=16, max_num_seqs=16) as llm:
        tokenizer = llm.get_tokenizer()
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        (counts,) = llm.collective_rpc("expert_loads")
        stats = llm.stats()
    assert [layer for layer, _ in counts] == [0, 2]
    expected = {layer: torch.zeros(6, dtype=torch.int64) for layer in (0, 2)}
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = tokenizer.encode(prompt) + output.outputs[0].token_ids[:-1]
        with torch.no_grad():
            logits = hf(torch.tensor([ids]), output_router_logits=True).router_logits
        for layer, rows in zip(expected, logits, strict=True):
            expected[layer] += torch.bincount(rows.topk(2).indices.flatten(), minlength=6)
    assert dict(counts) == {layer: total.tolist() for layer, total in expected.items()}
    assert stats.num_experts == 6
    assert stats.expert_tokens == [sum(counts[0][1]), 0, sum(counts[1][1])]
    assert stats.expert_max_shares[2] == max(counts[1][1]) / sum(counts[1][1])
    assert SchedulerStats.join([stats, stats]).expert_balancedness == stats.expert_balancedness

    words = ["experts", str(folder), "--tokens", "8"]
    flags = [word for prompt in prompts for word in ("--prompt", prompt)]
    assert cli.main([*words, *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [layer["counts"] for layer in found["layers"]] == [row for _, row in counts]
    assert cli.main([*words, *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert lines[0].endswith(" 2 prompts")


def test_the_map_has_a_character_for_each_expert():
    layer = {"layer": 3, "counts": [0, 10, 1, 30, 9], "max_share": 0.6, "balancedness": 1 / 3}
    lines = draw({"model": "m", "num_prompts": 2, "layers": [layer]})
    assert lines[0] == "m: 50 choices in each layer, 2 prompts"
    assert lines[-1] == "    3  | +.@=|   60%     0.33"


def test_models_without_experts_are_refused():
    with pytest.raises(ConfigError, match="octavo/stories has no experts"):
        measure({"model": "octavo/stories", "max_model_len": 64}, ["Once"], tokens=1)
    with pytest.raises(ConfigError, match="--tokens 0"):
        measure({"model": "octavo/stories"}, ["Once"], tokens=0)
