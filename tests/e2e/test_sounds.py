"""Models of sounds and texts: transformers' numbers, and the same bits in all layouts."""

import base64
import functools
import io
import wave

import numpy as np
import pytest

from octavo.errors import RequestError, UnsupportedError
from tests.pictures import assert_greedy, make_llm
from tests.revival import assert_revived
from tests.sounds import CASES, RATE, hf_logprobs, params, save_model, sound

SOUNDS = [sound(1.3), sound(0.52, 1), sound(1.99, 2)]
LONG = sound(7.1, 3)


def prompt(name, *sounds, text="ab {} cd {} ef", **fields):
    placeholder = CASES[name].placeholder
    return {
        "prompt": text.format(*[placeholder] * len(sounds)),
        "multi_modal_data": {"audio": list(sounds)},
        **fields,
    }


def prompts(name):
    """Return prompts with equal sounds, equal prefixes, and texts among them."""
    first, second, third = SOUNDS if "qwen2" in name else (LONG, *SOUNDS[1:])
    return [
        prompt(name, first, second),
        {"prompt": "only a text of some length, which goes on for more than a block"},
        prompt(name, first, third),
        prompt(name, second, first, text="{}{}"),
        {"prompt": "b"},
        prompt(name, third, text="quite another text before {}"),
    ]


def answers(llm, given, tokens=30):
    """Return all that must be the same in every layout."""
    outputs = llm.generate(given, params(tokens), use_tqdm=False)
    return [(o.prompt_token_ids, o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


@pytest.fixture(scope="module")
def make_saved(tmp_path_factory):
    """Return a function: case -> case, its folder, transformers' model, and the answers of an
    engine that computes one prompt after the other without caches."""

    @functools.cache
    def make(name):
        folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
        model = save_model(name, folder)
        with make_llm(folder, enable_prefix_caching=False, max_num_seqs=1) as llm:
            alone = []
            for one in prompts(name):
                alone += answers(llm, one)
                llm.reset_prefix_cache()  # with it the rows of encoders
        return name, folder, model, alone

    return make


@pytest.fixture(params=["gemma4", "phi4", "qwen2_audio", "qwen3_asr", "voxtral"])
def saved(make_saved, request):
    """Return a case of means, one of chunks, and one of windows and groups."""
    return make_saved(request.param)


@pytest.fixture
def one(make_saved):
    """Return one case, for what no model changes."""
    return make_saved("qwen2_audio")


@pytest.mark.parametrize("name", CASES)
def test_parity(make_saved, name):
    name, _, model, alone = make_saved(name)
    for one, answer in zip(prompts(name), alone, strict=True):
        sounds = one.get("multi_modal_data", {}).get("audio", [])
        ids, tokens, _ = answer
        assert_greedy(answer, hf_logprobs(model, name, [*ids, *tokens], sounds))


def test_batches_and_caches(saved):
    name, folder, _, alone = saved
    with make_llm(folder) as llm:
        assert answers(llm, prompts(name)) == alone
        stats = llm.stats()
        assert stats.mm_cache_queries > stats.mm_cache_hits > 0
        assert answers(llm, prompts(name)[::-1]) == alone[::-1]
        assert llm.stats().prefix_cache_hits > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 8, "enforce_eager": True},  # chunks end within sounds
        {"max_num_batched_tokens": 23, "enable_prefix_caching": False},
        {"max_num_seqs": 4},  # and few blocks
    ],
    ids=["chunks", "uncached", "preemptions"],
)
def test_layouts(saved, settings):
    name, folder, _, alone = saved
    settings = dict(settings)
    if "max_num_batched_tokens" not in settings:
        most = max(len(ids) + len(tokens) for ids, tokens, _ in alone) // 16 + 2
        groups = 2 if name == "gemma4" else 1  # of layers with own blocks
        blocks = groups * most + 2
        settings |= {"num_gpu_blocks_override": blocks, "max_model_len": 16 * most}
    with make_llm(folder, **settings) as llm:
        assert answers(llm, prompts(name) * 2) == alone * 2
        if "num_gpu_blocks_override" in settings:
            assert llm.stats().num_preemptions > 0


def test_death(one):
    """An engine that is killed in the middle of an answer is replaced; the answer goes on."""
    name, folder, _, _ = one
    with make_llm(folder, isolate=True) as llm:
        assert_revived(llm, prompts(name)[0], params(60))


