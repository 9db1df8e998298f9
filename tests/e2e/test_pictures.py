"""Models of pictures and texts: transformers' numbers, and the same bits in all layouts."""

import functools
import importlib.util
import json
import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from octavo import LoRARequest
from octavo.errors import AdapterError, ConfigError, RequestError, UnsupportedError
from octavo.scheduler.encoders import EncoderInputs
from octavo.scheduler.pace import ItemPace
from octavo.worker.encoder_runner import EncoderRunner
from tests.e2e.test_peft import make_adapter
from tests.handover import hand_over
from tests.pictures import (
    CASES,
    MORE_CASES,
    SHAPES,
    VOCAB,
    assert_greedy,
    hf_logprobs,
    make_llm,
    params,
    picture,
    publish_internvl,
    save_model,
)
from tests.revival import DyingEncoder, assert_revived

PICTURES = [picture(48, 30), picture(16, 40, 1), picture(40, 48, 2)]


LONGEST_PREFIX = 2 * 64 + len("ab  cd  ef") + 2


def budget(name, wanted=8):
    """Return the tokens of a step: those that see each other are together in one."""
    least = {"gemma3": 16, "gemma4": 70, "gemma4_unified": 70, "paligemma": LONGEST_PREFIX}
    return max(least.get(name, 1) + 7, wanted)


def prompt(name, *images, text="ab {} cd {} ef", **fields):
    placeholder = (CASES | MORE_CASES | SHAPES)[name].placeholder
    return {
        "prompt": text.format(*[placeholder] * len(images)),
        "multi_modal_data": {"image": list(images)},
        **fields,
    }


def prompts(name):
    """Return prompts with equal pictures, equal prefixes, and texts among them."""
    first, second, third = PICTURES
    return [
        prompt(name, first, second),
        {"prompt": "only a text of some length, which goes on for more than a block"},
        prompt(name, first, third),
        prompt(name, second, first, text="{}{}"),
        {"prompt": "b"},
        prompt(name, third, text="quite another text before {}"),
    ]


