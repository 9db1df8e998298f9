"""Questions about a picture, answered by the built-in model of pictures.

    python examples/picture.py
    python examples/picture.py FILE "What is at the top?"

Without arguments it draws a picture first. The model is tiny: it knows six shapes and eight colors
on a light ground, and nothing else. With a larger model, such as
Qwen/Qwen2.5-VL-3B-Instruct, the same lines work for pictures of any kind.
"""

from __future__ import annotations

import sys

from PIL import Image, ImageDraw

from octavo import LLM, SamplingParams

QUESTIONS = ["Describe the picture.", "What is on the right?", "What shape is green?"]


def draw() -> Image.Image:
    picture = Image.new("RGB", (384, 384), "white")
    pen = ImageDraw.Draw(picture)
    pen.ellipse((20, 20, 110, 110), fill=(220, 30, 35))
    pen.rectangle((280, 150, 360, 230), fill=(40, 75, 215))
    pen.polygon([(192, 275), (240, 360), (144, 360)], fill=(40, 155, 60))
    return picture


def main(arguments: list[str]) -> None:
    picture = Image.open(arguments[0]) if arguments else draw()
    with LLM("octavo/stories-eyes") as llm:
        for question in arguments[1:] or QUESTIONS:
            content = [
                {"type": "image_pil", "image_pil": picture},
                {"type": "text", "text": question},
            ]
            params = SamplingParams(temperature=0, max_tokens=80)
            (output,) = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
            print(f"{question} {output.outputs[0].text}")


if __name__ == "__main__":
    main(sys.argv[1:])
