"""Rows of encoders in place of pictures and sounds: the same bits as with these, or an error."""

import base64
import io
import json
import pickle

import numpy as np
import pytest
import torch

from octavo.errors import RequestError
from octavo.worker.encoder_runner import EncoderRunner
from tests import sounds
from tests.e2e.harness import serve
from tests.e2e.test_chat_pictures import FIRST, PLAIN, SECOND, TEMPLATE
from tests.e2e.test_chat_pictures import part as picture_part
from tests.e2e.test_pictures import PICTURES, answers, budget, prompt
from tests.e2e.test_sounds import LONG, SOUNDS
from tests.e2e.test_sounds import answers as sound_answers
from tests.e2e.test_sounds import prompt as sound_prompt
from tests.pictures import make_llm, params, save_model

NAMES = ["smolvlm", "qwen2_5_vl", "qwen3_vl", "llava", "llava_next", "gemma3", "gemma4"]
NAMES += ["paligemma", "internvl", "pixtral", "phi4"]


def prompts(name):
    first, second, third = PICTURES
    return [
        prompt(name, first, second),
        {"prompt": "only a text of some length, which goes on for more than a block"},
        prompt(name, first, third),
        prompt(name, third, text="quite another text before {}"),
    ]


def with_rows(llm, given, patch, ask=answers):
    """Return the answer to a prompt, and the rows of each of its items, computed alone."""
    found = []
    run = EncoderRunner.run

    def recording(runner, items):
        rows = run(runner, items)
        found.extend(
            (item.mm_position.offset, item.grid, row.numpy().copy())
            for item, row in zip(items, rows, strict=True)
        )
        return rows

    with patch.context() as patched:
        patched.setattr(EncoderRunner, "run", recording)
        answer = ask(llm, given, 20)
    llm.reset_prefix_cache()
    return answer, sorted(found, key=lambda row: row[0])


def sizes(images):
    return [(image.shape[1], image.shape[0]) for image in images]


@pytest.mark.parametrize("name", NAMES)
def test_pictures(name, tmp_path, monkeypatch):
    """A prompt with rows has the bits of the prompt with pictures: in one batch, in chunks, beside
    pictures, and from the prefix cache."""
    save_model(name, tmp_path)
    expected, given = [], []
    with make_llm(tmp_path, enable_prefix_caching=False, max_num_seqs=1) as llm:
        for one in prompts(name):
            answer, found = with_rows(llm, one, monkeypatch)
            expected += answer
            images = one.get("multi_modal_data", {}).get("image", [])
            assert len(found) == len(images)
            rows = [row for _, _, row in found]
            data = {"image_embeds": rows, "image_sizes": sizes(images)}
            if name.startswith("qwen"):
                grids = [[1, 2 * grid[1], 2 * grid[2]] for _, grid, _ in found]
                data = {"image_embeds": rows, "image_grid_thw": grids}
            given.append(one | {"multi_modal_data": {"image": data}} if images else one)
    with make_llm(tmp_path, enable_mm_embeds=True) as llm:
        assert answers(llm, given, 20) == expected
        mixed = [x for pair in zip(prompts(name), given, strict=True) for x in pair]
        assert answers(llm, mixed, 20) == [x for x in expected for _ in range(2)]
        assert answers(llm, given[::-1], 20) == expected[::-1]
        assert llm.stats().prefix_cache_hits > 0
    small = {"max_num_batched_tokens": budget(name), "enable_prefix_caching": False}
    with make_llm(tmp_path, enable_mm_embeds=True, **small) as llm:
        assert answers(llm, given * 2, 20) == expected * 2


