"""Replay an agent's session turn by turn, and count the prompt tokens that are computed again.

    python benchmarks/session_replay.py http://localhost:8000 [--form chat] [--turns 40]
    python benchmarks/session_replay.py --serve "MODEL --max-model-len 16384" \
        --peer "llama-server -m FILE.gguf --jinja --port {port} -c 16384"

A session has a long system prompt, tools, and messages of the user. Each turn sends the whole
conversation: the user's next message, or a result for each call in the last answer. The answers in
it are those that the server itself generated (--answers own), as its client returns them, or the
recorded ones. So a chat template that drops thoughts, text that becomes other tokens than those
generated, and calls that a client writes anew all show. A server is any with OpenAI's chats;
--form selects other APIs.

Columns of a turn: prompt tokens; those found in the cache (usage.prompt_tokens_details, or
timings.cache_n of llama.cpp, or for Ollama's API the server's metrics); new ones since the last
prompt and answer; known tokens that were computed again, and their share of the prompt. A prefix
cache finds whole blocks, so that up to a block is computed again in any case. `ttft` is the time to
the first token in ms, with recorded answers, whose requests are streamed. `change` says where the
ids of the prompt leave those of the last prompt and answer, if the server returns ids: in the
`earlier` part, or in the answer, because its text has `other tokens`, or because the template
writes `other text`. A missed prefix that the server explains (`cache_miss` of Octavo) is shown,
too. `--rewrite` lets the client parse and write the arguments of calls again.

--kill N kills the engine process of a server that --serve started before turn N.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import socket
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from octavo.bench.process import running_server

Json = dict[str, Any]

_READY_SECONDS = 600.0
_BLOCK = 16
_PLACES = ["Lisbon", "Oslo", "Quito", "Kraków", "Nairobi", "Hà Nội", "São Paulo", "Malmö"]
_ASKED = [
    "Find me a flight from {a} to {b} on the {d}th, please. I have two bags.",
    "What would it cost to change booking R{n} so that it leaves from {b}?",
    "Cancel R{n}, and tell me what I get back; the fare was {d}{n}.50 €.",
    "My name is Jos\u00e9 \u201cPepe\u201d N\u00fa\u00f1ez. Which of my bookings go to {a}?",
    "Thanks! Now add a meal (vegan, no nuts) to R{n} for both of us.",
]
_TOOLS: list[tuple[str, str, dict[str, str]]] = [
    ("search_flights", "Find flights.", {"origin": "string", "to": "string", "day": "integer"}),
    ("get_booking", "Return a booking with its passengers and bags.", {"booking_id": "string"}),
    ("change_booking", "Change a booking.", {"booking_id": "string", "changes": "object"}),
    ("cancel_booking", "Cancel a booking.", {"booking_id": "string", "reason": "string"}),
    ("add_meal", "Add a meal.", {"booking_id": "string", "meal": "string", "count": "integer"}),
]


@dataclass
class Session:
    """Conversation to replay."""

    system: str
    tools: list[Json]
    asked: list[str]
    """Messages of the user."""
    results: list[str]
    """Results of calls, in the order in which they are used; then from the first again."""
    recorded: list[Json] = field(default_factory=list)
    """Recorded messages of the assistant, in OpenAI's form."""


def made_session(turns: int) -> Session:
    """Return a session of a travel agent with a system prompt of about 900 tokens."""
    rules = [
        f"{i}. A booking of the class {chr(65 + i % 7)} may be changed up to {6 * i + 2} hours"
        f" before it leaves, for {7 * i + 5} \u20ac a passenger; confirm every change with the"
        " customer first."
        for i in range(20)
    ]
    system = "You help the customers of an airline, with the tools only.\n" + "\n".join(rules)
    tools = [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": text,
                "parameters": {
                    "type": "object",
                    "properties": {key: {"type": kind} for key, kind in fields.items()},
                    "required": list(fields),
                },
            },
        }
        for name, text, fields in _TOOLS
    ]
    asked, results, recorded = [], [], []
    for i in range(turns):
        a, b = _PLACES[i % 8], _PLACES[(3 * i + 1) % 8]
        asked.append(_ASKED[i % 5].format(a=a, b=b, d=i % 27 + 1, n=100 + i))
        booking = {
            "id": f"R{100 + i}",
            "from": a,
            "to": b,
            "bags": [{"kg": 23}] * (i % 3),
            "paid": None,
        }
        results.append(json.dumps({"ok": i % 4 > 0, "bookings": [booking]}, ensure_ascii=i % 2 > 0))
        call = {"name": "get_booking", "arguments": json.dumps({"booking_id": f"R{100 + i}"})}
        recorded.append(
            {"role": "assistant", "content": f"Booking R{100 + i} goes from {a} to {b}."}
            if i % 2
            else {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": f"call_{i:09}", "type": "function", "function": call}],
            }
        )
    return Session(system, tools, asked, results, recorded)


