"""Adapters of a draft model: more accepted drafts, and the same answers."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from octavo import LLM, LoRARequest, SamplingParams
from octavo.errors import AdapterError, RequestError
from octavo.scheduler.speculation import DraftLengths
from tests.adapters import PREFIX, builtin_model, make_factors, write_adapter

INVOCATION = [7, 5, 7]
KINDS = ("plain", "norms", "biases", "whole", "activated")
GREEDY = SamplingParams(temperature=0.0, max_tokens=13, ignore_eos=True, logprobs=2)
PROMPTS = [[*range(300, 340), *INVOCATION, *range(340, 350)], list(range(500, 531))]
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 16,
    "enable_lora": True,
    "max_loras": 3,
    "lora_modules_to_save": ["embed_tokens", "lm_head"],
}
SELF = {"model": "octavo/stories", "method": "draft_model", "num_speculative_tokens": 3}
"""The model drafts for itself: with the same adapters, all drafts are right."""


@pytest.fixture(autouse=True)
def always_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the maximum number of drafts, even if they do not pay."""
    monkeypatch.setattr(DraftLengths, "choose", lambda self, num_reqs: self.most)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters of the built-in model, one of each kind."""
    made, model = tmp_path_factory.mktemp("adapters"), builtin_model()
    (embed,) = (name for name, module in model.modules.items() if module.is_embedding)
    linear = [name for name in model.modules if name != embed]
    factors = make_factors(model, seed=1)
    write_adapter(made / "plain", factors)
    more = make_factors(model, linear, seed=2, more="lora_magnitude_vector")
    write_adapter(made / "norms", more, use_dora=True)
    more = make_factors(model, linear, seed=3, more="lora_B.bias")
    write_adapter(made / "biases", more, lora_bias=True)
    some = make_factors(model, [name for name in linear if name != "lm_head"], seed=4)
    other = make_factors(model, [embed], rank=256, seed=5)
    matrix = other[f"{PREFIX}{embed}.lora_embedding_A"].T.contiguous() / 16
    whole = {f"{PREFIX}{name}.weight": matrix.clone() for name in (embed, "lm_head")}
    write_adapter(made / "whole", some | whole, modules_to_save=["embed_tokens", "lm_head"])
    some = make_factors(model, linear, seed=6)
    write_adapter(made / "activated", some, alora_invocation_tokens=INVOCATION)
    return made


def requests(folder: Path, *, drafts: bool) -> list[LoRARequest | None]:
    """Return an adapter of each kind, and None."""
    return [
        None,
        *(
            LoRARequest(
                name, i, str(folder / name), draft_path=str(folder / name) if drafts else None
            )
            for i, name in enumerate(KINDS, 1)
        ),
    ]


def ask(
    llm: LLM, adapters: list[LoRARequest | None], params: SamplingParams = GREEDY
) -> list[tuple[Any, ...]]:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    given = [adapter for adapter in adapters for _ in prompts]
    outputs = llm.generate(prompts * len(adapters), params, lora_request=given, use_tqdm=False)
    return [(it.outputs[0].token_ids, it.outputs[0].logprobs) for it in outputs]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[tuple[Any, ...]]:
    """Answers without speculation."""
    with LLM(**SETTINGS) as llm:
        found = ask(llm, requests(folder, drafts=False))
    assert len({str(it) for it in found}) == len(found) - 1, "one prompt has no invocation tokens"
    return found


def rejected(llm: LLM) -> int:
    stats = llm.stats()
    assert stats.num_draft_tokens > 0
    return stats.num_draft_tokens - sum(stats.num_accepted_tokens_per_pos)


LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "eager, one at a time": {"enforce_eager": True, "max_loras": 1, "max_num_batched_tokens": 24},
    "processes": {"tensor_parallel_size": 2, "num_threads": 1},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_drafts_are_right(folder: Path, expected: list[Any], layout: str) -> None:
    settings = SETTINGS | LAYOUTS[layout]
    with LLM(**settings, speculative_config=SELF) as llm:
        given = requests(folder, drafts=True)
        assert ask(llm, given) == expected
        assert ask(llm, given) == expected  # with cached prefixes
        assert rejected(llm) == 0
        without = requests(folder, drafts=False)
        assert ask(llm, [given[1], without[1]])[2:] == expected[2:4]
        assert rejected(llm) > 0, "the same adapter without one of the draft model"
        assert ask(llm, without) == expected
        if layout == "plain":
            drawn = replace(GREEDY, temperature=0.9, seed=3)
            assert ask(llm, given, drawn) == ask(llm, without, drawn)


def test_requests_that_cannot_be(folder: Path, tmp_path: Path) -> None:
    path = str(folder / "plain")
    request = LoRARequest("a", 1, path, draft_path=path)
    for speculative in (None, {"method": "ngram"}, {"model": "octavo/stories-eagle"}):
        with (
            LLM(**SETTINGS, speculative_config=speculative) as llm,
            pytest.raises(RequestError, match="this engine has none") as caught,
        ):
            llm.generate("x", lora_request=request, use_tqdm=False)
        assert caught.value.param == "draft_path"
    with pytest.raises(RequestError, match="draft_path=''"):
        LoRARequest("a", 1, path, draft_path="")
    speculative = {"model": "octavo/stories-draft"}
    with (
        LLM(**SETTINGS, speculative_config=speculative) as llm,
        pytest.raises(AdapterError, match=r"draft_path: .* does not have"),
    ):
        llm.generate("x", lora_request=request, use_tqdm=False)
    with LLM(**SETTINGS, speculative_config=SELF) as llm:
        other = LoRARequest("b", 2, path, draft_path=str(folder / "activated"))
        with pytest.raises(AdapterError, match="its alora_invocation_tokens differ"):
            llm.generate("x", lora_request=other, use_tqdm=False)
        # Files that change after they have been checked.
        draft = write_adapter(tmp_path / "draft", make_factors(builtin_model(), seed=7))
        changed = LoRARequest("c", 3, path, draft_path=str(draft))
        llm.llm_engine.add_lora(changed)
        write_adapter(tmp_path / "draft", make_factors(builtin_model(), seed=8))
        (answer,) = llm.generate("x", GREEDY, lora_request=changed, use_tqdm=False)
        assert "have changed" in str(answer.outputs[0].stop_reason)
