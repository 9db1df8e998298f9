"""Videos for tests: frames, files, and transformers' answers of models that read them."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import av
import numpy as np
import torch

from octavo import LLM
from octavo.multimodal.items import Item
from tests.pictures import ID, picture, unified_masks


def frames(count: int, height: int, width: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Return random frames: uint8 [count, height, width, 3]."""
    return np.stack([picture(height, width, 100 * seed + i) for i in range(count)])


def smooth_frames(count: int, height: int, width: int) -> np.ndarray[Any, Any]:
    """Return frames that a codec changes little; the mean of each names its index."""
    rows = np.linspace(0, 20, height)[:, None, None]
    ramp = np.broadcast_to(rows, (height, width, 3))
    return np.stack(
        [(ramp + 5 + 180 * i / max(count - 1, 1)).astype(np.uint8) for i in range(count)]
    )


def video_file(
    pixels: Sequence[np.ndarray[Any, Any]],
    kind: str = "mp4",
    codec: str = "libx264",
    fps: int = 4,
    **options: str,
) -> bytes:
    """Return a video file with these frames."""
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=fps, options=options)
        stream.height, stream.width = pixels[0].shape[:2]
        stream.pix_fmt = {"gif": "rgb8"}.get(codec, "yuv420p")
        for image in pixels:
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def _array(part: Any, name: str) -> torch.Tensor:
    tensor = part.fields[name]
    array = np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape)
    return torch.from_numpy(array.copy())


def _arrays(items: Sequence[Item], name: str) -> torch.Tensor:
    return torch.cat([_array(part, name) for item in items for part in item.parts])


def _qwen(items: Sequence[Item], seconds: float | None) -> dict[str, Any]:
    grids = []
    for item in items:
        grid = _array(item.parts[0], "image_grid_thw")
        grid[0] = len(item.parts)
        grids.append(grid)
    found = {
        "pixel_values_videos": _arrays(items, "pixel_values"),
        "video_grid_thw": torch.stack(grids),
    }
    if seconds is not None:
        found["second_per_grid_ts"] = torch.tensor([seconds] * len(items))
    return found


@dataclass(frozen=True)
class VideoCase:
    """How transformers reads the videos of a model of tests/pictures.py."""

    text: str
    """Text that the chat template writes for a video."""
    join: Any
    token: str
    """Token that rows replace."""
    num_frames: int = 5


def _gemma4(items: Sequence[Item]) -> dict[str, Any]:
    return {
        "pixel_values_videos": torch.stack(
            [_array(part, "pixel_values") for item in items for part in item.parts]
        ),
        "video_position_ids": torch.stack(
            [_array(part, "image_position_ids") for item in items for part in item.parts]
        ),
        "num_frames_per_video": torch.tensor([len(item.parts) for item in items]),
    }


QWEN_TEXT = "<|vision_start|><|video_pad|><|vision_end|>"
SECONDS = 1.5
"""Seconds of two frames at FPS."""
FPS = 4 / 3
VIDEO_CASES = {
    "qwen2_vl": VideoCase(QWEN_TEXT, lambda items: _qwen(items, None), "<|video_pad|>"),
    "qwen2_5_vl": VideoCase(QWEN_TEXT, lambda items: _qwen(items, SECONDS), "<|video_pad|>"),
    "qwen3_vl": VideoCase(QWEN_TEXT, lambda items: _qwen(items, None), "<|video_pad|>"),
    "qwen3_5": VideoCase(QWEN_TEXT, lambda items: _qwen(items, None), "<|video_pad|>"),
    "gemma4": VideoCase("<|video|>", _gemma4, "<|video|>", num_frames=3),
    "gemma4_e": VideoCase("<|video|>", _gemma4, "<|video|>", num_frames=3),
    "gemma4_unified": VideoCase("<|video|>", _gemma4, "<|video|>", num_frames=3),
    "smolvlm": VideoCase(
        "<video>", lambda items: {"pixel_values": _arrays(items, "pixel_values")[None]}, "<image>"
    ),
    "internvl": VideoCase(
        "<video>", lambda items: {"pixel_values": _arrays(items, "pixel_values")}, "<IMG_CONTEXT>"
    ),
    "llava_onevision": VideoCase(
        "<video>",
        lambda items: {
            "pixel_values_videos": torch.stack([_arrays([i], "pixel_values") for i in items])
        },
        "<video>",
    ),
}


def hf_video_logprobs(
    model: Any, name: str, llm: LLM, ids: Sequence[int], videos: Sequence[Any]
) -> torch.Tensor:
    """Return transformers' log-probabilities after each token: [tokens, vocab]."""
    reader = llm.llm_engine.input_processor._media.readers["video"]
    case = VIDEO_CASES[name]
    items = [reader.read(video, {}, 0) for video in videos]
    arrays = case.join(items)
    tokens = torch.tensor([list(ids)])
    if "video_grid_thw" in arrays or "video_position_ids" in arrays:
        arrays["mm_token_type_ids"] = 2 * (tokens == ID[case.token]).int()
    if name == "gemma4_unified":
        arrays["attention_mask"] = unified_masks(model, tokens, arrays["mm_token_type_ids"])
    with torch.inference_mode():
        logits = model(input_ids=tokens, **arrays).logits[0]
    return logits.float().log_softmax(-1)