def read_session(path: Path, turns: int) -> Session:
    """Return a recorded session: a JSON object with `messages` (or `traj`) and `tools`.

    Raises:
        SystemExit: the file has no messages of a user.
    """
    found = json.loads(path.read_text())
    messages = found.get("messages") or found.get("traj") or []
    made = made_session(turns)
    texts: dict[str, list[str]] = {"system": [], "user": [], "tool": []}
    for message in messages:
        texts.setdefault(message["role"], []).append(message.get("content") or "")
    if not texts["user"]:
        sys.exit(f"{path} has no messages of a user; its object needs `messages` and `tools`.")
    return Session(
        "\n".join(texts["system"]) or made.system,
        found.get("tools") or made.tools,
        texts["user"],
        texts["tool"] or made.results,
        [message for message in messages if message["role"] == "assistant"],
    )


@dataclass
class Call:
    """Call in an answer, or its result."""

    id: str
    name: str
    result: str = ""


@dataclass
class Turn:
    """Counts of one turn."""

    prompt: int
    cached: int
    completion: int
    calls: list[Call]
    prompt_ids: list[int] = field(default_factory=list)
    answer_ids: list[int] = field(default_factory=list)
    new: int = 0
    again: int = 0
    change: str = ""
    miss: str = ""
    """What the server says about a missed prefix."""
    ttft: float | None = None
    """Seconds to the first token, if the answer was streamed."""


class Conversation(ABC):
    """Conversation in one API's form, with one server."""

    path: str

    def __init__(self, http: httpx.Client, session: Session, args: argparse.Namespace) -> None:
        self.http, self.session, self.args = http, session, args
        self.model = http.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        self.history: list[Json] = []

    @abstractmethod
    def ask(self, text: str) -> None:
        """Add a message of the user."""

    @abstractmethod
    def give(self, calls: list[Call]) -> None:
        """Add the results of calls."""

    @abstractmethod
    def body(self) -> Json:
        """Return the request."""

    @abstractmethod
    def take(self, answer: Json) -> Turn:
        """Add the answer to the conversation; return its counts."""

    def keep_recorded(self, message: Json) -> list[Call]:
        """Replace the newest answer by a recorded one; return its calls."""
        sys.exit("--answers recorded goes with --form chat only.")

    def turn(self) -> Turn:
        """Send the conversation; return the counts."""
        answer = self.http.post(self.path, json=self.body())
        if answer.status_code != 200:
            sys.exit(f"{self.path}: {answer.status_code} {answer.text[:500]}")
        return self.take(answer.json())

    def rewritten(self, arguments: str) -> str:
        """Return a call's arguments as the client sends them back."""
        if self.args.rewrite and is_json(arguments):
            return json.dumps(json.loads(arguments))
        return arguments