@pytest.mark.parametrize("name", ["qwen2_audio", "voxtral", "gemma4", "phi4"])
def test_sounds(name, tmp_path, monkeypatch):
    """The same for sounds; rows of a long one are those of its windows, one after the other."""
    sounds.save_model(name, tmp_path)
    first, second, third = SOUNDS if "qwen" in name else (LONG, *SOUNDS[1:])
    given = [sound_prompt(name, first, second), sound_prompt(name, third, text="{}")]
    expected, rows = [], []
    with make_llm(tmp_path, enable_prefix_caching=False, max_num_seqs=1) as llm:
        for one in given:
            answer, found = with_rows(llm, one, monkeypatch, sound_answers)
            expected += answer
            joined = {}
            for begin, _, row in found:
                before = joined.pop(begin, np.empty((0, row.shape[1]), np.float32))
                joined[begin + len(row)] = np.concatenate([before, row])
            rows.append(list(joined.values()))
            assert len(rows[-1]) == len(one["multi_modal_data"]["audio"])
    assert name != "voxtral" or len(found) < len(rows[0][0])
    with make_llm(tmp_path, enable_mm_embeds=True) as llm:
        listed, single = (one["prompt"] for one in given)
        forms = [
            (listed, rows[0], expected[0]),
            (listed, {"audio_embeds": [row[None] for row in rows[0]]}, expected[0]),
            (listed, [SOUNDS[0] if "qwen" in name else LONG, rows[0][1]], expected[0]),
            (single, rows[1][0], expected[1]),
            (single, rows[1], expected[1]),
            (single, torch.from_numpy(rows[1][0])[None], expected[1]),
        ]
        found = sound_answers(
            llm, [{"prompt": p, "multi_modal_data": {"audio": x}} for p, x, _ in forms], 20
        )
        assert found == [answer for _, _, answer in forms]


def test_forms_of_rows(tmp_path, monkeypatch):
    """vLLM's forms: one array, several, all in one, also with grids as tensors; types that the
    model rounds."""
    save_model("qwen2_vl", tmp_path)
    first, second = PICTURES[:2]
    both = prompt("qwen2_vl", first, second)
    one = prompt("qwen2_vl", second, text="{} and a text that fills a block")
    with make_llm(tmp_path, enable_mm_embeds=True) as llm:
        expected, found = with_rows(llm, both, monkeypatch)
        (alone,), _ = with_rows(llm, one, monkeypatch)
        (_, grid, row), (_, other, more) = found
        grids = np.array([[1, 2 * g[1], 2 * g[2]] for g in (grid, other)])
        flat = np.concatenate([row, more])
        for data in (
            {"image_embeds": flat, "image_grid_thw": grids},
            {"image_embeds": torch.from_numpy(flat), "image_grid_thw": torch.from_numpy(grids)},
            {"image_embeds": [row.astype(np.float64), more], "image_grid_thw": grids.tolist()},
            {"image_embeds": [row[None], more], "image_sizes": [(30, 48), (40, 16)]},
            [
                {"image_embeds": row, "image_grid_thw": grids[0]},
                {"image_embeds": more, "image_grid_thw": grids[1:].astype(np.int32)},
            ],
            [first, {"image_embeds": more, "image_grid_thw": grids[1]}],
        ):
            assert answers(llm, both | {"multi_modal_data": {"image": data}}, 20) == expected
        data = {"image_embeds": more, "image_grid_thw": grids[1]}
        assert answers(llm, one | {"multi_modal_data": {"image": data}}, 20) == [alone]
        # Another grid has other positions, so no cached block is right for it.
        turned = {"image_embeds": more, "image_grid_thw": grids[1][[0, 2, 1]]}
        (differs,) = answers(llm, one | {"multi_modal_data": {"image": turned}}, 20)
        assert differs != alone
        kept = one | {"multi_modal_data": {"image": data}, "multi_modal_uuids": {"image": ["a"]}}
        again = one | {"multi_modal_data": {"image": None}, "multi_modal_uuids": {"image": ["a"]}}
        again["multi_modal_data"] = {"image": [None]}
        assert answers(llm, kept, 20) == [alone]
        with monkeypatch.context() as patched:
            # It would put an old item in place of one that another front end has just received.
            patched.delattr("octavo.frontend.media_cache.MediaCache.put")
            assert answers(llm, again, 20) == [alone]
        half = torch.from_numpy(more).to(torch.bfloat16)
        (rounded,) = answers(
            llm, one | {"multi_modal_data": {"image": data | {"image_embeds": half}}}
        )
        exact = data | {"image_embeds": half.float()}
        assert answers(llm, one | {"multi_modal_data": {"image": exact}}) == [rounded]


