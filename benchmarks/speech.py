"""Speed of speech to text: Octavo beside faster-whisper and transformers, with real clips.

    python benchmarks/speech.py MODEL SOUNDS [--engines octavo transformers]
        [--faster-whisper PYTHON FOLDER] [--whisper-cpp PYTHON FOLDER]
        [--dtypes float32 int8] [--rounds 5] [--new-clips]

MODEL is a Whisper model in transformers' layout, SOUNDS a folder of WAV files of 16 kHz.
FOLDER is the same model in CTranslate2's layout, and PYTHON an interpreter that has faster-whisper.
For whisper.cpp PYTHON has pywhispercpp, and FOLDER the files f16.bin and q8_0.bin, which count as
float32 and int8: whisper.cpp computes convolutions only with float16 weights. Each engine loads the
model once, with all cores, greedy search and no timestamps. Then the engines take turns: all clips
one after another, and 16 clips at once (the files again, at other volumes). faster-whisper and
whisper.cpp do not batch several files: their 16 clips are 16 calls. All engines pad a clip to 30 s.
transformers has no int8. Octavo's prefix cache is reset before each call; with --new-clips it is
not, and the clips have another volume in each turn. Prints the medians of real-time factors
(seconds of sound in a second) and the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
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


def octavo(model: str, dtype: str, *, keeps_cache: bool = False) -> Engine:
    """Return the engine Octavo."""
    from octavo import LLM

    options: dict[str, Any] = {"quantization": "int8"} if dtype == "int8" else {}
    llm = LLM(model, dtype="float32" if dtype == "int8" else dtype, **options)

    def run(clips: Clips) -> list[str]:
        if not keeps_cache:
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


def whisper_cpp(folder: str, dtype: str) -> Engine:
    """Return the engine whisper.cpp."""
    from pywhispercpp.model import Model

    options: dict[str, Any] = {"language": "en", "no_timestamps": True, "single_segment": True}
    options |= {"no_context": True, "temperature_inc": 0.0, "greedy": {"best_of": 1}}
    options |= {"print_progress": False, "print_realtime": False}
    file = Path(folder, "q8_0.bin" if dtype == "int8" else "f16.bin")
    cores = len(os.sched_getaffinity(0))
    model = Model(str(file), n_threads=cores, redirect_whispercpp_logs_to=None, **options)

    def run(clips: Clips) -> list[str]:
        return [" ".join(part.text for part in model.transcribe(clip)) for clip in clips]

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


ENGINES: dict[str, Callable[..., Engine]] = {
    "octavo": octavo,
    "faster-whisper": faster_whisper,
    "whisper.cpp": whisper_cpp,
    "transformers": transformers,
}


def work(name: str, model: str, dtype: str, sounds: Path, new_clips: bool) -> None:
    """Transcribe whenever a line arrives; print the seconds of each turn and the texts."""
    more = {"keeps_cache": True} if new_clips and name == "octavo" else {}
    run, files = ENGINES[name](model, dtype, **more), read_clips(sounds)
    out = sys.stdout
    sys.stdout = sys.stderr
    texts = [text for clip in files for text in run([clip])]
    print("ready", file=out, flush=True)
    for turn, _ in enumerate(sys.stdin, 1):
        volume = 1 - turn / 256 if new_clips else 1
        clips = [clip * np.float32(volume) for clip in files]
        # Different volumes, so that no engine can compute a clip once for several.
        batch = [clips[i % len(clips)] * np.float32(1 - (i + 1) / 64) for i in range(BATCH)]
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
    parser.add_argument("--whisper-cpp", nargs=2, metavar=("PYTHON", "FOLDER"))
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-clips", action="store_true")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work, args.model, args.dtypes[0], args.sounds, args.new_clips)
        return
    clips = read_clips(args.sounds)
    seconds = [sum(map(len, clips)) / 16000]
    seconds.append(sum(len(clips[i % len(clips)]) for i in range(BATCH)) / 16000)
    engines: dict[str, tuple[str, str]] = dict.fromkeys(args.engines, (sys.executable, args.model))
    if args.faster_whisper:
        engines["faster-whisper"] = tuple(args.faster_whisper)
    if args.whisper_cpp:
        engines["whisper.cpp"] = tuple(args.whisper_cpp)
    for dtype in args.dtypes:
        compare(engines, dtype, args.sounds, seconds, args.rounds, args.new_clips)


def compare(
    engines: dict[str, tuple[str, str]],
    dtype: str,
    sounds: Path,
    seconds: list[float],
    rounds: int,
    new_clips: bool,
) -> None:
    """Print the figures of one type of numbers.

    Args:
        engines: interpreter and model of each engine.
        dtype: "float32", "bfloat16" or "int8".
        sounds: folder of the clips.
        seconds: seconds of sound of each of the two workloads.
        rounds: number of turns of each engine.
        new_clips: True: no engine meets a clip again, and no cache is reset.
    """
    processes = {}
    for name, (python, model) in engines.items():
        if dtype == "int8" and name == "transformers":
            continue
        command = [python, __file__, model, str(sounds), "--dtypes", dtype, "--work", name]
        command += ["--new-clips"] * new_clips
        processes[name] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        _pipe(processes[name].stdout).readline()  # it is ready
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
        ranges = [f"{min(t):.3f}-{max(t):.3f}" for t in zip(*times[name], strict=True)]
        print(f"{dtype:9} {name:15} one by one, {BATCH} at once:", *parts, "  Octavo is", *ratios)
        print("           seconds of a turn:", *ranges)
        print("          ", " ".join(text.strip() for text in texts[name])[:160])


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


if __name__ == "__main__":
    main()
