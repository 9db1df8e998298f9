"""`octavo transcribe`: what is said in sound files."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, get_args

from octavo.config.arguments import add_engine_settings, engine_kwargs
from octavo.errors import ConfigError, reason_of
from octavo.llm import LLM
from octavo.speech.formats import ResponseFormat, write
from octavo.speech.segments import Transcript
from octavo.speech.transcription import TIMED_FORMATS

_SUFFIXES = {"text": ".txt", "json": ".json", "verbose_json": ".json", "srt": ".srt", "vtt": ".vtt"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the files, the flags of the transcripts, and those of the engine."""
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="+",
        help="Sounds: WAV, FLAC, MP3, Ogg, M4A, MP4, WebM or AAC; of a video, the sound is read.",
    )
    add = parser.add_argument_group("transcribe").add_argument
    add(
        "--format",
        choices=get_args(ResponseFormat),
        default="text",
        help="Form of the transcripts: OpenAI's text, json, verbose_json, srt or vtt [text].",
    )
    add(
        "--out-dir",
        metavar="FOLDER",
        help="Write a file for each sound to this folder, instead of standard output.",
    )
    add(
        "--language",
        metavar="NAME",
        help="Language that is spoken: a code such as de, or an English name [detected].",
    )
    add("--translate", action="store_true", help="Translate to English.")
    add(
        "--prompt",
        default="",
        metavar="TEXT",
        help="Text before the sound, which shows names and style.",
    )
    add(
        "--word-timestamps",
        action="store_true",
        help="Write the times of words, too; with --format verbose_json.",
    )
    add_engine_settings(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Write the transcripts.

    Returns:
        The numbers of sounds, and their seconds.

    Raises:
        ConfigError, ModelError, HubError: a flag, a setting or a model is unusable.
        RequestError: a sound cannot be read, or the model cannot do what is asked.
    """
    if args.word_timestamps and args.format != "verbose_json":
        raise ConfigError(
            f"--word-timestamps needs --format verbose_json, not {args.format}; leave it out."
        )
    folder = None if args.out_dir is None else Path(args.out_dir)
    outs = _outputs(folder, args.files, args.format)
    texts: dict[int, str] = {}

    def take(number: int, transcript: Transcript) -> None:
        """Write a transcript to its file, or keep it: a progress bar may be on the terminal."""
        text = write(transcript, args.format, words=args.word_timestamps)
        if (out := outs[number]) is None:
            texts[number] = text if text.endswith("\n") else text + "\n"
            return
        try:
            out.write_text(text, "utf-8")
        except OSError as error:
            raise ConfigError(f"{out} cannot be written: {reason_of(error)}.") from None

    try:
        with LLM(**engine_kwargs(args)) as llm:
            transcripts = llm.transcribe(
                args.files,
                language=args.language,
                task="translate" if args.translate else "transcribe",
                prompt=args.prompt,
                timestamps=args.format in TIMED_FORMATS,
                word_timestamps=args.word_timestamps,
                use_tqdm=sys.stderr.isatty(),
                on_transcript=take,
            )
    finally:
        sys.stdout.write("".join(texts[number] for number in sorted(texts)))
    return {"sounds": len(transcripts), "seconds": sum(one.duration for one in transcripts)}


def _outputs(folder: Path | None, files: list[str], form: ResponseFormat) -> list[Path | None]:
    """Return the file of each transcript; None: standard output.

    Raises:
        ConfigError: the folder cannot be made, a file exists, or two have the same name.
    """
    if folder is None:
        return [None] * len(files)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out-dir {folder} cannot be made: {reason_of(error)}.") from None
    outs = [folder / (Path(file).stem + _SUFFIXES[form]) for file in files]
    for i, out in enumerate(outs):
        if out.exists() or out in outs[:i]:
            raise ConfigError(
                f"{out} exists already, or two sounds have this name; name another folder."
            )
    return list(outs)
