"""Pictures: Octavo's server beside llama.cpp's, and what pictures cost the texts beside them.

    python benchmarks/pictures.py make FOLDER --llama-cpp SOURCES
    python benchmarks/pictures.py first FOLDER --llama BUILD/bin/llama-server --kind bf16 --rounds 3
    python benchmarks/pictures.py again FOLDER
    python benchmarks/pictures.py flood FOLDER
    python benchmarks/pictures.py tower FOLDER --rounds 5
    python benchmarks/pictures.py peer FOLDER --url http://127.0.0.1:8000 --rounds 3

make: a model with random weights in the shape of Qwen3-VL-2B with fewer layers (4 of the text part,
6 of the tower, all with their own widths), and llama.cpp's conversion of it: text part and mmproj,
in bf16 and q8_0. SOURCES is a folder of llama.cpp.

first: seconds to the first token of a chat with a new picture of 1024 x 1024 pixels (JPEG in a data
URL; 4,096 patches, 1,024 tokens) and a short text, for both servers with the same files and cores.
The servers take turns in each round; each gets one request for warmth, then three that count.

again: a chat whose rows and prefix are cached: it is sent four times, and the last three count.
Beside it a text with as many tokens, asked alike. Prints the medians of six chats.

flood: eight chats with texts at a time, four times, are answered with 64 tokens each, alone, and
while a client sends chats with new pictures, always two at once. Prints the milliseconds of a
token, by answer (TPOT): median and 99th percentile, and their ratios; the seconds to the first
token of the pictures' chats; and the longest pause between two tokens of a text.

tower: the tower alone with a picture of 1024 x 1024 pixels, from patches to rows, in bfloat16 and
float32, with and without int8 weights. Its operations are those of all products, and of the
attention of all patches to all patches; norms, activations, rotation and softmax count as none. A
product of 2048^3 of the same type is measured before each run: the matrix peak. Prints the medians,
and the shares of the slowest kernels.

peer: the same as `first` in bf16 beside a server that already runs, such as vLLM's, which reads
FOLDER/hf. The servers take turns of two new pictures; the first turns are for warmth.
"""

from __future__ import annotations

import argparse
import base64
import io
import itertools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from gguf_speed import free_port

SIDE = 1024
TEXT_LAYERS, TOWER_LAYERS = 4, 6
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}"
    "{% else %}" + PLACE + "{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
)
KINDS = ("bf16", "q8_0")
# The converter identifies pre-tokenizers by hashes of published tokenizers.
CONVERT = """
import sys
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
TextModel._set_vocab_sentencepiece = TextModel._set_vocab_gpt2
from convert_hf_to_gguf import main
main()
"""


