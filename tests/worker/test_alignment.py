"""Weights of cross attention of a request, against those of transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.errors import RequestError
from octavo.messages import ALIGNMENT
from octavo.worker.alignment import median
from tests.models.harness import make_hf
from tests.speech_model import END, START, WHISPER, write_speech_model

HEADS = [[0, 1], [1, 0], [1, 3]]
ROWS = 70


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whisper")
    write_speech_model(folder)
    config = {k: v for k, v in WHISPER.items() if k not in ("architectures", "model_type", "dtype")}
    make_hf("WhisperForConditionalGeneration", **config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Any:
    with LLM(str(folder), dtype="float32", max_num_seqs=4) as made:
        yield made


def ask(llm: LLM, sound: np.ndarray, tokens: list[int], **alignment: Any) -> Any:
    given = {"heads": HEADS, "num_rows": ROWS} | alignment
    prompt = {
        "encoder_prompt": {"input_features": sound},
        "decoder_prompt": {"prompt_token_ids": tokens},
    }
    return prompt, SamplingParams(max_tokens=1, extra_args={ALIGNMENT: [*given.values()]})


def sounds() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=(600, 8)).astype(np.float32) for _ in range(3)]


TOKENS = [[START, 5, 9, END], [START, *range(30), END], [START, 7, END]]


def test_same_as_transformers(llm: LLM, folder: Path) -> None:
    """The reference's formula (OpenAI's Whisper, `find_alignment`) on the weights of transformers.

    They are the same bits in a batch, and beside an answer that is generated.
    """
    from transformers import WhisperForConditionalGeneration

    hf = WhisperForConditionalGeneration.from_pretrained(folder, attn_implementation="eager")
    asks = [ask(llm, *pair) for pair in zip(sounds(), TOKENS, strict=True)]
    alone = [llm.generate(*one)[0].pooled for one in asks]
    prompt = asks[0][0] | {"decoder_prompt": {"prompt_token_ids": [START, 5, 9]}}
    beside = [*asks, (prompt, SamplingParams(max_tokens=8, temperature=0))]
    (generated,) = llm.generate(*beside[-1])
    together = llm.generate([one for one, _ in beside], [params for _, params in beside])
    assert [output.pooled for output in together[:3]] == alone
    assert together[3].outputs[0].token_ids == generated.outputs[0].token_ids
    for sound, tokens, found in zip(sounds(), TOKENS, alone, strict=True):
        with torch.inference_mode():
            weights = hf(
                input_features=torch.from_numpy(sound.T[None].copy()),
                decoder_input_ids=torch.tensor([tokens]),
                output_attentions=True,
                use_cache=False,
            ).cross_attentions
        heads = torch.stack([weights[layer][0, head, :, :ROWS] for layer, head in HEADS])
        heads = heads / heads.sum(-1, keepdim=True)
        deviation, mean = torch.std_mean(heads, dim=-2, keepdim=True, unbiased=False)
        padded = torch.nn.functional.pad((heads - mean) / deviation, (3, 3), mode="reflect")
        expected = padded.unfold(-1, 7, 1).sort()[0][..., 3].mean(0)
        array = np.frombuffer(found, np.float32).reshape(len(tokens), ROWS)
        # Weights of a random model hardly differ, so that the division makes errors larger.
        assert np.abs(array - expected.numpy()).max() < 2e-3


def test_few_rows_are_not_smoothed() -> None:
    x = np.array([[3.0, 1.0, 2.0]], np.float32)
    assert np.array_equal(median(x), x)
    x = np.array([[9.0, 0.0, 1.0, 2.0, 3.0, 4.0]], np.float32)
    assert median(x).tolist() == [[1.0, 1.0, 2.0, 3.0, 2.0, 2.0]]


@pytest.mark.parametrize(
    ("alignment", "message"),
    [
        ({"heads": []}, "needs different heads"),
        ({"heads": [[0, -1]]}, "needs different heads"),
        ({"heads": [[0, 1], [0, 1]]}, "needs different heads"),
        ({"num_rows": 301}, "1 to 300 rows"),
        ({"num_rows": 0}, "1 to 300 rows"),
        ({"heads": "x"}, "extra_args.whisper_alignment"),
    ],
)
def test_wrong_values(llm: LLM, alignment: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(*ask(llm, sounds()[0], TOKENS[0], **alignment))


def test_a_head_that_the_model_lacks_fails_alone(llm: LLM) -> None:
    asks = [ask(llm, sounds()[0], TOKENS[0], heads=heads) for heads in ([[2, 0]], [[0, 4]], HEADS)]
    *bad, good = llm.generate([one for one, _ in asks], [params for _, params in asks])
    for output in bad:
        assert output.outputs[0].finish_reason == "error"
        assert "has no head" in str(output.outputs[0].stop_reason)
    assert good.pooled is not None


def test_a_step_must_have_room_for_the_sound_and_all_tokens(folder: Path) -> None:
    for budget in (300 + 32, 300 + 31):
        settings = {"max_num_batched_tokens": budget, "enable_prefix_caching": False}
        with LLM(str(folder), dtype="float32", max_num_seqs=4, **settings) as llm:
            asks = [ask(llm, sounds()[1], tokens) for tokens in TOKENS[:2]]
            if budget < 332:
                (output,) = llm.generate(*asks[1])
                assert "max_num_batched_tokens to 332" in str(output.outputs[0].stop_reason)
                continue
            outputs = llm.generate([one for one, _ in asks], [params for _, params in asks])
            sizes = [len(output.pooled or b"") for output in outputs]
            assert sizes == [4 * ROWS * len(tokens) for tokens in TOKENS[:2]]
