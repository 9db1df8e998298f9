"""Data sets: right requests, the same for the same seed, and clear errors for bad files."""

import argparse
import json

import pytest

from octavo.bench.datasets import add_dataset_arguments, load_dataset
from octavo.errors import ConfigError, DatasetError
from tests.small_tokenizers import byte_level

TOKENIZER = byte_level()


def load(name, *flags, tokenizer=TOKENIZER, vocab_size=256, rate=None):
    parser = argparse.ArgumentParser()
    add_dataset_arguments(parser)
    args = parser.parse_args(["--dataset-name", name, *map(str, flags)])
    if rate is not None:
        args.request_rate = rate
    return load_dataset(args, tokenizer, vocab_size)


def write(folder, *lines):
    path = folder / "data.jsonl"
    path.write_text(
        "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    )
    return path


def azure(folder, *rows):
    path = folder / "trace.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    return path


SONNET = "".join(f"Shall I compare thee to a summer's day, number {i}?\n" for i in range(60))
FILES = {
    "random": None,
    "prefix_repetition": None,
    "sharegpt": json.dumps(
        [
            {"conversations": [{"value": f"Why is it {i}?"}, {"value": "Because."}]}
            for i in range(30)
        ]
    ),
    "spec_bench": "".join(
        json.dumps({"category": "math", "turns": [f"Count to {i}.", "And on."]}) + "\n"
        for i in range(30)
    ),
    "sonnet": SONNET,
    "workload": json.dumps({"prompt_token_ids": [1, 2], "max_tokens": 3, "arrival_unit": 2.0}),
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44",
    "mooncake": json.dumps(
        {"timestamp": 5, "input_length": 600, "output_length": 2, "hash_ids": [0, 1]}
    ),
}


def path_flags(name, folder):
    if FILES[name] is None:
        return []
    path = folder / "file"
    path.write_text(FILES[name])
    return ["--dataset-path", path]


@pytest.mark.parametrize("name", FILES)
def test_the_same_seed_makes_the_same_requests(name, tmp_path):
    flags = [*path_flags(name, tmp_path), "--num-prompts", 10]
    requests = load(name, *flags)
    assert requests == load(name, *flags)
    assert requests
    for request in requests:
        assert request.prompt_token_ids
        assert all(0 <= i < len(TOKENIZER) for i in request.prompt_token_ids)
        assert request.max_tokens >= 1
    if name != "workload":  # it has nothing random
        assert requests != load(name, *flags, "--seed", 1)


def test_random():
    requests = load(
        "random", "--num-prompts", 50, "--random-input-len", 20, "--random-prefix-len", 5
    )
    assert {len(r.prompt_token_ids) for r in requests} == {25}
    assert {r.max_tokens for r in requests} == {128}
    assert {r.prefix_len for r in requests} == {5}
    assert len({tuple(r.prompt_token_ids[:5]) for r in requests}) == 1
    assert len({tuple(r.prompt_token_ids[5:]) for r in requests}) == 50
    assert len(load("random", "--input-len", 1)) == 1000


def test_random_range_ratio():
    flags = ("--num-prompts", 300, "--input-len", 10, "--output-len", 20)
    requests = load("random", *flags, "--random-range-ratio", 0.5)
    assert {len(r.prompt_token_ids) for r in requests} == set(range(5, 16))
    assert {r.max_tokens for r in requests} == set(range(10, 31))


def test_special_tokens_are_never_drawn():
    requests = load("random", "--num-prompts", 20, "--input-len", 500, vocab_size=258)
    assert max(max(r.prompt_token_ids) for r in requests) == 255
    requests = load("random", "--num-prompts", 20, "--input-len", 50, tokenizer=None, vocab_size=2)
    assert {i for r in requests for i in r.prompt_token_ids} == {0, 1}


def test_prefix_repetition():
    requests = load(
        "prefix_repetition",
        *("--num-prompts", 13, "--prefix-repetition-num-prefixes", 4),
        *("--prefix-repetition-prefix-len", 6, "--prefix-repetition-suffix-len", 3),
        *("--prefix-repetition-output-len", 7),
    )
    assert len(requests) == 12
    prefixes = [tuple(r.prompt_token_ids[:6]) for r in requests]
    assert {prefixes.count(p) for p in prefixes} == {3}
    assert all(len(r.prompt_token_ids) == 9 and r.max_tokens == 7 for r in requests)


def conversation(question, answer="An answer."):
    return {
        "conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    }


def test_sharegpt(tmp_path):
    path = tmp_path / "chats.json"
    entries = [
        conversation("What is it?"),
        conversation("Hi"),  # too short
        conversation("x" * 1025),
        conversation("Why is it so?", "No"),  # the answer is too short
        {"conversations": [{"value": "alone"}]},
        conversation("Where is it?", "y" * 60),
    ]
    path.write_text(json.dumps(entries))
    flags = ("--dataset-path", path, "--disable-shuffle")
    requests = load("sharegpt", *flags, "--no-oversample")
    assert [r.prompt for r in requests] == ["What is it?", "Where is it?"]
    assert [r.max_tokens for r in requests] == [len("An answer."), 60]
    assert requests[0].prompt_token_ids == TOKENIZER.encode("What is it?")
    fixed = load("sharegpt", *flags, "--sharegpt-output-len", 5, "--num-prompts", 4)
    assert [r.prompt for r in fixed] == [
        "What is it?",
        "Why is it so?",
        "Where is it?",
        "What is it?",
    ]
    assert {r.max_tokens for r in fixed} == {5}
    shuffled = {
        load("sharegpt", *flags[:2], "--num-prompts", 1, "--seed", s)[0].prompt for s in range(9)
    }
    assert len(shuffled) == 2


def test_spec_bench(tmp_path):
    path = write(
        tmp_path,
        {"category": "math", "turns": ["Add.", "Again."]},
        {"category": "qa", "turns": ["Ask."]},
    )
    requests = load("spec_bench", "--dataset-path", path, "--num-prompts", 2)
    assert sorted(r.prompt for r in requests) == ["Add.", "Ask."]
    requests = load("spec_bench", "--dataset-path", path, "--spec-bench-category", "qa")
    assert {r.prompt for r in requests} == {"Ask."}
    assert len(requests) == 1000
    with pytest.raises(ConfigError, match=r"'code': .* has math, qa"):
        load("spec_bench", "--dataset-path", path, "--spec-bench-category", "code")


def test_sonnet(tmp_path):
    path = tmp_path / "poem.txt"
    path.write_text(SONNET)
    requests = load(
        "sonnet",
        *("--dataset-path", path, "--num-prompts", 5),
        *("--sonnet-input-len", 550, "--sonnet-prefix-len", 200),
    )
    shared = requests[0].prompt_token_ids[: requests[0].prefix_len]
    assert 150 < len(shared) < 250
    for request in requests:
        assert request.prompt_token_ids[: len(shared)] == shared
        assert abs(len(request.prompt_token_ids) - 550) < 30
        assert set(request.prompt.splitlines()[1:]) <= set(SONNET.splitlines())
    assert len({r.prompt for r in requests}) == 5
    with pytest.raises(ConfigError, match="do not fit"):
        load("sonnet", "--dataset-path", path, "--sonnet-input-len", 40)
    with pytest.raises(ConfigError, match="do not fit"):
        load("sonnet", "--dataset-path", path, "--sonnet-prefix-len", 9000)


def test_workload(tmp_path):
    rows = [
        {
            "id": i,
            "prompt_token_ids": [i, 7],
            "max_tokens": 3 + i,
            "arrival_unit": i * 1.5,
            "prefix_len": 1,
        }
        for i in range(3)
    ]
    path = write(tmp_path, rows[0], "\n", *rows[1:])
    requests = load("workload", "--dataset-path", path, rate=2.0, tokenizer=None, vocab_size=1)
    assert [r.prompt_token_ids for r in requests] == [[0, 7], [1, 7], [2, 7]]
    assert [r.max_tokens for r in requests] == [3, 4, 5]
    assert [r.arrival for r in requests] == [0.0, 0.75, 1.5]
    assert {r.prefix_len for r in requests} == {1}
    # Without a rate they arrive at once.
    assert [r.arrival for r in load("workload", "--dataset-path", path)] == [None] * 3
    assert len(load("workload", "--dataset-path", path, "--num-prompts", 2)) == 2


def test_azure(tmp_path):
    path = azure(
        tmp_path,
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:50.9951690,396,109",
        "2023-11-16 18:15:48.6805900,7,1",
    )
    requests = load("azure", "--dataset-path", path)
    assert [r.arrival for r in requests] == pytest.approx([0.0, 2.0, 4.314579])
    assert [len(r.prompt_token_ids) for r in requests] == [374, 7, 396]
    assert [r.max_tokens for r in requests] == [44, 1, 109]
    # Three requests have two gaps: at 4 requests a second, the last arrives after half a second.
    faster = load("azure", "--dataset-path", path, rate=4.0)
    assert [r.arrival for r in faster] == pytest.approx([0.0, 2.0 / 4.314579 / 2, 0.5])


def test_mooncake_shares_what_was_shared(tmp_path):
    rows = [
        {"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]},
        {"timestamp": 1500, "input_length": 1030, "output_length": 6, "hash_ids": [0, 1, 2]},
        {"timestamp": 3000, "input_length": 600, "output_length": 7, "hash_ids": [0, 3]},
    ]
    path = write(tmp_path, *rows)
    a, b, c = load("mooncake", "--dataset-path", path)
    assert [len(r.prompt_token_ids) for r in (a, b, c)] == [1024, 1030, 600]
    assert b.prompt_token_ids[:1024] == a.prompt_token_ids
    assert c.prompt_token_ids[:512] == a.prompt_token_ids[:512]
    assert c.prompt_token_ids[512:] != a.prompt_token_ids[512:600]
    assert [r.arrival for r in (a, b, c)] == [0.0, 1.5, 3.0]
    assert [r.max_tokens for r in (a, b, c)] == [5, 6, 7]
    # A block's tokens depend on its id and the seed, not on the blocks before.
    alone = write(tmp_path, rows[2])
    assert load("mooncake", "--dataset-path", alone)[0].prompt_token_ids == c.prompt_token_ids


ROW = {"prompt_token_ids": [1], "max_tokens": 2}
BLOCKS = {"timestamp": 0, "input_length": 10, "output_length": 5, "hash_ids": [0]}


@pytest.mark.parametrize(
    ("name", "lines", "message"),
    [
        ("workload", [], "has no usable request"),
        ("workload", [ROW, "{oops\n"], "line 2: is not JSON"),
        ("workload", ["\xff\n"], "line 1: is not JSON"),
        ("workload", ["[1]\n"], "line 1: must be a JSON object"),
        ("workload", [{"max_tokens": 1}], "line 1: prompt_token_ids must be a list, not None"),
        ("workload", [ROW | {"prompt_token_ids": []}], "prompt_token_ids must be token ids"),
        ("workload", [ROW | {"prompt_token_ids": [1, True]}], "prompt_token_ids must be"),
        ("workload", [ROW | {"prompt_token_ids": [-1]}], "prompt_token_ids must be"),
        ("workload", [ROW, ROW | {"max_tokens": 0}], "line 2: max_tokens must be .*not 0"),
        ("workload", [ROW | {"max_tokens": "9"}], "line 1: max_tokens must be .* not '9'"),
        ("workload", [ROW | {"arrival_unit": -1}], "line 1: arrival_unit must be .* not -1"),
        ("workload", [ROW, ROW | {"arrival_unit": 1}], "line 2: either all rows have"),
        ("spec_bench", [{"turns": []}], "line 1: turns must be a list of texts"),
        ("spec_bench", [{"turns": 3}], "line 1: turns must be a list, not 3"),
        ("sharegpt", ["{"], "is not JSON"),
        ("sharegpt", ["{}"], "must hold a list of conversations"),
        ("sharegpt", ['[{"id": 1}]'], "entry 0: conversations must be a list"),
        ("sharegpt", ['[{"conversations": [{"value": 1}]}]'], r"conversations\[0\]: value must"),
        ("sharegpt", ["[]"], "has no usable request"),
        ("sharegpt", ["[" * 100_000], "is not JSON"),
        ("sonnet", ["\n\n"], "has no lines"),
        ("azure", ["TIMESTAMP,ContextTokens\n"], "line 1: there is no column GeneratedTokens"),
        ("mooncake", [BLOCKS | {"hash_ids": [0, 1]}], "line 1: hash_ids has 2 blocks of 512"),
        ("mooncake", [BLOCKS | {"hash_ids": ["a"]}], "line 1: hash_ids must be whole numbers"),
        ("mooncake", [BLOCKS, BLOCKS | {"timestamp": None}], "line 2: timestamp must be a number"),
        ("mooncake", [BLOCKS | {"output_length": 0}], "line 1: output_length must be"),
        ("mooncake", ["[" * 100_000], "line 1: is not JSON"),
    ],
)
def test_malformed_files(name, lines, message, tmp_path):
    with pytest.raises(DatasetError, match=message) as raised:
        load(name, "--dataset-path", write(tmp_path, *lines))
    assert "data.jsonl" in str(raised.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("yesterday,1,2", "line 3: TIMESTAMP is 'yesterday'"),
        ("2023-11-16 18:15:46,0,2", "line 3: ContextTokens must be"),
        ("2023-11-16 18:15:46,5,x", "line 3: GeneratedTokens must be .* not 'x'"),
        ("2023-11-16 18:15:46", "line 3: ContextTokens must be .* not None"),
        ("2023-11-16 18:15:46,1000000000000,5", "line 3: ContextTokens is 10+, above 16777216"),
        (f"2023-11-16 18:15:46,{'9' * 5000},5", r"line 3: ContextTokens must be .* not '9+\.\.\."),
        (f"2023-11-16 18:15:46,5,'{'x' * 200_000}'", "after line 2: is not CSV"),
    ],
)
def test_malformed_rows_of_azure(row, message, tmp_path):
    with pytest.raises(DatasetError, match=message):
        load("azure", "--dataset-path", azure(tmp_path, "2023-11-16 18:15:46,5,6", row))


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(DatasetError, match="nowhere cannot be read: No such file"):
        load("workload", "--dataset-path", tmp_path / "nowhere")
    with pytest.raises(DatasetError, match="cannot be read: Is a directory"):
        load("sonnet", "--dataset-path", tmp_path)
    (tmp_path / "latin").write_bytes(b"caf\xe9\n")
    with pytest.raises(DatasetError, match="is not UTF-8"):
        load("sonnet", "--dataset-path", tmp_path / "latin")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--num-prompts", 0), "--num-prompts 0"),
        (("--random-input-len", 0), "--random-input-len 0"),
        (("--output-len", -1), "--output-len -1"),
        (("--random-prefix-len", -1), "--random-prefix-len -1"),
        (("--random-range-ratio", 1.0), "--random-range-ratio 1.0"),
    ],
)
def test_wrong_flags(flags, message):
    with pytest.raises(ConfigError, match=message):
        load("random", *flags)