def make(folder: Path, sources: Path) -> None:
    """Write the model and its conversions."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, "ab", *(f"<{i}>" for i in range(32000 - 257 - len(SPECIAL)))]
    vocab = {name: i for i, name in enumerate([*names, *SPECIAL])}
    size = len(vocab)
    text = {"vocab_size": size, "hidden_size": 2048, "intermediate_size": 6144}
    text |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    text |= {"num_hidden_layers": TEXT_LAYERS, "max_position_embeddings": 32768}
    text |= {"bos_token_id": None, "eos_token_id": size - 1, "pad_token_id": size - 1}
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]}
    vision = {"depth": TOWER_LAYERS, "hidden_size": 1024, "intermediate_size": 4096}
    vision |= {"num_heads": 16, "patch_size": 16, "out_hidden_size": 2048}
    vision |= {"num_position_embeddings": 2304}
    vision["deepstack_visual_indexes"] = [1, 3, 5]
    ids = {"image_token_id": size - 3, "video_token_id": size - 2}
    ids |= {"vision_start_token_id": size - 5, "vision_end_token_id": size - 4}
    config = Qwen3VLConfig(
        text_config=text | {"rope_parameters": rope}, vision_config=vision, **ids
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = Qwen3VLForConditionalGeneration(config)
    torch.set_default_dtype(torch.float32)
    hf = folder / "hf"
    model.save_pretrained(hf)
    backend = Tokenizer(models.BPE(vocab, [("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(hf)
    pictures = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "patch_size": 16}
    (hf / "preprocessor_config.json").write_text(json.dumps(pictures))
    environment = os.environ | {"PYTHONPATH": f"{sources}:{sources}/gguf-py"}
    for kind, name in itertools.product(KINDS, ("model", "mmproj")):
        words = [str(hf), "--outtype", kind, "--outfile", str(folder / kind / f"{name}.gguf")]
        (folder / kind).mkdir(exist_ok=True)
        more = ["--mmproj"] if name == "mmproj" else []
        subprocess.run([sys.executable, "-c", CONVERT, *words, *more], env=environment, check=True)


def new_picture(seed: int) -> str:
    """Return the data URL of a smooth picture as a JPEG."""
    import PIL.Image

    small = np.random.default_rng(seed).integers(0, 256, (24, 24, 3), np.uint8)
    image = PIL.Image.fromarray(small).resize((SIDE, SIDE), PIL.Image.Resampling.BICUBIC)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def chat(port: int | str, content: Any, tokens: int = 1) -> tuple[float, float, float]:
    """Return the seconds to the first token, the seconds of each further one, and the longest
    pause between two.

    Args:
        port: port of this machine, or the address of a server.
        content: content of the message.
        tokens: number of tokens of the answer.
    """
    address = port if isinstance(port, str) else f"http://127.0.0.1:{port}"
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": tokens}
    body |= {"temperature": 0, "stream": True, "ignore_eos": True}
    request = urllib.request.Request(
        f"{address}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    begin, first, last, longest = time.perf_counter(), 0.0, 0.0, 0.0
    with urllib.request.urlopen(request, timeout=300) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            choices = json.loads(line[6:]).get("choices") or [{}]
            now = time.perf_counter()
            # A token may have no text; the first event may have the role alone.
            delta = choices[0].get("delta") or {}
            has_token = delta.get("content") is not None and "role" not in delta
            if has_token or choices[0].get("finish_reason"):
                longest = max(longest, now - last if first else 0.0)
                first, last = first or now, now
    return first - begin, (last - first) / max(1, tokens - 1), longest


def with_picture(url: str, text: str = "What is it?") -> list[dict[str, Any]]:
    """Return the content of a message with a picture."""
    return [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": text},
    ]


@contextmanager
def serving(command: list[str], ready: str) -> Iterator[int]:
    """Start a server and yield its port once the path `ready` answers."""
    port = free_port()
    words = [*command, "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}{ready}", timeout=5).close()
                    break
                except OSError:
                    if server.poll() is not None:
                        raise SystemExit(f"{command[0]} did not start") from None
                    time.sleep(0.05)
            yield port
        finally:
            server.terminate()


def octavo(file: Path) -> tuple[list[str], str]:
    """Return the command of Octavo's server, and its path that answers once it is ready."""
    words = [sys.executable, "-m", "octavo", "serve", str(file), "--max-model-len", "8192"]
    return [*words, "--kv-cache-memory-bytes", "1G", "--max-num-seqs", "16"], "/ready"


def llama(server: str, file: Path) -> tuple[list[str], str]:
    """Return the same of llama.cpp's server."""
    cores = str(len(os.sched_getaffinity(0)))
    words = [server, "--model", str(file), "--mmproj", str(file.parent / "mmproj.gguf")]
    words += ["--parallel", "4", "--ctx-size", str(4 * 8192), "--no-webui", "--jinja"]
    return [*words, "--threads", cores, "--threads-batch", cores], "/health"


def measure_first(folder: Path, server: str, kind: str, rounds: int) -> None:
    """Print the seconds to the first token of both servers."""
    file = folder / kind / "model.gguf"
    servers = {"octavo": octavo(file), "llama.cpp": llama(server, file)}
    found: dict[str, list[float]] = {name: [] for name in servers}
    seeds = itertools.count(1)
    for _ in range(rounds):
        for name, command in servers.items():
            with serving(*command) as port:
                chat(port, with_picture(new_picture(0)))
                own = [chat(port, with_picture(new_picture(next(seeds))))[0] for _ in range(3)]
            found[name] += own
            print(name, " ".join(f"{seconds:.3f}" for seconds in own), flush=True)
    ours, theirs = (statistics.median(own) for own in found.values())
    print(f"{kind}: {ours:.3f} s and {theirs:.3f} s: {theirs / ours:.2f}")