def test_errors(one):
    """A bad sound harms only its own request."""
    name, folder, _, alone = one
    with make_llm(folder, limit_mm_per_prompt={"audio": 2}) as llm:

        def refuse(message, data, text="{}", error=RequestError, **options):
            given = prompt(name, 0, text=text) | {"multi_modal_data": data}
            with pytest.raises(error, match=message):
                llm.generate(given, params(), use_tqdm=False, **options)

        noise = SOUNDS[1]
        refuse("3 sounds; at most 2 are allowed", {"audio": [noise] * 3})
        refuse("1 placeholders for sounds.* 2 sounds", {"audio": [noise] * 2})
        refuse("'image' is not supported", {"image": [noise]}, error=UnsupportedError)
        refuse("'image' is not supported", {"image": noise}, error=UnsupportedError)
        refuse("sound 1: it is a str", {"audio": "file.wav"})
        refuse("sound 1: it is an array int16", {"audio": np.zeros(999, np.int16)})
        refuse("rows of floats.*(samples, sampling_rate)", {"audio": np.zeros((2, 9), np.float32)})
        refuse("sound 1: it has no samples", {"audio": (noise[:0], RATE)})
        refuse("has 320 samples, and the model reads at least 321", {"audio": noise[:320]})
        refuse("has 7.1 s, and at most 6 s are supported", {"audio": LONG})
        refuse("has 36000.0 s, and at most 6 s", {"audio": (np.empty(36_000_000), 1000)})
        refuse("not finite", {"audio": np.array([np.nan] * 999)})
        refuse("not finite", {"audio": np.array([np.inf] * 999, np.float32)})
        refuse("its sampling rate is 3", {"audio": (noise, 3)})
        refuse("its sampling rate is nan", {"audio": (noise, float("nan"))})
        refuse("a tuple of 3 values", {"audio": [(noise, 1, 2)]})
        refuse("top is not allowed", {"audio": noise}, mm_processor_kwargs={"top": 1})
        assert answers(llm, prompts(name)) == alone


def test_forms_of_a_sound(one):
    """Another rate is resampled; chats have files in base64; `(samples, rate)` is one sound."""
    name, folder, _, alone = one
    with make_llm(folder) as llm:
        pairs = [(SOUNDS[0].astype(np.float64), RATE), (SOUNDS[1], float(RATE))]
        assert answers(llm, prompt(name, *pairs)) == alone[:1]
        last = prompts(name)[-1]
        given = {**last, "multi_modal_data": {"audio": (SOUNDS[2], RATE)}}
        assert answers(llm, given) == alone[-1:]
        given["multi_modal_data"] = {"audio": (np.repeat(SOUNDS[2], 2), 2 * RATE)}
        ((ids, tokens, _),) = answers(llm, given)
        assert (len(ids), len(tokens)) == (len(alone[-1][0]), 30)


def wav(samples, rate=RATE):
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes((samples * 32768).clip(-32768, 32767).astype("<i2").tobytes())
    return file.getvalue()


def test_chats(one, monkeypatch):
    name, folder, _, _ = one
    samples = np.round(SOUNDS[1] * 32768) / 32768
    data = base64.b64encode(wav(samples)).decode()
    template = (
        "{% for m in messages %}{% for part in m.content %}{% if part.type == 'audio' %}"
        "<|audio_bos|><|AUDIO|><|audio_eos|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
        "{% endfor %}"
    )
    with make_llm(folder) as llm:
        expected = answers(llm, prompt(name, samples.astype(np.float32), text="{}what? <|AUDIO|"))
        for part in (
            {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
            {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{data}"}},
        ):
            content = [part, {"type": "text", "text": "what? <|AUDIO|"}]
            chat = [{"role": "user", "content": content}]
            (output,) = llm.chat(chat, params(30), chat_template=template, use_tqdm=False)
            answer = output.outputs[0]
            assert (output.prompt_token_ids, answer.token_ids, answer.logprobs) == expected[0]
            monkeypatch.setattr(llm.llm_engine.chat_media, "_files", {})  # the file is known
        monkeypatch.undo()
        part["audio_url"] = {"url": "data:audio/wav;base64,AAAA"}
        with pytest.raises(RequestError, match=r"sound 1.* no sound of a supported format"):
            llm.chat(chat, params(), chat_template=template)


def test_text_only(one):
    """Without its encoder the model has no tower, and answers texts with the same bits."""
    name, folder, _, alone = one
    with make_llm(folder, limit_mm_per_prompt={"audio": 0}) as llm:
        assert answers(llm, prompts(name)[1]) == alone[1:2]
        assert all("encoder" not in item.name for item in llm.memory_plan.items)
        with pytest.raises(UnsupportedError, match="reads text only"):
            llm.generate(prompts(name)[0], params())
