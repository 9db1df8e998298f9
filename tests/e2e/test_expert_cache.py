"""More experts than memory, in a whole engine."""

from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError
from tests.models.cases import CASES
from tests.models.configs.sizes import VOCAB
from tests.models.harness import make_hf

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
PROMPTS = [{"prompt_token_ids": [(7 * i + j * j) % VOCAB for j in range(20 + i)]} for i in range(5)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    architecture, config = CASES["qwen3-moe"]
    few = {"num_experts": 9, "num_experts_per_tok": 2, "max_position_embeddings": 96}
    few |= {"num_hidden_layers": 2, "decoder_sparse_step": 1, "mlp_only_layers": []}
    make_hf(architecture, **config | few).save_pretrained(folder)
    return folder


def engine(folder: Path, **settings: Any) -> LLM:
    cache = str(folder.parent / "packed")
    return LLM(str(folder), skip_tokenizer_init=True, weight_cache=cache, **settings)


def answers(llm: LLM) -> list[Any]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [(out.outputs[0].token_ids, out.outputs[0].logprobs) for out in outputs]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Any]:
    with engine(folder) as llm:
        return answers(llm)


def least(folder: Path, **settings: Any) -> int:
    """Return the least size, which the error for a smaller one names."""
    with pytest.raises(ConfigError, match="has no room") as caught:
        engine(folder, expert_cache=1, **settings)
    return int(str(caught.value).split("at least ")[1].split(" bytes")[0].replace(",", ""))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"enforce_eager": True, "max_num_seqs": 2},
        {"tensor_parallel_size": 2, "num_threads": 1},
        {"tensor_parallel_size": 2, "num_threads": 1, "enable_expert_parallel": True},
        {"pipeline_parallel_size": 2, "num_threads": 1},
    ],
    ids=["plain", "eager", "columns", "experts", "stages"],
)
def test_same_answers(folder: Path, expected: list[Any], settings: dict[str, Any]) -> None:
    size = least(folder, **settings)
    with pytest.raises(ConfigError, match="has no room"):
        engine(folder, expert_cache=size - 1, **settings)
    with engine(folder, expert_cache=size, **settings) as llm:
        assert answers(llm) == expected
        stats, plan = llm.stats(), llm.llm_engine.memory_plan
        assert stats.expert_cache_misses > 0
        assert stats.expert_cache_bytes_read > size
        fetched, used = stats.expert_cache_fetched_ahead, stats.expert_cache_fetched_ahead_used
        assert (fetched > 0) == ("pipeline_parallel_size" not in settings)  # a mixture each
        assert used <= fetched
        loads = stats.expert_tokens  # of the same tokens, however often their experts are read
        assert 0 < plan.nbytes("experts") <= size
        planned = plan.nbytes("weights") + plan.nbytes("experts")
    if "num_threads" in settings:
        return
    with engine(folder, expert_cache=2**30, **settings) as llm:
        assert answers(llm) == expected
        stats, whole = llm.stats(), llm.llm_engine.memory_plan
        assert stats.expert_cache_hits > stats.expert_cache_misses
        assert stats.expert_cache_fetched_ahead == 0
        assert stats.expert_tokens == loads
        assert whole.nbytes("weights") + whole.nbytes("experts") > planned


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_file_that_shrinks_fails_what_needs_it(
    folder: Path, expected: list[Any], ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests fail alone; once the file is whole again, nothing of the failure is left."""
    settings: dict[str, Any] = {"tensor_parallel_size": ranks, "num_threads": 1}
    with engine(folder, expert_cache=least(folder, **settings), **settings) as llm:
        assert answers(llm) == expected
        files = list((folder.parent / "packed").glob("*.weights"))
        whole = [file.read_bytes() for file in files]
        for file in files:
            with file.open("r+b") as stream:
                stream.truncate(4096)
        failed = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        for output in failed:
            assert output.outputs[0].finish_reason == "error"
            assert "cannot be read" in str(output.outputs[0].stop_reason)
        for file, data in zip(files, whole, strict=True):
            file.write_bytes(data)
        assert answers(llm) == expected
        if ranks == 1:
            assert "has become shorter" in caplog.text
            llm._client.core.check_integrity()


def test_refused_by_name(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expert_cache=1024 is not supported .* no experts"):
        LLM("octavo/stories", expert_cache=1024)
    for settings in (
        {"weight_cache": "off"},
        {"load_format": "dummy"},
        {"kv_transfer_config": {"kv_connector": "OffloadingConnector"}},
    ):
        with pytest.raises(ConfigError, match="expert_cache"):
            LLM(str(folder), expert_cache=2**30, skip_tokenizer_init=True, **settings)


def test_sleep(folder: Path, expected: list[Any]) -> None:
    with engine(folder, expert_cache=2**30, enable_sleep_mode=True) as llm:
        assert answers(llm) == expected
        for level in (1, 2):
            llm.sleep(level=level)
            llm.wake_up()
            assert answers(llm) == expected
