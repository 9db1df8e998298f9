"""Adapters of the built-in model: offline, and in a server whose engine dies."""

import concurrent.futures
import json
import shutil

import numpy as np
import pytest
from msgspec.structs import replace

from octavo import LLM, BeamSearchParams, LoRARequest, SamplingParams
from octavo.config import BUILTIN_DRAFT_MODEL, BUILTIN_EAGLE_HEAD
from octavo.errors import AdapterError, RequestError
from octavo.sampling_params import StructuredOutputsParams
from tests.adapters import builtin_model, make_factors, write_adapter
from tests.e2e.harness import serve
from tests.e2e.test_data_parallel import engines
from tests.e2e.test_front_ends import front_ends, wait_for_front_ends

NAMES = "abcdefgh"
PROMPT = list(range(300, 437))
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=3)
DRAWN = replace(GREEDY, temperature=0.9, seed=5, top_p=0.95)
LORA = {"enable_lora": True, "max_loras": 4, "max_cpu_loras": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Eight adapters of the ranks 1 to 8; half of them change only some modules.

    Two of them are DoRA, and one has biases of B.
    """
    made = tmp_path_factory.mktemp("adapters")
    model = builtin_model()
    modules = list(model.modules)
    for i, name in enumerate(NAMES):
        some = modules if i % 2 else modules[i::3]
        more = {"c": "lora_magnitude_vector", "d": "lora_B.bias", "f": "lora_magnitude_vector"}
        tensor = more.get(name, "")
        kind = {"use_dora": "magnitude" in tensor, "lora_bias": "bias" in tensor}
        factors = make_factors(model, some, rank=i + 1, seed=i, more=tensor)
        write_adapter(made / name, factors, r=i + 1, lora_alpha=2, **kind)
    return made


def lora(folder, name, number=None):
    if name is None:
        return None
    return LoRARequest(name, number or NAMES.index(name) + 1, str(folder / name))


@pytest.fixture(scope="module")
def llm():
    with LLM(max_model_len=512, dtype="float32", max_num_seqs=32, **LORA) as llm:
        yield llm


def ask(llm, folder, names, params=GREEDY, prompt=PROMPT):
    """Return tokens and logprobs of an answer for each adapter, all at once."""
    outputs = llm.generate(
        [{"prompt_token_ids": prompt}] * len(names),
        params,
        lora_request=[lora(folder, name) for name in names],
        use_tqdm=False,
    )
    return [
        [
            (
                answer.token_ids,
                [sorted((t, it.logprob) for t, it in row.items()) for row in answer.logprobs or ()],
            )
            for answer in output.outputs
        ]
        for output in outputs
    ]


@pytest.fixture(scope="module")
def alone(llm, folder):
    """Answers of each adapter, and of the model (None), one after the other."""
    return {
        (name, params.temperature): ask(llm, folder, [name], params)[0]
        for params in (GREEDY, DRAWN)
        for name in (None, *NAMES)
    }


def test_adapters_change_answers(alone):
    found = [tuple(alone[name, 0.0][0][0]) for name in (None, *NAMES)]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_many_adapters_at_once_give_the_bits_of_each_alone(llm, folder, alone, params):
    names = [None, *NAMES[:4], None, *reversed(NAMES), *NAMES, None]
    llm.reset_prefix_cache()
    for _ in range(2):  # the second time with cached prefixes
        found = ask(llm, folder, names, params)
        assert found == [alone[name, params.temperature] for name in names]
    llm.llm_engine.client.core.check_integrity()


@pytest.mark.parametrize(
    "settings",
    [
        {"enforce_eager": True},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 48, "max_num_seqs": 5},
        {"num_gpu_blocks_override": 36, "block_size": 16},
        {"distributed_executor_backend": "mp"},
        {"tensor_parallel_size": 2, "num_threads": 1},
        {"pipeline_parallel_size": 2, "num_threads": 1},
        {"speculative_config": {"method": "ngram"}},
        {"speculative_config": {"model": BUILTIN_DRAFT_MODEL}},
        {"speculative_config": {"model": BUILTIN_EAGLE_HEAD}},
    ],
    ids=["eager", "small steps", "few blocks", "mp", "tp", "pp", "ngram", "draft model", "eagle"],
)
def test_every_layout_gives_the_same_bits(folder, alone, settings):
    names = [None, *NAMES, *NAMES[:3], None]
    settings = {"max_model_len": 512, "dtype": "float32", **LORA, **settings}
    with LLM(**settings) as llm:
        assert ask(llm, folder, names) == [alone[name, 0.0] for name in names]


def test_several_answers_and_beams(llm, folder):
    several = replace(DRAWN, n=3)
    expected = [ask(llm, folder, [name], several)[0] for name in (None, "a", "b")]
    assert ask(llm, folder, [None, "a", "b"], several) == expected
    params = BeamSearchParams(beam_width=2, max_tokens=6)
    prompts = [{"prompt_token_ids": PROMPT}] * 2
    beams = llm.beam_search(prompts, params, [lora(folder, "a"), None])
    (base,) = llm.beam_search(prompts[:1], params)
    assert [it.tokens for it in beams[1].sequences] == [it.tokens for it in base.sequences]
    assert [it.tokens for it in beams[0].sequences] != [it.tokens for it in base.sequences]


def test_a_grammar_with_an_adapter(llm, folder):
    form = StructuredOutputsParams(regex="(cat|dog){3}")
    params = SamplingParams(temperature=0.0, max_tokens=20, structured_outputs=form)
    found = [
        output.outputs[0].text
        for output in llm.generate(
            ["A story of a"] * 2, params, lora_request=lora(folder, "b"), use_tqdm=False
        )
    ]
    assert found[0] == found[1]
    assert found[0] in {
        a + b + c for a in ("cat", "dog") for b in ("cat", "dog") for c in ("cat", "dog")
    }


def test_streams_and_chats(llm, folder, alone):
    pieces = llm.stream({"prompt_token_ids": PROMPT}, GREEDY, lora_request=lora(folder, "c"))
    tokens = [token for piece in pieces for token in piece.outputs[0].token_ids]
    assert tokens == alone["c", 0.0][0][0]
    messages = [{"role": "user", "content": "A story, please."}]
    said = [
        llm.chat(messages, GREEDY, use_tqdm=False, lora_request=it)[0].outputs[0].token_ids
        for it in (None, lora(folder, "d"))
    ]
    assert said[0] != said[1]


def test_two_names_of_the_same_files_share_the_prefix_cache(llm, folder, alone):
    llm.reset_prefix_cache()
    ask(llm, folder, ["a"])
    again = LoRARequest("another name", 77, str(folder / "a"))
    (output,) = llm.generate(
        {"prompt_token_ids": PROMPT}, GREEDY, lora_request=again, use_tqdm=False
    )
    assert output.num_cached_tokens == 128
    assert output.outputs[0].token_ids == alone["a", 0.0][0][0]


def test_a_bad_adapter_harms_nobody(llm, folder, tmp_path, alone):
    bad = shutil.copytree(folder / "a", tmp_path / "bad")
    (bad / "adapter_model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors"):
        llm.generate("x", GREEDY, lora_request=LoRARequest("bad", 50, str(bad)), use_tqdm=False)
    with pytest.raises(AdapterError, match="There is no adapter"):
        llm.generate("x", lora_request=LoRARequest("none", 51, str(tmp_path / "none")))
    with pytest.raises(RequestError, match="lora_request is a str"):
        llm.generate("x", lora_request="a")
    with pytest.raises(ValueError, match="1 prompts and 2 adapters"):
        llm.generate("x", lora_request=[None, None])
    assert ask(llm, folder, ["a"])[0] == alone["a", 0.0]


def test_changed_files_are_found(llm, folder, tmp_path, alone):
    """The files of a known adapter change before the engine reads them: its requests fail."""
    path = shutil.copytree(folder / "a", tmp_path / "x")
    request = LoRARequest("x", 60, str(path))
    llm.llm_engine.adapters.resolve(request)
    shutil.rmtree(path)
    shutil.copytree(folder / "b", path)
    ask(llm, folder, NAMES[1:6])  # other adapters take all slots
    prompts = [{"prompt_token_ids": PROMPT}] * 2
    outputs = llm.generate(
        prompts, GREEDY, lora_request=[request, lora(folder, "c")], use_tqdm=False
    )
    assert outputs[0].outputs[0].finish_reason == "error"
    assert "have changed" in outputs[0].outputs[0].stop_reason
    assert outputs[1].outputs[0].token_ids == alone["c", 0.0][0][0]
    again = replace(request, load_inplace=True)
    (output,) = llm.generate(prompts[:1], GREEDY, lora_request=again, use_tqdm=False)
    assert output.outputs[0].token_ids == alone["b", 0.0][0][0]


def test_without_enable_lora(folder):
    with LLM(max_model_len=128) as llm, pytest.raises(RequestError, match="enable_lora=True"):
        llm.generate("x", lora_request=lora(folder, "a"))


def post(server, path, body):
    response = server.post(path, body)
    return response.status_code, response.json()


def complete(server, model, **fields):
    body = {"model": model, "prompt": PROMPT, "max_tokens": 16, "temperature": 0, **fields}
    body |= {"ignore_eos": True, "return_token_ids": True}
    status, answer = post(server, "/v1/completions", body)
    assert status == 200, answer
    return answer["choices"][0]["token_ids"]


@pytest.mark.parametrize("layout", ["one", "two engines"])
def test_a_server_with_adapters(tmp_path, folder, alone, layout):
    """Load, unload, wrong requests and the death of an engine, while requests run."""
    root = shutil.copytree(folder, tmp_path / "adapters")
    outside = shutil.copytree(folder / "a", tmp_path / "outside")
    (root / "link").symlink_to(outside)
    flags = ["--dtype", "float32", "--max-model-len", "512", "--enable-lora", "--max-loras", "2"]
    flags += ["--max-cpu-loras", "3", "--lora-root", str(root), "--enable-admin"]
    flags += [
        "--lora-modules",
        f"a={root / 'a'}",
        json.dumps({"name": "b", "path": str(root / "b")}),
    ]
    if layout == "two engines":
        flags += ["--data-parallel-size", "2", "--num-threads", "1"]
    expected = {name: alone[name, 0.0][0][0] for name in (None, *NAMES)}
    with (
        serve(tmp_path, *flags, spare=True) as server,
        concurrent.futures.ThreadPoolExecutor(16) as pool,
    ):
        assert complete(server, "a") == expected["a"]
        assert complete(server, "octavo/stories") == expected[None]
        models = {it["id"]: it for it in server.get("/v1/models").json()["data"]}
        assert list(models) == ["octavo/stories", "a", "b"]
        assert models["a"]["parent"] == "octavo/stories"
        assert models["a"]["root"] == str(root / "a")
        assert server.get("/v1/models/b").json()["id"] == "b"

        load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
        for name in NAMES[2:]:
            status, answer = post(server, load, {"lora_name": name, "lora_path": name})
            assert (status, answer["id"]) == (200, name), answer
        for name, path, status, said in (
            ("a", "a", 400, "is loaded already"),
            ("octavo/stories", "a", 400, "is the name of the model"),
            ("new", str(outside), 400, "is outside of"),
            ("new", "link", 400, "is outside of"),
            ("new", "../outside", 400, "is outside of"),
            ("new", "none", 400, "There is no adapter"),
            ("new", "a\0b", 400, ""),
            ("new", "", 400, "lora_path"),
            ("", "a", 400, "lora_name"),
        ):
            found, answer = post(server, load, {"lora_name": name, "lora_path": path})
            assert found == status, answer
            assert said in answer["error"]["message"]
        status, answer = post(server, "/v1/completions", {"model": "new", "prompt": "x"})
        assert (status, answer["error"]["code"]) == (404, "model_not_found")

        # All adapters at once, and a long answer whose adapter is unloaded meanwhile.
        long = pool.submit(complete, server, "c", max_tokens=300)
        names = [None, *NAMES] * 3
        jobs = [pool.submit(complete, server, name or "octavo/stories") for name in names]
        for name, job in zip(names, jobs, strict=True):
            assert job.result() == expected[name], name
        assert post(server, unload, {"lora_name": "c"})[0] == 200
        assert post(server, unload, {"lora_name": "c"})[0] == 404
        assert post(server, "/v1/completions", {"model": "c", "prompt": "x"})[0] == 404
        answer = long.result()
        assert answer[:16] == expected["c"]
        assert len(answer) == 300

        # The same name with other files.
        body = {"lora_name": "a", "lora_path": "d", "load_inplace": True}
        assert post(server, load, body)[0] == 200
        assert complete(server, "a") == expected["d"]

        # The engine dies: its successor reads the adapters again, and continues the answers.
        jobs = server.begin_together(
            lambda: [pool.submit(complete, server, name, max_tokens=300) for name in "befgh"]
        )
        alone_then = {}
        server.engine_process().kill()
        for name, job in zip("befgh", jobs, strict=True):
            alone_then[name] = job.result()
            assert alone_then[name][:16] == expected[name]
        for name in "befgh":
            assert complete(server, name, max_tokens=300) == alone_then[name]
        assert "octavo:lora_requests_info" in server.get("/metrics").text


def test_adapters_of_a_pooling_model(folder, tmp_path):
    """Vectors with an adapter are those of each alone, among others."""
    settings = {"convert": "embed", "runner": "pooling", "dtype": "float32", "max_model_len": 256}
    texts = [{"prompt_token_ids": PROMPT[:n]} for n in (30, 50, 70)]
    with LLM(**settings, **LORA) as llm:
        adapters = [None, lora(folder, "b"), lora(folder, "d")]
        single = [
            llm.embed(text, lora_request=it, use_tqdm=False)[0].outputs.embedding
            for text, it in zip(texts, adapters, strict=True)
        ]
        found = [
            it.outputs.embedding for it in llm.embed(texts, lora_request=adapters, use_tqdm=False)
        ]
        plain = [it.outputs.embedding for it in llm.embed(texts, use_tqdm=False)]
    assert found == single
    assert found[0] == plain[0]
    assert not np.allclose(found[1], plain[1])


def test_front_ends_and_engines_share_adapters(tmp_path, folder, alone):
    """Loads, searches, and the deaths of a front end and of an engine."""
    flags = ["--dtype", "float32", "--max-model-len", "512", "--enable-lora", "--max-loras", "2"]
    flags += ["--lora-root", str(folder), "--lora-resolvers", "folder", "--enable-admin"]
    flags += ["--lora-modules", f"a={folder / 'a'}", "--num-threads", "1", "-dp", "2", "-asc", "2"]
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    expected = {name: alone[name, 0.0][0][0] for name in NAMES}
    with (
        serve(tmp_path, *flags, spare=True) as server,
        concurrent.futures.ThreadPoolExecutor(16) as pool,
    ):

        def answered():
            """Return True if both front ends have answered POSTs since the last call."""
            lines = server.log.read_text().splitlines()[answered.seen :]
            answered.seen += len(lines)
            posts = [line for line in lines if "POST /v1/completions" in line]
            return all(any(f"api_server={i}" in line for line in posts) for i in range(2))

        def everywhere(work):
            """Return the results of work that both front ends have done."""
            found = []
            for _ in range(50):
                found += pool.map(lambda _: work(), range(8))
                if answered():
                    return found
            raise AssertionError(server.log.read_text())

        answered.seen = 0
        assert post(server, load, {"lora_name": "x", "lora_path": "b"})[0] == 200
        for found in everywhere(lambda: complete(server, "x")):
            assert found == expected["b"]

        # Ten loads of one name at the same time.
        bodies = [{"lora_name": "y", "lora_path": NAMES[i % 4]} for i in range(10)]
        found = list(pool.map(lambda body: post(server, load, body), bodies))
        ((won, body),) = (it for it in zip(found, bodies, strict=True) if it[0][0] == 200)
        assert won[1]["root"] == str(folder / body["lora_path"])
        for found in everywhere(lambda: complete(server, "y")):
            assert found == expected[body["lora_path"]]

        # A resolver finds an adapter, a module gets other files, and an adapter is unloaded.
        assert complete(server, "h") == expected["h"]
        body = {"lora_name": "a", "lora_path": "d", "load_inplace": True}
        assert post(server, load, body)[0] == 200
        assert post(server, unload, {"lora_name": "x"})[0] == 200

        def names():
            return [it["id"] for it in server.get("/v1/models").json()["data"]]

        def look():
            assert post(server, "/v1/completions", {"model": "x", "prompt": "x"})[0] == 404
            return names()

        known = ["octavo/stories", "a", "y", "h"]
        assert all(found == known for found in everywhere(look))

        # A front end dies, and another one takes its place.
        begun = server.log.read_text().count("INFO ready")
        victim = front_ends(server)[0]
        victim.kill()
        wait_for_front_ends(server, begun + 1, {victim.pid})
        assert all(found == known for found in everywhere(look))
        assert set(map(tuple, everywhere(lambda: complete(server, "a")))) == {tuple(expected["d"])}

        # An engine dies while adapters are loaded and answers are written.
        jobs = server.begin_together(
            lambda: [pool.submit(complete, server, name, max_tokens=300) for name in "ahy"]
        )
        loading = [
            pool.submit(post, server, load, {"lora_name": f"z{i}", "lora_path": "b"})
            for i in range(4)
        ]
        engines(server)[1].kill()
        assert [it.result()[0] for it in loading] == [200] * 4
        for name, job in zip(("d", "h"), jobs[:2], strict=True):
            assert job.result()[:16] == expected[name]
        for found in everywhere(lambda: complete(server, "z3")):
            assert found == expected["b"]