class Chat(Conversation):
    """/v1/chat/completions."""

    path = "/v1/chat/completions"

    def __init__(self, http: httpx.Client, session: Session, args: argparse.Namespace) -> None:
        super().__init__(http, session, args)
        self.history.append({"role": "system", "content": session.system})

    def ask(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def give(self, calls: list[Call]) -> None:
        for call in calls:
            self.history.append(
                {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": call.result}
            )

    def body(self) -> Json:
        return {
            "model": self.model,
            "messages": self.history,
            "tools": self.session.tools,
            "max_tokens": self.args.max_tokens,
            "temperature": self.args.temperature,
            "seed": self.args.seed + len(self.history),
            "return_token_ids": True,
            **self.args.extra,
        }

    def take(self, answer: Json) -> Turn:
        (choice,) = answer["choices"]
        message = choice["message"]
        kept = {k: v for k, v in message.items() if v is not None and k != "reasoning"}
        calls = [c for c in kept.pop("tool_calls", ()) if is_json(c["function"]["arguments"])]
        if calls:
            kept["tool_calls"] = calls
        for call in calls:
            call["function"]["arguments"] = self.rewritten(call["function"]["arguments"])
        kept.setdefault("content", None if calls else "")
        self.history.append(kept)
        usage, details = answer["usage"], answer["usage"].get("prompt_tokens_details")
        cached, miss = answer["timings"]["cache_n"] if "timings" in answer else 0, ""
        if details is not None:
            cached = details["cached_tokens"]
            if found := details.get("cache_miss"):
                miss = f"{found['reason']} @{found['token']}, message {found['message']}"
        return Turn(
            usage["prompt_tokens"],
            cached,
            usage["completion_tokens"],
            [Call(c["id"], c["function"]["name"]) for c in calls],
            answer.get("prompt_token_ids") or [],
            choice.get("token_ids") or [],
            miss=miss,
        )

    def turn(self) -> Turn:
        if self.args.answers == "own":
            return super().turn()
        body = {**self.body(), "stream": True, "stream_options": {"include_usage": True}}
        answer: Json = {"choices": [{"message": {}}]}
        ttft, begin = None, time.perf_counter()
        with self.http.stream("POST", self.path, json=body) as response:
            if response.status_code != 200:
                sys.exit(f"{self.path}: {response.status_code} {response.read().decode()[:500]}")
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if ttft is None and any(map(has_token, chunk["choices"])):
                    ttft = time.perf_counter() - begin
                answer |= {k: chunk[k] for k in ("usage", "timings") if chunk.get(k)}
        turn = self.take(answer)
        turn.ttft = ttft
        return turn

    def keep_recorded(self, message: Json) -> list[Call]:
        self.history[-1] = message
        return [Call(c["id"], c["function"]["name"]) for c in message.get("tool_calls") or ()]


class Messages(Conversation):
    """Anthropic's /v1/messages."""

    path = "/v1/messages"

    def ask(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def give(self, calls: list[Call]) -> None:
        blocks = [
            {"type": "tool_result", "tool_use_id": call.id, "content": call.result}
            for call in calls
        ]
        self.history.append({"role": "user", "content": blocks})

    def body(self) -> Json:
        functions = [tool["function"] for tool in self.session.tools]
        return {
            "model": self.model,
            "system": self.session.system,
            "messages": self.history,
            "tools": [
                {k.replace("parameters", "input_schema"): v for k, v in f.items()}
                for f in functions
            ],
            "max_tokens": self.args.max_tokens,
            "temperature": min(1.0, self.args.temperature),
            **self.args.extra,
        }

    def take(self, answer: Json) -> Turn:
        self.history.append({"role": "assistant", "content": answer["content"]})
        usage = answer["usage"]
        cached = usage["cache_read_input_tokens"]
        calls = [Call(b["id"], b["name"]) for b in answer["content"] if b["type"] == "tool_use"]
        return Turn(usage["input_tokens"] + cached, cached, usage["output_tokens"], calls)


class Responses(Conversation):
    """/v1/responses with the whole input."""

    path = "/v1/responses"
    continues = False

    def __init__(self, http: httpx.Client, session: Session, args: argparse.Namespace) -> None:
        super().__init__(http, session, args)
        self.previous: str | None = None

    def ask(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def give(self, calls: list[Call]) -> None:
        for call in calls:
            self.history.append(
                {"type": "function_call_output", "call_id": call.id, "output": call.result}
            )

    def body(self) -> Json:
        body = {
            "model": self.model,
            "instructions": self.session.system,
            "input": self.history,
            "tools": [{"type": "function", **tool["function"]} for tool in self.session.tools],
            "max_output_tokens": self.args.max_tokens,
            "temperature": self.args.temperature,
            **self.args.extra,
        }
        if self.continues:
            body["previous_response_id"] = self.previous
        return body

    def take(self, answer: Json) -> Turn:
        self.previous, usage = answer["id"], answer["usage"]
        if self.continues:
            self.history = []
        else:
            for item in answer["output"]:
                if item["type"] == "function_call":
                    item["arguments"] = self.rewritten(item["arguments"])
            self.history += answer["output"]
        return Turn(
            usage["input_tokens"],
            usage["input_tokens_details"]["cached_tokens"],
            usage["output_tokens"],
            [
                Call(i["call_id"], i["name"])
                for i in answer["output"]
                if i["type"] == "function_call"
            ],
        )


class PreviousResponse(Responses):
    """/v1/responses with previous_response_id."""

    continues = True


class Ollama(Chat):
    """Ollama's /api/chat, whose answers do not report cached tokens."""

    path = "/api/chat"
    _cached = 0

    def give(self, calls: list[Call]) -> None:
        for call in calls:
            self.history.append({"role": "tool", "tool_name": call.name, "content": call.result})

    def body(self) -> Json:
        options = {"temperature": self.args.temperature, "num_predict": self.args.max_tokens}
        return {
            "model": self.model,
            "messages": self.history,
            "tools": self.session.tools,
            "options": options,
            "stream": False,
            **self.args.extra,
        }

    def take(self, answer: Json) -> Turn:
        self.history.append(answer["message"])
        page = self.http.get("/metrics").text
        found = re.findall(r"^\S+:prompt_tokens_cached_total\S* (\S+)$", page, re.MULTILINE)
        if not found:
            sys.exit("--form ollama needs a server whose /metrics count cached prompt tokens.")
        before, self._cached = self._cached, int(sum(map(float, found)))
        calls = answer["message"].get("tool_calls") or []
        return Turn(
            answer["prompt_eval_count"],
            self._cached - before,
            answer["eval_count"],
            [Call("", call["function"]["name"]) for call in calls],
        )


FORMS: dict[str, type[Conversation]] = {
    "chat": Chat,
    "messages": Messages,
    "responses": Responses,
    "previous": PreviousResponse,
    "ollama": Ollama,
}


def has_token(choice: Json) -> bool:
    """Return True for a part of a streamed answer with a token: the first part may have a role."""
    delta = {key: value for key, value in choice["delta"].items() if key != "role"}
    return any([choice.get("token_ids"), choice.get("finish_reason"), *delta.values()])


def is_json(text: str) -> bool:
    """Return True if a call's arguments are whole; a client drops a call that was cut."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def find_change(http: httpx.Client, last: Turn, turn: Turn) -> str:
    """Return where the ids of a prompt leave those of the last prompt and answer; "" if nowhere."""
    if not (last.answer_ids and turn.prompt_ids):
        return ""
    known, begin = last.prompt_ids + last.answer_ids, len(last.prompt_ids)
    pairs = zip(known, turn.prompt_ids, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if same is None:
        return ""
    if same < begin:
        return f"earlier @{same}"

    def text(ids: list[int]) -> str:
        answer = http.post("/detokenize", json={"tokens": ids}).raise_for_status()
        return str(answer.json()["prompt"])

    # The next prompt may need a few more or fewer tokens for the same text.
    was, now = text(last.answer_ids), text(turn.prompt_ids[begin : len(known) + 64])
    return f"{'other tokens' if now.startswith(was) else 'other text'} @{same}"


def replay(
    http: httpx.Client, session: Session, args: argparse.Namespace, kill: int | None = None
) -> Iterator[Turn]:
    """Yield the counts of each turn of a session; kill the engine before turn `kill`."""
    conversation = FORMS[args.form](http, session, args)
    asked, results = iter(session.asked), 0
    last: Turn | None = None
    for number in range(args.turns):
        if last is not None and last.calls:
            for call in last.calls:
                call.result = session.results[results % len(session.results)]
                results += 1
            conversation.give(last.calls)
        else:
            text = next(asked, None)
            if text is None:
                return
            conversation.ask(text)
        if number == kill:
            kill_engine()
        turn = conversation.turn()
        if last is None:
            turn.new = turn.prompt
        else:
            known = min(turn.prompt, last.prompt + last.completion)
            turn.new = turn.prompt - known
            turn.again = max(0, known - turn.cached)
            turn.change = find_change(http, last, turn) if args.answers == "own" else ""
        if args.answers == "recorded":
            if number == len(session.recorded):
                return
            turn.calls = conversation.keep_recorded(session.recorded[number])
            turn.completion = 0  # the next prompt does not contain it
        yield turn
        last = turn


def kill_engine() -> None:
    """Kill the engine core of the server that this process started."""
    import psutil  # replays without --kill do without it

    for process in psutil.Process().children(recursive=True):
        if "octavo.engine.core_process" in process.cmdline():
            os.kill(process.pid, signal.SIGKILL)
            print("  (engine killed)")
            return
    sys.exit("--kill found no engine process; it needs --serve.")


def report(name: str, turns: Iterator[Turn]) -> tuple[int, int]:
    """Print the table of a server; return its prompt tokens, and those computed again."""
    print(f"\n{name}\n turn  prompt  cached    new  again  share  answer    ttft  change")
    total = again = late = over = 0
    changes: Counter[str] = Counter()
    for number, turn in enumerate(turns):
        share = turn.again / turn.prompt
        calls = f"{turn.completion}{'c' * len(turn.calls)}"
        ttft = "-" if turn.ttft is None else f"{1000 * turn.ttft:.0f}"
        print(
            f"{number:5}  {turn.prompt:6}  {turn.cached:6}  {turn.new:5}  {turn.again:5}"
            f"  {share:4.0%}  {calls:>6}  {ttft:>6}  {turn.change}"
            f"{f'  (cache_miss: {turn.miss})' if turn.miss else ''}",
            flush=True,
        )
        total, again = total + turn.prompt, again + turn.again
        late += number > 0
        over += turn.again > _BLOCK
        changes[turn.change.partition(" @")[0]] += 1
    changes.pop("", None)
    print(
        f"sum: {total} prompt tokens, {again} computed again ({again / total:.1%}); {over} of"
        f" {late} turns computed more than a block again; changes: {dict(changes) or 'none seen'}"
    )
    return total, again


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("urls", nargs="*", help="addresses of servers, without /v1")
    parser.add_argument("--serve", help="flags of `octavo serve`: start this server")
    parser.add_argument("--peer", action="append", default=[], help="command, with {port}")
    parser.add_argument("--session", type=Path, help="JSON file; default: a made session")
    parser.add_argument("--form", choices=FORMS, default="chat")
    parser.add_argument("--answers", choices=["own", "recorded"], default="own")
    parser.add_argument("--rewrite", action="store_true", help="write arguments of calls again")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--extra", type=json.loads, default={}, help="more fields, as JSON")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--kill", type=int, help="kill the engine before this turn")
    args = parser.parse_args()
    if args.kill is not None and not args.serve:
        parser.error("--kill needs --serve")
    if not (args.urls or args.serve or args.peer):
        parser.error("give an address, --serve or --peer")
    session = read_session(args.session, args.turns) if args.session else made_session(args.turns)
    commands = [shlex.split(command.replace("{port}", "PORT")) for command in args.peer]
    if args.serve:
        own = [sys.executable, "-m", "octavo", "serve", *shlex.split(args.serve), "--port", "PORT"]
        commands.insert(0, own)
    headers = {"Authorization": f"Bearer {args.api_key}"}

    def measure(name: str, url: str, kill: int | None = None) -> None:
        with httpx.Client(base_url=url, headers=headers, timeout=_READY_SECONDS) as http:
            report(name, replay(http, session, args, kill))

    for url in args.urls:
        measure(url, url)
    for number, command in enumerate(commands):
        port = str(free_port())
        command = [word.replace("PORT", port) for word in command]
        url = f"http://127.0.0.1:{port}"
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            log = Path(folder) / "log"
            stack.enter_context(running_server(command, url, log, timeout=_READY_SECONDS))
            kill = args.kill if args.serve and number == 0 else None
            measure(" ".join(command), url, kill)


if __name__ == "__main__":
    main()