def answers(llm, given, tokens=40, lora=None):
    """Return all that must be the same in every layout."""
    outputs = llm.generate(given, params(tokens), use_tqdm=False, lora_request=lora)
    return [(o.prompt_token_ids, o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


@pytest.fixture(scope="module")
def make_saved(tmp_path_factory):
    """Return a function: case -> case, its folder, transformers' model, and the answers of an
    engine that computes one prompt after the other without caches."""

    @functools.cache
    def make(name):
        folder = tmp_path_factory.mktemp(name)
        model = save_model(name, folder)
        with make_llm(folder, enable_prefix_caching=False, max_num_seqs=1) as llm:
            alone = []
            for one in prompts(name):
                alone += answers(llm, one)
                llm.reset_prefix_cache()  # with it the rows of encoders
        return name, folder, model, alone

    return make


@pytest.fixture(
    params=["smolvlm", "qwen2_5_vl", "qwen3_vl", "llava_onevision", "gemma3", "gemma4", "paligemma"]
)
def saved(make_saved, request):
    """Return cases with tiles, with windows, with all that a decoder may do with pictures, with
    rows that are sums of tokens, and with tokens of a picture, in all layers or some, or of a
    prompt, that see each other."""
    return make_saved(request.param)


@pytest.fixture(params=["smolvlm", "qwen3_vl", "gemma3"])
def some(make_saved, request):
    """Return the simplest of them, and some others."""
    return make_saved(request.param)


@pytest.fixture
def last(make_saved):
    """Return the case with sections and DeepStack."""
    return make_saved("qwen3_vl")


@pytest.fixture
def one(make_saved):
    """Return one case, for what no model changes."""
    return make_saved("smolvlm")


@pytest.mark.parametrize("name", [*CASES, *MORE_CASES])
def test_parity(make_saved, name):
    name, folder, model, alone = make_saved(name)
    with make_llm(folder) as llm:
        for one, answer in zip(prompts(name), alone, strict=True):
            images = one.get("multi_modal_data", {}).get("image", [])
            ids, tokens, _ = answer
            expected = hf_logprobs(model, name, llm, [*ids, *tokens], images, len(tokens))
            assert_greedy(answer, expected)


@pytest.mark.parametrize("name", SHAPES)
def test_parity_of_other_shapes(name, tmp_path):
    """Other depths, widths, numbers of heads, and sizes of pictures; all prompts at once."""
    model = save_model(name, tmp_path)
    first, second = picture(27, 64, 3), picture(31, 33, 4)
    given = [prompt(name, first, second), prompt(name, second, text="{} quite another")]
    with make_llm(tmp_path, max_model_len=510, max_num_batched_tokens=1024) as llm:
        found = answers(llm, given, 8)
        for one, (ids, tokens, logprobs) in zip(given, found, strict=True):
            images = one["multi_modal_data"]["image"]
            expected = hf_logprobs(model, name, llm, [*ids, *tokens], images, len(tokens))
            assert_greedy((ids, tokens, logprobs), expected)


def test_batches_and_caches(saved):
    name, folder, _, alone = saved
    with make_llm(folder) as llm:
        assert answers(llm, prompts(name)) == alone
        stats = llm.stats()
        # Pictures are found again within and across requests.
        assert stats.mm_cache_queries > stats.mm_cache_hits > 0
        assert answers(llm, prompts(name)) == alone
        # Known prefixes need none.
        assert llm.stats().mm_cache_queries < 2 * stats.mm_cache_queries
        assert llm.stats().prefix_cache_hits > 0
        assert answers(llm, prompts(name)[::-1]) == alone[::-1]
        assert stats.num_encoder_cache_rows >= 400


def few_blocks(name, alone):
    """Return settings with which requests are preempted."""
    most = max(len(ids) + len(tokens) for ids, tokens, _ in alone) // 16 + 2
    settings = {"num_gpu_blocks_override": most + 2, "max_model_len": 16 * most}
    if "gemma" in name:
        settings["max_num_batched_tokens"] = budget(name)
    if name.startswith("gemma"):  # two layers with windows have block tables of their own
        settings["num_gpu_blocks_override"] += 2 * (budget(name) // 16 + 2)
    return settings


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 0, "enforce_eager": True},  # as small as it may be
        {"max_num_batched_tokens": 23, "enable_prefix_caching": False},
        {"max_num_seqs": 8},  # and few blocks
        {"max_model_len": 240, "max_num_batched_tokens": 240, "enable_chunked_prefill": False},
    ],
    ids=["chunks", "uncached", "preemptions", "whole"],
)
def test_layouts(saved, settings):
    name, folder, _, alone = saved
    settings = dict(settings)
    if "max_num_batched_tokens" in settings:
        settings["max_num_batched_tokens"] = budget(name, settings["max_num_batched_tokens"])
    else:
        settings |= few_blocks(name, alone)
    with make_llm(folder, **settings) as llm:
        given = prompts(name) * 2
        assert answers(llm, given) == alone * 2
        if "num_gpu_blocks_override" in settings:
            assert llm.stats().num_preemptions > 0


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_adapters(some, tmp_path):
    """Adapters change the decoder, also in prompts with pictures; those of towers are refused."""
    name, folder, _, alone = some
    text = r".*(language_model|text_model).*(q_proj|v_proj|down_proj|embed_tokens)"
    adapted = make_adapter(folder, tmp_path / "text", target_modules=text)
    make_adapter(folder, tmp_path / "all", target_modules="all-linear")
    lora = LoRARequest("text", 1, str(tmp_path / "text"))
    given = prompts(name)
    settings = {"enable_lora": True, "max_lora_rank": 8}
    with make_llm(folder, **settings) as llm:
        expected = answers(llm, given, 8, lora)
        for one, answer in zip(given, expected, strict=True):
            images = one.get("multi_modal_data", {}).get("image", [])
            ids, tokens, _ = answer
            best = hf_logprobs(adapted, name, llm, [*ids, *tokens], images, len(tokens))
            assert_greedy(answer, best)
        with pytest.raises(AdapterError, match="LoRA of encoders of pictures and sound is not"):
            answers(llm, given, 8, LoRARequest("all", 2, str(tmp_path / "all")))
        assert answers(llm, given) == alone
    with make_llm(folder, max_num_batched_tokens=23, **settings) as llm:
        both = answers(llm, given * 2, 8, [lora, None] * len(given))
        with make_llm(folder) as plain:
            without = answers(plain, given, 8)
        whole = [
            expected[i % len(given)] if i % 2 == 0 else without[i % len(given)]
            for i in range(2 * len(given))
        ]
        assert both == whole


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_a_merged_adapter_may_change_the_tower(some, tmp_path):
    name, folder, _, _ = some
    adapted = make_adapter(folder, tmp_path, target_modules="all-linear")
    with make_llm(folder, lora_merge=str(tmp_path)) as llm:
        ((ids, tokens, logprobs),) = answers(llm, prompt(name, *PICTURES[:2]), 8)
        best = hf_logprobs(adapted, name, llm, [*ids, *tokens], PICTURES[:2])[len(ids) - 1 : -1]
    found = [row[token].logprob for row, token in zip(logprobs, tokens, strict=True)]
    torch.testing.assert_close(
        torch.tensor(found), best[:, :256].max(-1).values, atol=2e-4, rtol=1e-4
    )