def test_flags_that_are_missing(tmp_path):
    with pytest.raises(ConfigError, match="--dataset-name workload reads a file"):
        load("workload")
    path = write(tmp_path, {"turns": ["Hi."]})
    with pytest.raises(ConfigError, match="needs the model's tokenizer"):
        load("spec_bench", "--dataset-path", path, tokenizer=None)
    with pytest.raises(ConfigError, match="at least --prefix-repetition-num-prefixes"):
        load("prefix_repetition", "--num-prompts", 3)
    with pytest.raises(ConfigError, match="vocabulary of 0 tokens"):
        load("random", tokenizer=None, vocab_size=0)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("sharegpt", "prompts/conversations_500.json"),
        ("spec_bench", "prompts/spec_bench.jsonl"),
        ("sonnet", "prompts/sonnet.txt"),
        ("workload", "workloads/w3_smollm2-135m.jsonl"),
        ("azure", "traces/AzureLLMInferenceTrace_conv.csv"),
        ("mooncake", "traces/mooncake_conversation.jsonl"),
    ],
)
def test_real_files(name, file, shared_data):
    requests = load(name, "--dataset-path", shared_data / file, "--num-prompts", 60, rate=2.0)
    assert len(requests) == 60
    if name in ("workload", "azure", "mooncake"):
        arrivals = [r.arrival for r in requests]
        assert arrivals == sorted(arrivals)
        assert 15 < arrivals[-1] < 45
