"""Speed of speech to text: Octavo beside faster-whisper and transformers, with real clips.

    python benchmarks/speech.py MODEL SOUNDS [--engines octavo transformers]
        [--faster-whisper PYTHON FOLDER] [--dtypes float32 int8] [--rounds 5]

MODEL is a Whisper model in transformers' layout, SOUNDS a folder of WAV files of 16 kHz.
FOLDER is the same model in CTranslate2's layout, and PYTHON an interpreter that has faster-whisper.
Each engine loads the model once, with all cores, greedy search and no timestamps. Then the engines
take turns: all clips one after another, and 16 clips at once (the files again, at other volumes).
faster-whisper does not batch several files, so its 16 clips are 16 calls. All engines pad a clip to
30 s. transformers has no int8. Prints the medians of real-time factors (seconds of sound in a
second) and the ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import wave
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

Clips = list[NDArray[np.float32]]
Engine = Callable[[Clips], list[str]]
BATCH = 16


def read_clips(folder: Path) -> Clips:
    """Return the samples of a folder's WAV files of 16 bits and 16 kHz."""
    clips = []
    for file in sorted(folder.glob("*.wav")):
        with wave.open(str(file)) as sound:
            if sound.getframerate() != 16000 or sound.getsampwidth() != 2:
                raise SystemExit(f"{file} is not of 16 kHz and 16 bits.")
            samples = np.frombuffer(sound.readframes(sound.getnframes()), np.int16)
        clips.append(samples.astype(np.float32) / np.float32(32768))
    return clips


def octavo(model: str, dtype: str) -> Engine:
    """Return the engine Octavo."""
    from octavo import LLM

    options: dict[str, Any] = {"quantization": "int8"} if dtype == "int8" else {}
    llm = LLM(model, dtype="float32" if dtype == "int8" else dtype, **options)

    def run(clips: Clips) -> list[str]:
        llm.reset_prefix_cache()
        found = llm.transcribe(clips, language="en", timestamps=False)
        return [transcript.text for transcript in found]

    return run


def faster_whisper(folder: str, dtype: str) -> Engine:
    """Return the engine faster-whisper (CTranslate2)."""
    from faster_whisper import WhisperModel

    model = WhisperModel(folder, device="cpu", compute_type=dtype)

    def run(clips: Clips) -> list[str]:
        texts = []
        for clip in clips:
            segments, _ = model.transcribe(
                clip, language="en", beam_size=1, temperature=0.0, without_timestamps=True
            )
            texts.append(" ".join(segment.text for segment in segments))
        return texts

    return run


def transformers(folder: str, dtype: str) -> Engine:
    """Return the engine transformers."""
    import torch
    from transformers import AutoTokenizer, WhisperFeatureExtractor, WhisperForConditionalGeneration

    model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=getattr(torch, dtype))
    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def run(clips: Clips) -> list[str]:
        features = extractor(clips, sampling_rate=16000, return_tensors="pt").input_features
        with torch.no_grad():
            tokens = model.generate(features.to(model.dtype), num_beams=1, do_sample=False)
        texts: list[str] = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return texts

    return run


ENGINES: dict[str, Callable[[str, str], Engine]] = {
    "octavo": octavo,
    "faster-whisper": faster_whisper,
    "transformers": transformers,
}


def work(name: str, model: str, dtype: str, sounds: Path) -> None:
    """Transcribe whenever a line arrives; print the seconds of each turn and the texts."""
    run, clips = ENGINES[name](model, dtype), read_clips(sounds)
    # Different volumes, so that no engine can compute a clip once for several.
    batch = [clips[i % len(clips)] * np.float32(1 - i / 64) for i in range(BATCH)]
    out = sys.stdout
    sys.stdout = sys.stderr
    texts = [text for clip in clips for text in run([clip])]
    for _ in sys.stdin:
        begin = time.perf_counter()
        for clip in clips:
            run([clip])
        middle = time.perf_counter()
        run(batch)
        end = time.perf_counter()
        print(json.dumps([middle - begin, end - middle, texts]), file=out, flush=True)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("sounds", type=Path)
    parser.add_argument("--engines", nargs="+", default=["octavo"], choices=list(ENGINES))
    parser.add_argument("--faster-whisper", nargs=2, metavar=("PYTHON", "FOLDER"))
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work, args.model, args.dtypes[0], args.sounds)
        return
    clips = read_clips(args.sounds)
    seconds = [sum(map(len, clips)) / 16000]
    seconds.append(sum(len(clips[i % len(clips)]) for i in range(BATCH)) / 16000)
    engines: dict[str, tuple[str, str]] = dict.fromkeys(args.engines, (sys.executable, args.model))
    if args.faster_whisper:
        engines["faster-whisper"] = tuple(args.faster_whisper)
    for dtype in args.dtypes:
        compare(engines, dtype, args.sounds, seconds, args.rounds)


def compare(
    engines: dict[str, tuple[str, str]], dtype: str, sounds: Path, seconds: list[float], rounds: int
) -> None:
    """Print the figures of one type of numbers.

    Args:
        engines: interpreter and model of each engine.
        dtype: "float32", "bfloat16" or "int8".
        sounds: folder of the clips.
        seconds: seconds of sound of each of the two workloads.
        rounds: number of turns of each engine.
    """
    processes = {}
    for name, (python, model) in engines.items():
        if dtype == "int8" and name == "transformers":
            continue
        command = [python, __file__, model, str(sounds), "--dtypes", dtype, "--work", name]
        processes[name] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    times: dict[str, list[list[float]]] = {name: [] for name in processes}
    texts = {}
    for _ in range(rounds):
        for name, process in processes.items():
            print(file=_pipe(process.stdin), flush=True)
            *found, texts[name] = json.loads(_pipe(process.stdout).readline())
            times[name].append(found)
    for process in processes.values():
        _pipe(process.stdin).close()
        process.wait()
    medians = {n: [statistics.median(t) for t in zip(*times[n], strict=True)] for n in times}
    for name, found in medians.items():
        parts = [f"{s / t:8.1f}x" for s, t in zip(seconds, found, strict=True)]
        ratios = [f"{t / o:6.2f}" for t, o in zip(found, medians["octavo"], strict=True)]
        print(f"{dtype:9} {name:15} one by one, {BATCH} at once:", *parts, "  Octavo is", *ratios)
        print("          ", " ".join(text.strip() for text in texts[name])[:160])


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


if __name__ == "__main__":
    main()