def test_pictures_with_more_rows_than_patches(make_saved):
    """A row ends each line of LLaVA-NeXT: large pictures fit into the cache of a small budget."""
    name, folder, _, _ = make_saved("llava_next")
    given = prompt(name, picture(40, 40, 5), text="{}")
    with make_llm(folder) as llm:
        alone = answers(llm, given)
    with make_llm(folder, max_num_batched_tokens=23) as llm:
        assert answers(llm, given) == alone


def test_internvl_as_published(make_saved, tmp_path):
    """Its code is no part of transformers: the same weights in both formats give the same bits."""
    _, folder, _, alone = make_saved("internvl")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    publish_internvl(tmp_path)
    with make_llm(tmp_path, trust_remote_code=True) as llm:
        assert answers(llm, prompts("internvl")) == alone


def test_files_of_a_model_that_contradict_each_other(make_saved, tmp_path):
    folder = make_saved("llava")[1]
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    size = {"size": {"shortest_edge": 12}, "crop_size": {"height": 12, "width": 12}}
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | size))
    with (
        make_llm(tmp_path) as llm,
        pytest.raises(RequestError, match=r"picture 1: .* \[3, 16, 16\]"),
    ):
        answers(llm, prompt("llava", PICTURES[0], text="{}"))


@pytest.mark.parametrize(
    "settings",
    [
        {"tensor_parallel_size": 2, "enable_sequence_parallel": True, "enforce_eager": True},
        {"pipeline_parallel_size": 2, "max_num_batched_tokens": 23},
    ],
    ids=["rows", "stages"],
)
def test_two_ranks(some, settings):
    name, folder, _, alone = some
    settings = {"num_threads": 1} | settings
    if "max_num_batched_tokens" in settings:
        settings["max_num_batched_tokens"] = budget(name, settings["max_num_batched_tokens"])
    with make_llm(folder, **settings) as llm:
        assert answers(llm, prompts(name)) == alone


def connected(kind, **extra):
    return {"kv_connector": kind, "kv_connector_extra_config": {"cpu_bytes_to_use": 2**26} | extra}


@pytest.fixture(autouse=True)
def own_key(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", ["smolvlm", "qwen3_vl", "gemma4_e", "paligemma"])
def test_offloading(make_saved, name, tmp_path):
    """Blocks with pictures come back from other memory, also after a preemption and a restart."""
    name, folder, _, alone = make_saved(name)
    file = {"file_path": str(tmp_path / "kv"), "file_bytes_to_use": 2**26}
    config = connected("OffloadingConnector", **file)
    settings = few_blocks(name, alone) | {"max_num_seqs": 4}
    settings |= {"preemption_mode": "swap", "kv_transfer_config": config}
    queries = []
    for _ in range(2):
        with make_llm(folder, **settings) as llm:
            assert answers(llm, prompts(name)[:1]) == alone[:1]
            queries.append(llm.stats().mm_cache_queries)  # before any preemption
            assert answers(llm, prompts(name) * 2) == alone * 2
            stats = llm.stats()
            assert stats.num_preemptions > 0
            assert stats.external_prefix_cache_hits > 0
    assert queries[0] > queries[1]


@pytest.mark.parametrize("name", ["gemma4", "paligemma"])
def test_shared_folder(make_saved, name, tmp_path):
    """Another division of the model reads blocks with pages of two sizes, and those of prompts
    that see all of themselves."""
    name, folder, _, alone = make_saved(name)
    transfer = {
        "kv_connector": "SharedStorageConnector",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "kv")},
    }
    with make_llm(folder, kv_transfer_config=transfer) as llm:
        assert answers(llm, prompts(name)) == alone
    with make_llm(
        folder, kv_transfer_config=transfer, tensor_parallel_size=2, num_threads=1
    ) as llm:
        assert answers(llm, prompts(name)[2:3]) == alone[2:3]
        stats = llm.stats()
        assert stats.external_prefix_cache_hits > 0
        assert stats.mm_cache_queries < 2  # the last picture may reach into the last block