def measure_again(folder: Path, kind: str) -> None:
    """Print the seconds of a chat with a known picture, and of a known text."""
    long = "ab" * 1036
    with serving(*octavo(folder / kind / "model.gguf")) as port:
        times: dict[str, list[float]] = {"picture": [], "text": []}
        for seed in range(7):
            url = new_picture(100 + seed)
            for name, content in (("picture", with_picture(url)), ("text", f"{seed}{long}")):
                for turn in range(4):
                    seconds, _, _ = chat(port, content)
                    if turn and seed:
                        times[name].append(seconds)
    picture, text = (1000 * statistics.median(own) for own in times.values())
    print(f"again: {picture:.1f} ms with the picture, {text:.1f} ms text: {picture - text:+.1f} ms")


def measure_flood(folder: Path, kind: str, repeats: int = 4) -> None:
    """Print the milliseconds of a token of texts without and with pictures beside them."""
    with serving(*octavo(folder / kind / "model.gguf")) as port, ThreadPoolExecutor(10) as pool:
        chat(port, with_picture(new_picture(0)))
        urls = [new_picture(1000 + i) for i in range(40)]

        pauses: list[float] = []

        def texts() -> list[float]:
            ms: list[float] = []
            pauses.clear()
            for turn in range(repeats):
                prompts = [f"{turn} {i} " + "some words of a text " * 4 for i in range(8)]
                answers = [*pool.map(lambda p: chat(port, p, 64), prompts)]
                ms += [1000 * it[1] for it in answers]
                pauses.extend(it[2] for it in answers)
            return ms

        texts()
        alone = texts()
        stop, sent, lock = threading.Event(), iter(urls), threading.Lock()
        firsts: list[float] = []

        def flood() -> None:
            while not stop.is_set():
                with lock:
                    url = next(sent, None)
                if url is None:
                    return
                firsts.append(chat(port, with_picture(url))[0])

        running = [pool.submit(flood) for _ in range(2)]
        time.sleep(0.3)
        begin = time.perf_counter()
        beside = texts()
        seconds = time.perf_counter() - begin
        still = not all(it.done() for it in running)
        stop.set()
        for it in running:
            it.result()
    print(
        f"{len(firsts)} pictures in {seconds:.1f} s" + ("" if still else "; they ended too early")
    )
    for name, share in (("median", 50), ("p99", 99)):
        a, b = (float(np.percentile(ms, share)) for ms in (alone, beside))
        print(f"TPOT {name}: {a:.1f} ms alone, {b:.1f} ms beside pictures: {b / a:.2f}")
    print(f"pictures: {statistics.median(firsts):.1f} s to the first token (median)")
    print(f"texts: longest pause {1000 * max(pauses):.0f} ms")


def measure_peer(folder: Path, url: str, rounds: int) -> None:
    """Print the seconds to the first token beside a server that already runs."""
    seeds = itertools.count(1)
    found: dict[str, list[float]] = {"octavo": [], "peer": []}
    with serving(*octavo(folder / "hf")) as port:
        for name, place in itertools.product(("warm", *[""] * rounds), found):
            where = port if place == "octavo" else url
            seconds = [chat(where, with_picture(new_picture(next(seeds))))[0] for _ in range(2)]
            if not name:
                found[place] += seconds
            print(place, name, " ".join(f"{it:.3f}" for it in seconds), flush=True)
    ours, theirs = (statistics.median(own) for own in found.values())
    print(f"{ours:.3f} s and {theirs:.3f} s: {theirs / ours:.2f}")


