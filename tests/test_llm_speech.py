"""`LLM.transcribe` with a small model."""

import mmap

import numpy as np
import pytest

from octavo import LLM, llm_speech
from octavo.errors import RequestError
from tests.media.sounds import chirp, wav
from tests.speech_model import write_speech_model


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = write_speech_model(tmp_path_factory.mktemp("speech"))
    with LLM(folder, load_format="dummy", max_num_seqs=4, max_num_batched_tokens=1024) as made:
        yield made


def sounds():
    random = np.random.default_rng(0)
    return [
        chirp(3.0)[0],
        random.normal(0, 0.1, 16_000 * 15).astype(np.float32),
        np.zeros(16_000, np.float32),
        chirp(5.9)[0],
    ]


@pytest.mark.parametrize("options", [{"timestamps": False}, {"language": "German", "prompt": "Hm"}])
def test_a_sound_has_the_same_transcript_among_others(llm, options):
    together = llm.transcribe(sounds(), **options)
    alone = [llm.transcribe(sound, **options)[0] for sound in sounds()]
    assert together == alone
    assert together[2].segments == []
    assert [one.duration for one in together] == [3.0, 15.0, 1.0, pytest.approx(5.9)]


def test_timestamps_follow_the_rules(llm):
    # Each temperature has its turn: the answers of a model without training are improbable.
    for transcript in llm.transcribe(sounds(), language="en", temperature=0.7):
        for segment in transcript.segments:
            assert 0 <= segment.start <= segment.end <= transcript.duration
            assert not {1, 2} & set(segment.tokens)


def test_files_and_bytes(llm, tmp_path):
    samples = (chirp(1.0)[0] * 2**15).astype("<i2")
    data = wav(samples)
    (tmp_path / "a.wav").write_bytes(data)
    array = samples / np.float32(2**15)
    assert isinstance(llm_speech._content(tmp_path / "a.wav").obj, mmap.mmap)  # no copy in memory
    results = llm.transcribe([str(tmp_path / "a.wav"), tmp_path / "a.wav", data, array])
    assert results == results[:1] * 4
    assert results[0].language in ("en", "de")


@pytest.mark.parametrize(
    ("sound", "message"),
    [
        (b"no sound", r"sounds\[0\]: The file is no sound of a supported format"),
        (__file__, r"test_llm_speech.py: The file is no sound"),
        ("/nowhere/a.wav", r"sounds\[0\]: /nowhere/a.wav: No such file"),
        (np.zeros(5), r"sounds\[0\] is an array float64 \[5\]"),
        (np.zeros((2, 5), np.float32), r"sounds\[0\] is an array float32 \[2, 5\]"),
        (np.full(5, np.nan, np.float32), r"give finite samples"),
        (np.zeros(0, np.float32), r"sounds\[0\] has no samples"),
        (5, r"sounds\[0\] is a int; give a file's name"),
    ],
    ids=str,
)
def test_wrong_sounds(llm, sound, message):
    with pytest.raises(RequestError, match=message) as caught:
        llm.transcribe([sound])
    assert caught.value.param == "sounds[0]"


def test_a_model_that_does_not_hear():
    with LLM() as llm, pytest.raises(RequestError, match="does not transcribe") as caught:
        llm.transcribe(chirp(1.0)[0])
    assert caught.value.code == "unsupported_task"