TWO = {"tensor_parallel_size": 2, "num_threads": 1}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen3_vl", {}),
        ("qwen3_vl", {"pipeline_parallel_size": 2, "num_threads": 1}),
        ("gemma4", TWO),
        ("gemma4_e", TWO | {"max_num_batched_tokens": 23}),
        ("paligemma", {}),
        ("paligemma", TWO),
    ],
    ids=str,
)
def test_prefill_elsewhere(make_saved, name, layout):
    """An engine goes on with blocks from another one, and runs no encoder for them."""
    name, folder, _, alone = make_saved(name)
    config = {"kv_transfer_config": connected("P2PConnector")}
    with make_llm(folder, **config) as one, make_llm(folder, **layout, **config) as two:
        assert hand_over(one, two, prompts(name), params, 40) == alone
        stats = two.stats()
        assert stats.external_prefix_cache_hits > 0
        assert stats.mm_cache_queries < one.stats().mm_cache_queries


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


def save_eagle(folder):
    """Save a random EAGLE head for models of `CASES`."""
    config = {"architectures": ["EagleLlamaForCausalLM"], "model_type": "llama"}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": VOCAB}
    config |= sizes | {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    config |= {"max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu"}
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"fc": (32, 64), "layers.0.mlp.down_proj": (32, 48)}
    shapes |= {f"layers.0.mlp.{name}_proj": (48, 32) for name in ("gate", "up")}
    shapes |= {f"layers.0.self_attn.{name}_proj": (32, 32) for name in "qo"}
    shapes |= {f"layers.0.self_attn.{name}_proj": (16, 32) for name in "kv"}
    tensors = {f"{name}.weight": torch.randn(shape) / 8 for name, shape in shapes.items()}
    tensors["layers.0.post_attention_layernorm.weight"] = torch.ones(32)
    save_file(tensors, folder / "model.safetensors")
    return {"method": "eagle", "model": str(folder), "num_speculative_tokens": 2}


@pytest.mark.parametrize("method", ["ngram", "itself", "eagle", "stages"])
def test_drafts(last, method, tmp_path):
    """Drafts change no answer. A draft model reads placeholders as tokens, and no pictures."""
    name, folder, _, alone = last
    settings = {"speculative_config": NGRAM}
    if method == "itself":
        settings = {"speculative_config": {"model": str(folder), "num_speculative_tokens": 3}}
    elif method == "eagle":
        settings = {"speculative_config": save_eagle(tmp_path), "tensor_parallel_size": 2}
        settings |= {"num_threads": 1}
    elif method == "stages":
        settings |= {"pipeline_parallel_size": 2, "num_threads": 1}
    with make_llm(folder, max_num_batched_tokens=budget(name, 40), **settings) as llm:
        assert answers(llm, prompts(name) * 2) == alone * 2
        stats = llm.stats()
        assert stats.num_draft_tokens > 0
        if method == "itself":
            assert sum(stats.num_accepted_tokens_per_pos) > 0


def test_deaths(last, tmp_path, monkeypatch):
    """An engine of which a rank dies in the middle of an encoder's run, or that is killed in the
    middle of an answer, is replaced; the answers go on."""
    name, folder, _, alone = last
    dying = DyingEncoder(tmp_path, monkeypatch)
    with make_llm(folder, tensor_parallel_size=2, num_threads=1, **dying.settings) as llm:
        assert answers(llm, prompts(name)[1:2]) == alone[1:2]
        with dying.once(llm):
            assert answers(llm, prompts(name)) == alone
        assert_revived(llm, prompt(name, *PICTURES[:2]), params(60))