def measure_tower(folder: Path, rounds: int) -> None:
    """Print the share of the matrix peak that the tower reaches, and where its time goes."""
    from octavo import _native
    from octavo.attention.cpu import CPUAttention
    from octavo.bench.machine import measure_peak
    from octavo.checkpoints.registry import open_checkpoint
    from octavo.config.model import ModelConfig
    from octavo.kernels.native import NativeOps
    from octavo.messages import MultiModalFeatureSpec, PlaceholderRange, TensorData
    from octavo.models.decoder import DecoderModel
    from octavo.models.loader import load_model
    from octavo.models.registry import read_spec
    from octavo.worker.encoder_runner import EncoderRunner, encoder_arena, runner_nbytes

    _native.set_num_threads(len(os.sched_getaffinity(0)))
    file = folder / "hf"
    vision = json.loads((file / "config.json").read_text())["vision_config"]
    side, size, inner = SIDE // vision["patch_size"], vision["hidden_size"], 3 * 2
    patches, numbers = side**2, inner * vision["patch_size"] ** 2
    layer = 2 * patches * (4 * size**2 + 2 * size * vision["intermediate_size"])
    layer += 4 * patches**2 * size
    merged = vision["spatial_merge_size"] ** 2 * size
    merger = 2 * patches * size * (merged + vision["out_hidden_size"])
    flops = vision["depth"] * layer + 2 * patches * numbers * size
    flops += (1 + len(vision["deepstack_visual_indexes"])) * merger
    pixels = np.random.default_rng(0).standard_normal((patches, numbers), np.float32)
    arrays = {"pixel_values": pixels, "image_grid_thw": np.array([1, side, side])}
    data = {
        name: TensorData(str(array.dtype), array.shape, array.tobytes())
        for name, array in arrays.items()
    }
    feature = MultiModalFeatureSpec("image", "", PlaceholderRange(0, 0), data, 0)
    kinds: list[tuple[str, Any]] = [("bfloat16", None), ("bfloat16", "int8")]
    kinds += [("float32", None), ("float32", "int8")]
    for dtype, quantization in kinds:
        checkpoint = open_checkpoint(file)
        spec = read_spec(checkpoint, ModelConfig(quantization=quantization))
        ops, backend = NativeOps(), CPUAttention()
        model = load_model(spec, checkpoint, dtype=dtype, ops=ops)
        assert isinstance(model, DecoderModel)
        (encoder,) = model.encoders
        arena = encoder_arena(runner_nbytes(encoder, ops, backend)[0])
        runner = EncoderRunner(encoder, ops, backend, arena)
        runner.run([feature])
        _native.set_profiling(True)
        _native.take_spans()
        peaks, taken = [], []
        parts: dict[str, list[float]] = {}
        for _ in range(rounds):
            peaks.append(measure_peak(dtype, quantization, seconds=0.5)[0])
            _native.take_spans()
            begin = time.perf_counter()
            runner.run([feature])
            taken.append(time.perf_counter() - begin)
            for name, start, end, _, done, _ in _native.take_spans():
                part = parts.setdefault(name, [0.0, 0.0])
                part[0] += end - start
                part[1] += done
        _native.set_profiling(False)
        shares = [flops / t / top for t, top in zip(taken, peaks, strict=True)]
        peak = statistics.median(peaks) / 1e9
        print(
            f"{dtype} {quantization or ''}: {statistics.median(taken):.3f} s ({min(taken):.3f} to "
            f"{max(taken):.3f}), {flops / 1e9:.0f} GFLOP, peak {peak:.0f} GFLOP/s: "
            f"{statistics.median(shares):.1%} ({min(shares):.1%} to {max(shares):.1%})"
        )
        for name, (seconds, done) in sorted(parts.items(), key=lambda it: -it[1][0])[:8]:
            print(f"  {name:24} {seconds / sum(taken):6.1%}  {done / seconds / 1e9:5.0f} GFLOP/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("what", choices=["make", "first", "again", "flood", "tower", "peer"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--llama-cpp", type=Path, help="Sources of llama.cpp.")
    parser.add_argument("--llama", default="llama-server", help="Its server.")
    parser.add_argument("--kind", choices=KINDS, default="bf16")
    parser.add_argument("--url", default="", help="Server of the peer.")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    match args.what:
        case "make":
            make(args.folder, args.llama_cpp)
        case "first":
            measure_first(args.folder, args.llama, args.kind, args.rounds)
        case "again":
            measure_again(args.folder, args.kind)
        case "flood":
            measure_flood(args.folder, args.kind)
        case "tower":
            measure_tower(args.folder, args.rounds)
        case "peer":
            measure_peer(args.folder, args.url, args.rounds)


if __name__ == "__main__":
    main()