def test_errors(tmp_path):
    """Bad rows harm only their own request; the error says what is wrong with them."""
    save_model("qwen3_vl", tmp_path)
    good = np.ones((2, 96), np.float32)
    grid = [1, 2, 4]
    text = prompt("qwen3_vl", 0, text="{}")["prompt"]

    def refuse(llm, message, image, error=RequestError, text=text):
        with pytest.raises(error, match=message):
            llm.generate(
                {"prompt": text, "multi_modal_data": {"image": image}}, params(), use_tqdm=False
            )

    def wrong(llm, message, rows, **more):
        refuse(llm, message, {"image_embeds": rows, "image_grid_thw": grid, **more})

    with make_llm(tmp_path) as llm:
        off = "image_embeds.* start the engine with --enable-mm-embeds"
        refuse(llm, off, good)
        refuse(llm, off, torch.from_numpy(good))
        refuse(llm, off, [good])
        wrong(llm, off, good)
    with make_llm(tmp_path, enable_mm_embeds=True, limit_mm_per_prompt={"image": 2}) as llm:
        refuse(llm, "picture 1: 2 rows alone do not say.* image_grid_thw", good)
        refuse(llm, r"shape \[2\]", {"image_embeds": good[0, :2]})
        refuse(
            llm,
            "picture 2: image_embeds holds numbers of type int64",
            [PICTURES[0], torch.ones(2, 2, dtype=torch.int64)],
        )
        wrong(llm, "not a tensor saved with torch.save or numpy.save", "rows")
        wrong(llm, "is of type int; give a torch tensor", 4)
        refuse(
            llm,
            "has 2 items, and .* has 1",
            {"image_embeds": [good] * 2, "image_grid_thw": [grid]},
        )
        wrong(llm, "not finite", np.where(np.arange(96) == 95, np.nan, good))
        wrong(llm, "not finite", torch.full((2, 96), np.inf, dtype=torch.bfloat16))
        wrong(llm, "layout torch.sparse_coo", torch.ones(2, 96).to_sparse())
        wrong(llm, "image_embeds.size is unknown", good, size=4)
        wrong(llm, "exclude each other", good, image_sizes=[4, 4])
        wrong(llm, "image_grid_thw must be positive integers", good, image_grid_thw=[1, 2])
        wrong(llm, "image_grid_thw must be positive integers", good, image_grid_thw=[1, -2, -4])
        wrong(llm, "image_grid_thw must be positive integers", good, image_grid_thw=[[1, 2], [1]])
        wrong(llm, r"image_grid_thw is \[2, 2, 2\]", good, image_grid_thw=[2, 2, 2])
        wrong(llm, r"image_grid_thw is \[1, 3, 4\]", good, image_grid_thw=[1, 3, 4])
        for value in ([["a"] * 3], [[True, 2, 4]], [[2**70, 2, 4]], [[1, 2.0, 4]], [grid] * 3):
            wrong(llm, "image_grid_thw must be positive integers", good, image_grid_thw=value)
        wrong(llm, "too many items", [good] * 3)
        wrong(llm, "too many items", np.ones((3, 1, 1), np.float32))
        refuse(llm, "3 pictures; at most 2", [{"image_embeds": good, "image_grid_thw": grid}] * 3)
        many = np.ones((500, 96), np.float32)
        wrong(
            llm, "have 500 tokens; the model's context has 400", many, image_grid_thw=[1, 2, 1000]
        )
        data = {"image_embeds": good, "image_grid_thw": grid}
        given = {"prompt": text, "multi_modal_data": {"image": data}}
        (output,) = llm.generate(given, params(), use_tqdm=False)
        assert output.outputs[0].token_ids


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def saved(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    return base64.b64encode(file.getvalue()).decode()


class Evil:
    def __reduce__(self):
        return print, ("this must not run",)


def test_chats(tmp_path, tmp_path_factory, monkeypatch):
    """Chats, offline and over HTTP, have files of tensors in base64; nothing in them is run."""
    save_model("smolvlm", tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": TEMPLATE}))
    content = [picture_part(FIRST), {"type": "text", "text": "and"}, picture_part(SECOND)]
    chat = [{"role": "user", "content": content}]
    with make_llm(tmp_path, enable_prefix_caching=False) as llm:
        given = {"prompt": "user:<image>and<image>;"}
        given |= {"multi_modal_data": {"image": [FIRST, SECOND]}}
        _, found = with_rows(llm, given, monkeypatch)
        (output,) = llm.chat(chat, params(8), use_tqdm=False)
        expected = output.outputs[0].text
        first, second = (row for _, _, row in found)
        off = {"type": "image_embeds", "image_embeds": npy(first)}
        with pytest.raises(RequestError, match=r"picture 1: image_embeds.*--enable-mm-embeds"):
            llm.chat([{"role": "user", "content": [off]}], params(), use_tqdm=False)

    def part(value, **more):
        return {"type": "image_embeds", "image_embeds": value, **more}

    as_npy = part({"image_embeds": npy(first), "image_sizes": [30, 48]}, uuid="a")
    as_torch = {"image_embeds": saved(torch.from_numpy(second))}
    as_torch = part(as_torch | {"image_sizes": saved(torch.tensor([[40, 20]]))})
    with_tensors = part({"image_embeds": torch.from_numpy(second), "image_sizes": [(40, 20)]})
    text = content[1]
    with make_llm(tmp_path, enable_mm_embeds=True) as llm:
        for last in (as_torch, with_tensors, content[2]):
            chat = [{"role": "user", "content": [as_npy, text, last]}]
            (output,) = llm.chat(chat, params(8), use_tqdm=False)
            assert output.outputs[0].text == expected
    flags = ["--dtype", "float32", "--max-model-len", "400", "--served-model-name", "m"]
    flags += ["--enable-mm-embeds"]
    with serve(tmp_path_factory.mktemp("server"), *flags, model=str(tmp_path)) as server:

        def send(*content):
            body = {"model": "m", "messages": [{"role": "user", "content": content}], **PLAIN}
            return server.post("/v1/chat/completions", body)

        for parts in (
            (as_npy, text, as_torch),
            (part(None, uuid="a"), text, as_torch),
            (content[0], text, as_torch),
        ):
            response = send(*parts)
            assert response.status_code == 200, response.text
            assert response.json()["choices"][0]["message"]["content"] == expected
        objects = np.array([Evil()] * 2, object)
        evil = base64.b64encode(pickle.dumps(Evil())).decode()
        size = {"image_sizes": [30, 48]}
        for value, words in (
            (npy(first), "rows alone do not say which picture they are"),
            ({"image_embeds": npy(objects), **size}, "holds no array of numbers"),
            ({"image_embeds": saved(Evil()), **size}, "saved with torch.save or numpy.save"),
            ({"image_embeds": evil, **size}, "saved with torch.save or numpy.save"),
            ({"image_embeds": "?", **size}, "is not valid base64"),
            ({"image_embeds": npy(first)[:-8], **size}, "damaged file of numpy.save"),
            ({"image_embeds": npy(first[:, :8]), **size}, "have 8 numbers in a row"),
            ({"image_embeds": npy(first * np.nan), **size}, "not finite"),
            ({"image_embeds": [1, 2], **size}, "is of type int; give a torch tensor"),
            ({"image_embeds": npy(first[None].repeat(2, 0)), **size}, "too many items"),
            ({"image_embeds": npy(first), "image_sizes": {}}, "image_sizes"),
            (None, "image_embeds is missing"),
            (4, "image_embeds is of type int"),
        ):
            response = send(part(value))
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert words in error["message"]
            assert "messages" in error["param"]
        response = send(content[0], text, as_torch)
        assert response.json()["choices"][0]["message"]["content"] == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"tensor_parallel_size": 2, "enforce_eager": True},
        {"pipeline_parallel_size": 2, "max_num_batched_tokens": 23},
        {"isolate": True},
    ],
    ids=["rows", "stages", "apart"],
)
def test_several_processes(settings, tmp_path, monkeypatch):
    """Each rank gets the rows; those of DeepStack are further columns."""
    save_model("qwen3_vl", tmp_path)
    one = prompts("qwen3_vl")[0]
    with make_llm(tmp_path, enable_prefix_caching=False) as llm:
        expected, found = with_rows(llm, one, monkeypatch)
    data = {"image_embeds": [row for _, _, row in found], "image_sizes": sizes(PICTURES[:2])}
    given = one | {"multi_modal_data": {"image": data}}
    with make_llm(tmp_path, enable_mm_embeds=True, num_threads=1, **settings) as llm:
        assert answers(llm, [given, given, one], 20) == expected * 3