def test_errors(one):
    """A bad picture harms only its own request."""
    name, folder, _, alone = one
    with make_llm(folder, limit_mm_per_prompt={"image": 2}) as llm:

        def refuse(message, one, error=RequestError, **options):
            with pytest.raises(error, match=message):
                llm.generate(one, options.pop("params", params()), use_tqdm=False, **options)

        refuse("3 pictures; at most 2 are allowed", prompt(name, *PICTURES, text="{}{}{}"))
        refuse("2 placeholders .* 1 pictures", prompt(name, PICTURES[0], text="{0}{0}"))
        refuse(
            "'audio' is not supported",
            {"prompt": "a", "multi_modal_data": {"audio": [1]}},
            UnsupportedError,
        )
        refuse("is a list; give a dict", {"prompt": "a", "multi_modal_data": [1]})
        refuse("picture 1: it is a str", prompt(name, "file.png", text="{}"))
        refuse("picture 1: it is missing", prompt(name, None, text="{}"))
        refuse("rows of floats.* array uint8", prompt(name, np.zeros((2, 2, 3)), text="{}"))
        refuse(
            "multi_modal_uuids must have",
            prompt(name, PICTURES[0], text="{}") | {"multi_modal_uuids": {"image": ["a", "b"]}},
        )
        refuse(
            "picture 1: no picture with the uuid 'a' is kept here",
            prompt(name, None, text="{}", multi_modal_uuids={"image": ["a"]}),
        )
        refuse(
            "mm_processor_kwargs.colors is not allowed",
            prompt(name, PICTURES[0], text="{}"),
            mm_processor_kwargs={"colors": 4},
        )
        refuse(
            "mm_processor_kwargs is a int",
            prompt(name, PICTURES[0], text="{}", mm_processor_kwargs=4),
        )
        refuse(
            "would cut the media",
            prompt(name, PICTURES[0], text="{}"),
            params=params(truncate_prompt_tokens=4),
        )
        refuse(
            "whisper_alignment is for encoder-decoders",
            prompt(name, PICTURES[0], text="{}"),
            params=params(extra_args={"whisper_alignment": [[[0, 0]], 1]}),
        )
        refuse("maximum context length", prompt(name, PICTURES[0], text="{}" + "x" * 380))
        assert answers(llm, prompts(name)) == alone


def test_an_encoder_that_fails(some, monkeypatch):
    """It fails the requests that need its item, and no others; the item may work again."""
    name, folder, _, alone = some
    given, run, ran, bad = prompts(name), EncoderRunner.run, set(), set()

    def fail(self, items):
        ran.update(item.identifier for item in items)
        if any(item.identifier in bad for item in items):
            raise ValueError("a bad item")
        return run(self, items)

    advance = EncoderRunner.advance
    monkeypatch.setattr(EncoderRunner, "run", fail)
    # A part that fails forgets the run.
    monkeypatch.setattr(
        EncoderRunner,
        "advance",
        lambda self, part: None if part.item.identifier in bad else advance(self, part),
    )
    with make_llm(folder, distributed_executor_backend="uni", max_num_seqs=5) as llm:
        engine = llm.llm_engine
        assert answers(llm, given[-1:]) == alone[-1:]
        bad |= ran  # the third picture
        llm.reset_prefix_cache()
        for _ in range(2):
            for index, one in enumerate(given * 2):
                engine.add_request(str(index), one, params(40))
            found = {}
            while engine.has_unfinished_requests():
                found |= {output.request_id: output for output in engine.step()}
            for index, (_, tokens, logprobs) in enumerate(alone * 2):
                (answer,) = found[str(index)].outputs
                if index % 6 in (2, 5):
                    assert re.search("encoder of its item .* a bad item", answer.stop_reason)
                else:
                    assert (answer.token_ids, answer.logprobs) == (tokens, logprobs)
        bad.clear()
        assert answers(llm, given) == alone


