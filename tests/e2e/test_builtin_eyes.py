"""The built-in model of pictures answers as its card says, with the tokens of transformers."""

import base64
import io
import random

import pytest
import torch
from PIL import Image

from octavo import LLM, SamplingParams
from octavo.models.hub import resolve_model
from training.eyes import exam
from training.scenes import make_scene

EYES = "octavo/stories-eyes"
KINDS = ("shape", "at", "describe", "number")
"""Kinds of question that it answers well."""
PLAIN = {"temperature": 0, "max_tokens": 60}


def chat(question, scene):
    file = io.BytesIO()
    Image.fromarray(scene.picture).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    picture = {"type": "image_url", "image_url": {"url": url}}
    return [{"role": "user", "content": [{"type": "text", "text": question}, picture]}]


def test_answers():
    rng = random.Random("eyes")
    asked = [one for kind in KINDS for one in exam(kind, 6, rng, heldout=False)]
    chats = [chat(question.text, scene) for question, scene in asked]
    with LLM(EYES, max_model_len=256, num_gpu_blocks_override=100) as llm:
        outputs = llm.chat(chats, SamplingParams(**PLAIN), use_tqdm=False)
    pairs = zip(asked, outputs, strict=True)
    right = [question.answer == output.outputs[0].text for (question, _), output in pairs]
    assert sum(right) >= 20


def test_its_numbers_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    model = transformers.LlavaForConditionalGeneration.from_pretrained(
        resolve_model(EYES), dtype=torch.float32
    )
    scene = make_scene(random.Random(1))
    with LLM(EYES, dtype="float32", max_model_len=256, num_gpu_blocks_override=100) as llm:
        (output,) = llm.chat(
            chat("Describe the picture.", scene),
            SamplingParams(**PLAIN, logprobs=0),
            use_tqdm=False,
        )
    prompt, answer = output.prompt_token_ids, output.outputs[0]
    levels = torch.from_numpy(scene.picture).permute(2, 0, 1)[None] / 127.5 - 1
    ids = torch.tensor([[*prompt, *answer.token_ids]])
    with torch.no_grad():
        logits = model(input_ids=ids, pixel_values=levels).logits[0, len(prompt) - 1 : -1]
    best = logits.log_softmax(-1).max(-1)
    assert best.indices.tolist() == list(answer.token_ids)
    found = [
        row[token].logprob for row, token in zip(answer.logprobs, answer.token_ids, strict=True)
    ]
    torch.testing.assert_close(torch.tensor(found), best.values, atol=1e-4, rtol=1e-4)
