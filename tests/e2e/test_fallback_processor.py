"""A server of a model whose processor only transformers has: its answers are transformers'."""

import base64
import io
import json

import numpy as np
import torch
import transformers
from PIL import Image

from tests.e2e.harness import serve
from tests.pictures import ID, picture, save_model

VIT = {"image_processor_type": "ViTImageProcessor", "size": {"height": 16, "width": 16}}
TEMPLATE = (
    "{% for m in messages %}{% for p in m['content'] %}"
    "{{ '<image>' if p['type'] == 'image' else p['text'] }}{% endfor %}{% endfor %}"
)


def test_chat_with_a_picture(tmp_path):
    folder = tmp_path / "model"
    model = save_model("llava", folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(VIT))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    pixels = picture(48, 30)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    body = {"model": str(folder), "messages": [{"role": "user", "content": parts}]}
    body |= {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
    body |= {"logit_bias": {str(token): -100 for token in ID.values()}}
    flags = ["--dtype", "float32", "--max-model-len", "200"]
    with serve(tmp_path, *flags, model=str(folder)) as server:
        answer = server.post("/v1/chat/completions", body).json()
        assert "transformers' ViTImageProcessor, since" in server.log.read_text()
        small = {**body, "mm_processor_kwargs": {"image_mean": [0.1, 0.2, 0.3]}}
        refused = server.post("/v1/chat/completions", small)
        assert refused.status_code == 400
    tokens = answer["choices"][0]["token_ids"]
    values = transformers.ViTImageProcessorPil(**VIT)(pixels, return_tensors="pt")["pixel_values"]
    ids = answer["prompt_token_ids"]
    assert ids.count(ID["<image>"]) == 16
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids + tokens[:-1]]), pixel_values=values).logits[0]
    logits = logits[len(ids) - 1 :].numpy().copy()
    logits[:, list(ID.values())] = -np.inf
    assert logits.argmax(-1).tolist() == tokens