@pytest.mark.parametrize("ranks", [1, 2])
def test_runs_of_encoders_in_slices(some, monkeypatch, ranks):
    """Beside a text they take several steps, in which the text gets tokens."""
    name, folder, _, alone = some
    monkeypatch.setattr(ItemPace, "num_pieces", lambda self, modality, piece: 1)
    found, lengths, add_slice = {}, [], EncoderInputs._add_slice

    def note(self, run, end, output):
        lengths.append((end, len(found["text"].outputs[0].token_ids)))
        add_slice(self, run, end, output)

    monkeypatch.setattr(EncoderInputs, "_add_slice", note)
    settings = {"tensor_parallel_size": ranks, "num_threads": 1, "max_num_seqs": 9}
    with make_llm(folder, **settings) as llm:
        engine = llm.llm_engine
        engine.add_request("text", "some text", params(120))
        while "text" not in found:
            found |= {output.request_id: output for output in engine.step()}
        for index, one in enumerate(prompts(name)):
            engine.add_request(str(index), one, params(40))
        while engine.has_unfinished_requests():
            found |= {output.request_id: output for output in engine.step()}
        for index, (_, tokens, logprobs) in enumerate(alone):
            (answer,) = found[str(index)].outputs
            assert (answer.token_ids, answer.logprobs) == (tokens, logprobs)
        (text,) = found["text"].outputs
        llm.reset_prefix_cache()
        ((_, tokens, logprobs),) = answers(llm, "some text", 120)
        assert (text.token_ids, text.logprobs) == (tokens, logprobs)
    # Each part is in a step of its own, with a token of the text.
    assert len({end for end, _ in lengths}) > 1
    assert lengths[-1][1] - lengths[0][1] >= len(lengths) - 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_parts_of_layers(last, monkeypatch, ranks):
    """The layers of a large picture are cut, too, and so is its prompt."""
    name, folder, *_ = last
    monkeypatch.setattr(ItemPace, "num_pieces", lambda self, modality, piece: 1)
    large = prompt(name, picture(96, 96, 7), text="{} ef")
    settings = {"tensor_parallel_size": ranks, "num_threads": 1}
    settings |= {"mm_processor_kwargs": {"min_pixels": 64, "max_pixels": 96**2}}
    found, slices, add_slice = {}, [], EncoderInputs._add_slice

    def note(self, run, end, output):
        slices.append((run.num_pieces, end))
        add_slice(self, run, end, output)

    monkeypatch.setattr(EncoderInputs, "_add_slice", note)
    with make_llm(folder, **settings) as llm:
        (alone,) = answers(llm, large)
        llm.reset_prefix_cache()
        engine = llm.llm_engine
        engine.add_request("text", "some text", params(120))
        while "text" not in found:
            found |= {output.request_id: output for output in engine.step()}
        engine.add_request("large", large, params(40))
        while engine.has_unfinished_requests():
            found |= {output.request_id: output for output in engine.step()}
    (answer,) = found["large"].outputs
    assert (answer.token_ids, answer.logprobs) == alone[1:]
    # 576 patches: the input, three layers of three parts and their keys, two taps, the output
    assert slices == [(16, end) for end in range(1, 17)]


def test_only_equal_prompts_that_see_all_of_themselves_share_blocks(make_saved):
    _, folder, *_ = make_saved("paligemma")
    given = [prompt("paligemma", *PICTURES[:2], text=text) for text in ("{}{}ab cd", "{}{}ab ce")]
    with make_llm(folder) as llm:
        first, second = (answers(llm, one, 1) for one in given)
        assert llm.stats().prefix_cache_hits == 0
        assert first != second
        assert answers(llm, given, 1) == first + second
        assert llm.stats().prefix_cache_hits > 0


def test_forms_of_a_picture(one):
    name, folder, _, alone = one
    pictures = [Image.fromarray(pixels) for pixels in PICTURES[:2]]
    with make_llm(folder) as llm:
        named = prompt(name, *pictures, multi_modal_uuids={"image": ["a", None]})
        assert answers(llm, named) == alone[:1]
        known = named | {"multi_modal_data": {"image": [None, pictures[1]]}}
        assert answers(llm, known) == alone[:1]
        llm.reset_mm_cache()
        with pytest.raises(RequestError, match="no picture with the uuid 'a'"):
            answers(llm, known)
        ids = llm.llm_engine.tokenizer.encode(named.pop("prompt"), False)
        assert answers(llm, {"prompt_token_ids": ids} | named) == alone[:1]
        # n answers share the pictures; those of another scope share nothing.
        (output,) = llm.generate(prompt(name, *pictures, cache_salt="s"), params(4, n=3))
        assert all(o.token_ids == alone[0][1][:4] for o in output.outputs)
        before = llm.stats()
        llm.generate(prompt(name, *pictures, cache_salt="t"), params(4))
        assert llm.stats().mm_cache_queries == before.mm_cache_queries + 2
        assert llm.stats().mm_cache_hits == before.mm_cache_hits


def test_text_only(some):
    """Without its encoder the model has no tower, and answers texts with the same bits."""
    name, folder, _, alone = some
    for settings in ({"language_model_only": True}, {"limit_mm_per_prompt": {"image": 0}}):
        with make_llm(folder, **settings) as llm:
            assert answers(llm, prompts(name)[1]) == alone[1:2]
            assert all("encoder" not in item.name for item in llm.memory_plan.items)
            with pytest.raises(UnsupportedError, match="reads text only"):
                llm.generate(prompts(name)[0], params())


def test_layers_that_read_rows_stay_together(last):
    stages = {"pipeline_parallel_size": 2, "num_threads": 1}
    with pytest.raises(ConfigError, match="divides the first 2 layers"):
        make_llm(last[1], **stages, pipeline_layers="1,2")
    with pytest.raises(ConfigError, match="more than 2, since the first 2 layers"):
        make_llm(last[1], **stages | {"pipeline_parallel_size": 3})
