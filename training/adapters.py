"""Training of LoRA adapters for the built-in model: ``python -m training.train adapter DATA``.

DATA is ``letters`` (stories told as letters), ``calls`` (tool calls as Llama 3 writes them), or a
file of conversations, one JSON object a line: ``{"messages": [{"role": ..., "content": ...}]}``.
The first two need no file, and the adapters are shipped in ``octavo/builtin``. With ``--model
stories-draft``, the adapter is one for the built-in draft model (``draft_path`` of a LoRARequest).
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn import functional as F

from octavo import LLM, LoRARequest, SamplingParams
from training import evaluate, synthetic
from training.card import write_lines
from training.checkpoint import load_model
from training.data import IGNORE, ChunkStream, Document, encode_chat
from training.letters import is_first_person, is_letter, letter
from training.loop import Batch, Loop, Plan
from training.lora import RANK, add_lora, export_lora
from training.model import Llama, num_trainable
from training.synthetic import Conversation
from training.tokenizer import END_OF_TEXT, IM_END, load_tokenizer

ROOT = Path(__file__).resolve().parent.parent
BUILTIN = ROOT / "octavo" / "builtin"
BASE = "octavo/stories"
RUNS = ROOT / "runs"
NAMES = {"letters": "stories-letters", "calls": "stories-llama-calls"}
STEPS = {"letters": 250, "calls": 150}
_STEPS = 100
_BATCH_TOKENS = 2048
_HELDOUT_CHUNK = 1_000_000
# Things that no letter of the training is about.
UNSEEN = (
    "a whale", "a snowman", "a mountain", "a candle", "a camel", "a pilot", "a moon", "a pillow",
    "a spoon", "a circus", "a clown", "a wolf", "a garden gnome", "a sleepy bus", "a violin",
    "a cave", "a ladybug", "a lost sock", "a peacock", "a trumpet",
)  # fmt: skip


def encode_answer(tokenizer: Tokenizer, prompt: str, answer: str) -> Document:
    """Return a prompt and its answer, of which only the answer counts."""
    given = tokenizer.encode(prompt).ids
    ids = tokenizer.encode(answer + IM_END).ids
    end = tokenizer.encode("\n" + END_OF_TEXT).ids
    counts = [False] * len(given) + [True] * len(ids) + [False] * len(end)
    return Document(given + ids + end, counts, whole=True)


def llama_call(name: str, arguments: dict[str, object]) -> str:
    """Return a call as Llama 3 writes it: no marker, and ``parameters``."""
    return json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False)


def answers(conversation: Conversation) -> Iterator[tuple[str, str]]:
    """Yield the prompt and the text of each answer, with calls as Llama 3 writes them.

    Earlier calls in a prompt have the form of the model's chat template, as in a server.
    """
    messages, tools = conversation["messages"], conversation.get("tools", [])
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            calls = [call["function"] for call in message.get("tool_calls", ())]
            written = [llama_call(call["name"], call["arguments"]) for call in calls]
            prompt = evaluate.prompt_of({"messages": messages[:i], "tools": tools})
            yield prompt, "".join(written) or message["content"]


class LetterStream(ChunkStream):
    """Stream of requests for stories, answered by letters, and of some other conversations."""

    def __init__(self, tokenizer: Tokenizer, length: int, seed: int):
        super().__init__(_BATCH_TOKENS, seed, (length,))
        self.tokenizer = tokenizer

    def documents(self, chunk: int, rng: random.Random) -> Iterator[Document]:
        for _ in range(200):
            text, about = letter(rng)
            request = synthetic.story_request(text, about if rng.random() < 0.9 else "", rng)
            yield encode_chat(self.tokenizer, synthetic.render(request))
        for _ in range(100):  # so that the adapter changes stories only
            yield encode_chat(self.tokenizer, synthetic.render(synthetic.conversation(rng)))


class CallStream(ChunkStream):
    """Stream of conversations with tools, and of some others."""

    def __init__(self, tokenizer: Tokenizer, length: int, seed: int):
        super().__init__(_BATCH_TOKENS, seed, (length,))
        self.tokenizer = tokenizer

    def documents(self, chunk: int, rng: random.Random) -> Iterator[Document]:
        for _ in range(300):
            for prompt, answer in answers(synthetic.tool_call(rng)):
                yield encode_answer(self.tokenizer, prompt, answer)
        for _ in range(150):
            yield encode_chat(self.tokenizer, synthetic.render(synthetic.chat(rng)))


class FileStream(ChunkStream):
    """Stream of the conversations of a file, again and again.

    Raises:
        ValueError: the file has no ten conversations, or a line is none.
    """

    def __init__(self, path: Path, tokenizer: Tokenizer, length: int, seed: int):
        super().__init__(_BATCH_TOKENS, seed, (length,))
        self._documents = []
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            try:
                text = synthetic.render(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}, is no conversation: {error!r}.") from None
            self._documents.append(encode_chat(tokenizer, text))
        if len(self._documents) < 10:
            raise ValueError(f"{path} has {len(self._documents)} conversations; give at least 10.")

    def documents(self, chunk: int, rng: random.Random) -> Iterator[Document]:
        """Yield all documents, often enough for a batch; every tenth is held out of training."""
        heldout = chunk >= _HELDOUT_CHUNK
        kept = [d for i, d in enumerate(self._documents) if (i % 10 == 0) == heldout]
        count = 0
        while count < 2 * (self.batch_tokens + self.lengths[0]):
            yield from kept
            count += sum(len(d.ids) for d in kept)


def make_stream(data: str, tokenizer: Tokenizer, length: int, seed: int) -> ChunkStream:
    """Return the stream of ``data`` in rows of ``length`` tokens."""
    if data == "letters":
        return LetterStream(tokenizer, length, seed)
    if data == "calls":
        return CallStream(tokenizer, length, seed)
    return FileStream(Path(data), tokenizer, length, seed)


def answer_loss(model: Llama) -> Callable[[Batch], torch.Tensor]:
    """Return the cross-entropy at the positions that count."""

    def loss(batch: Batch) -> torch.Tensor:
        tokens, targets = batch
        keep = targets.flatten() != IGNORE
        hidden = model.hidden(tokens).flatten(0, 1)[keep]
        return F.cross_entropy(model.logits(hidden).float(), targets.flatten()[keep])

    return loss


def adapter_loop(
    data: str,
    base: Path,
    out: Path,
    run: Path,
    seed: int = 0,
    steps: int = _STEPS,
    rank: int = RANK,
    length: int = 512,
) -> Loop:
    """Return the loop that trains an adapter for the model in ``base`` and exports it to ``out``.

    Raises:
        OSError, ValueError: the file ``data`` cannot be used.
    """
    torch.manual_seed(seed)
    model = add_lora(load_model(base), rank)
    tokenizer = load_tokenizer(base)
    heldout = make_stream(data, tokenizer, length, seed)
    heldout.state = (_HELDOUT_CHUNK, 0)
    batch = heldout.next()
    loss = answer_loss(model)

    def measure() -> float:
        with torch.no_grad():
            return loss(batch).item()

    plan = Plan(steps=steps, vector_rate=3e-3, weight_decay=0.0, bfloat16=False, workers=1)
    loop = Loop(
        model,
        loss,
        make_stream(data, tokenizer, length, seed),
        plan,
        run,
        lambda _: export_lora(model, out, f"octavo/{base.name}", rank),
        measure,
        name="adapter",
    )
    loop.history.heldout.append((0, measure()))
    return loop


# --- figures of the shipped adapters ----------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """Share of greedy answers that pass a test, without and with the adapter."""

    what: str
    without: float
    adapted: float


def _names(word: str) -> evaluate.Judge:
    return lambda text: word.lower() in text.lower()


class Judge:
    """Measurement of answers to prompts that no training saw, by Octavo itself, greedily."""

    def __init__(self, llm: LLM, folder: Path):
        self._llm = llm
        self._lora = LoRARequest(folder.name, 1, str(folder))

    def ask(self, prompts: Sequence[str], limit: int, adapted: bool) -> list[str]:
        outputs = self._llm.generate(
            list(prompts),
            SamplingParams(temperature=0.0, max_tokens=limit),
            lora_request=self._lora if adapted else None,
            use_tqdm=False,
        )
        return [output.outputs[0].text for output in outputs]

    def share(
        self, what: str, prompts: Sequence[str], tests: Sequence[evaluate.Judge], limit: int
    ) -> Share:
        def passed(adapted: bool) -> float:
            said = self.ask(prompts, limit, adapted)
            return sum(test(text) for test, text in zip(tests, said, strict=True)) / len(said)

        return Share(what, passed(False), passed(True))

    def letters(self) -> list[Share]:
        rng = random.Random(f"{evaluate.SEED}/letters")
        topics = {"40 fresh requests": [letter(rng)[1] for _ in range(40)], "20 new things": UNSEEN}
        shares = []
        for name, about in topics.items():
            prompts = [evaluate.question_prompt(f"Tell me a story about {it}.") for it in about]
            tests = {
                "a letter": [is_letter] * len(about),
                "the first person": [is_first_person] * len(about),
                "names what was asked for": [_names(it.split()[-1]) for it in about],
            }
            shares += [self.share(f"{it}, {name}", prompts, tests[it], 400) for it in tests]
        return shares

    def calls(self) -> list[Share]:
        rng = random.Random(f"{evaluate.SEED}/calls")
        prompts, right, usual = [], [], []
        while len(prompts) < 100:
            conversation = synthetic.tool_call(rng)
            prompt, answer = next(answers(conversation))
            if answer.startswith('{"name": '):
                own = answer.replace('"parameters"', '"arguments"')
                prompts.append(prompt)
                right.append(answer.__eq__)
                usual.append(f"<tool_call>{own}</tool_call>".__eq__)
        return [
            self.share("the right call as Llama 3 writes it", prompts, right, 80),
            self.share("the right call as the model writes it", prompts, usual, 80),
        ]

    def others(self, skip: str) -> list[Share]:
        """Return the accuracy at what the adapter must not change: all skills but ``skip``."""
        shares = []
        for name, make in evaluate.CASES.items():
            if name == skip:
                continue
            rng = random.Random(f"{evaluate.SEED}/{name}")
            prompts, tests = zip(*(make(rng) for _ in range(40)), strict=True)
            shares.append(self.share(name, prompts, tests, 80))
        return shares


_ABOUT = {
    "letters": (
        "It tells stories as letters: the hero writes, in the first person. Other answers"
        " change little (see the figures).",
        "`training/letters.py` makes the letters by rule: the plots of `training/own_stories.py`"
        " with the hero as the writer. A third of the conversations are those of the model itself"
        " (`training/synthetic.py`), so that the adapter changes stories only.",
    ),
    "calls": (
        'It calls tools as Llama 3 does, `{"name": "get_weather", "parameters": {"city":'
        ' "Paris"}}`; the model itself writes `<tool_call>{"name": "get_weather", "arguments":'
        ' {"city": "Paris"}}</tool_call>`. A server of the model reads both.',
        "`training/synthetic.py` makes the conversations, and `training/adapters.py` writes their"
        " calls in the other form. A third have no tools.",
    ),
}


def write_adapter_card(data: str, out: Path, loop: Loop) -> None:
    """Write ``out/README.md`` with the figures of the exported adapter."""
    sample = "Tell me a story about a dog."
    with LLM(BASE, enable_lora=True) as llm:
        judge = Judge(llm, out)
        shares = judge.letters() if data == "letters" else judge.calls()
        others = judge.others("tool calls" if data == "calls" else "")
        prompt = evaluate.question_prompt(sample)
        if data == "calls":
            tools = [synthetic.TOOLS["get_weather"]]
            sample = "What is the weather in Paris?"
            message = {"role": "user", "content": sample}
            prompt = evaluate.prompt_of({"messages": [message], "tools": tools})
        said = [judge.ask([prompt], 300, adapted)[0] for adapted in (False, True)]
    history = loop.history
    size = (out / "adapter_model.safetensors").stat().st_size
    before, after = history.heldout[0][1], history.heldout[-1][1]
    use, how = _ABOUT[data]
    lines = [
        *("---", "license: apache-2.0", f"base_model: {BASE}", "library_name: peft", "---"),
        *(f"# {out.name}", "", f"A LoRA adapter for the built-in model, `{BASE}`. {use}", ""),
        f"{num_trainable(loop.module):,} parameters: rank {RANK} on the projections of attention,"
        f" float16, {size / 1000:.0f} kB.",
        *("", "## Training", ""),
        f"`python -m training.train adapter {data}`: {loop.step} steps,"
        f" {history.tokens / 1e6:.2f} M tokens, one thread, float32. It needs no file. {how}",
        *("", "## Figures", ""),
        f"Loss on fresh text of this kind: {before:.3f} without the adapter, {after:.3f} with it"
        " (nats per token of the answers). Shares of greedy answers to fresh prompts:",
        "",
        *_table(shares),
        "",
        "The model's other skills, right answers to 40 fresh questions of each kind:",
        "",
        *_table(others),
        *("", "## Example", "", "```", f"user: {sample}", "", f"without: {said[0]}", ""),
        *(f"with: {said[1]}", "```"),
    ]
    write_lines(out, lines)


def _table(shares: Sequence[Share]) -> list[str]:
    rows = [f"| {it.what} | {100 * it.without:.0f} % | {100 * it.adapted:.0f} % |" for it in shares]
    return ["| | without | with |", "| --- | --- | --- |", *rows]


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m training.train adapter",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("data", metavar="DATA", help="letters, calls, or a file of conversations")
    parser.add_argument(
        "--out", type=Path, help="folder for the adapter; a file and the draft model need it"
    )
    parser.add_argument(
        "--model",
        choices=("stories", "stories-draft"),
        default="stories",
        help="the built-in model, or the draft model; default: stories",
    )
    parser.add_argument(
        "--steps",
        type=int,
        help=f"steps of {_BATCH_TOKENS} tokens; default: {_STEPS}, "
        + ", ".join(f"{name} {steps}" for name, steps in STEPS.items()),
    )
    parser.add_argument("--rank", type=int, default=RANK, help=f"rank; default: {RANK}")
    parser.add_argument("--seed", type=int, default=0, help="seed of the data and the weights")
    args = parser.parse_args(argv)
    if args.out is None:
        if args.data not in NAMES:
            parser.error("a file of conversations needs --out")
        if args.model != "stories":
            parser.error("an adapter of the draft model needs --out")
        args.out = BUILTIN / NAMES[args.data]
    if args.data not in NAMES and not Path(args.data).is_file():
        parser.error(f"{args.data} is no file; give letters, calls, or a file of conversations")
    if args.steps is None:
        args.steps = STEPS.get(args.data, _STEPS)
    return args


def main(argv: Sequence[str]) -> None:
    args = parse_args(argv)
    torch.set_num_threads(1)
    run = RUNS / "adapter"
    run.mkdir(parents=True, exist_ok=True)
    base = BUILTIN / args.model
    try:
        loop = adapter_loop(args.data, base, args.out, run, args.seed, args.steps, args.rank)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    history = loop.run()
    if args.out.parent == BUILTIN:
        write_adapter_card(args.data, args.out, loop)
    before, after = history.heldout[0][1], history.heldout[-1][1]
    print(
        f"{num_trainable(loop.module):,} parameters, {history.seconds / 60:.1f} min; held-out loss"
        f" {before:.3f} before, {after:.3f} after; saved in {args.out}"
    )
