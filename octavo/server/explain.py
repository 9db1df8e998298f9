"""GET /v1/requests and /v1/requests/ID/explain: why a request took as long as it did."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import NotFoundError, RequestError
from octavo.frontend.past import MOST_SECONDS, SECONDS_BEFORE, Past, WhatIf
from octavo.frontend.step_log import EngineDeath, LoggedStep
from octavo.frontend.time_line import (
    BETWEEN,
    STEPS,
    Answer,
    Marks,
    Span,
    TimeLine,
    make_time_line,
    number_of,
)
from octavo.observability.view_events import label_of
from octavo.server import answers, explain_answers
from octavo.server.errors import show
from octavo.server.middleware import RequestContext, context_of
from octavo.server.recent_prompts import LONG
from octavo.server.state import state_of
from octavo.server.stories import Story
from octavo.system import clock

if TYPE_CHECKING:
    from octavo.frontend.async_llm import AsyncLLM
    from octavo.server.state import ServerState

MAX_SPANS = 200
"""Number of spans of a time line that an explanation has; the shortest are joined."""

TITLES: Mapping[str, str] = {
    "receive": "the body was received",
    "parse": "the body was parsed and checked",
    "start": "the server accepted the request",
    "render": "the prompt was rendered",
    "tokenize": "the prompt was tokenised",
    "to_engine": "on the way to the engine",
    "model_load": "the model was still loading",
    "grammar": "the grammar was compiled",
    "kv_load": "cached blocks were loaded from elsewhere",
    "asleep": "the engine was paused or asleep",
    "adapter": "its adapter was read, or waited for a place in memory (max_cpu_loras)",
    "adapter_turn": "other adapters ran, as many as a step may have (max_loras)",
    "encoder": "other requests' pictures or sounds were computed",
    "queued": "queued",
    "step_of_others": "the engine computed a step without this request",
    "prefill": "the prompt was computed",
    "recompute": "tokens were computed again",
    "decode": "the answer was computed",
    "failed_step": "a step failed",
    "preempted": "preempted: another request needed its blocks",
    "engine_death": "the engine died and was replaced",
    BETWEEN: "the engine's own work around its steps",
    "deliver": "the answer was written and sent",
    "client": "the client did not read",
    "not_recorded": "no longer recorded",
    "several": "several short parts",
}
"""Titles of the causes of time."""

_QUEUED = {
    "SEAT": "other requests had all {seats} seats (max_num_seqs)",
    "BUDGET": "the steps' token budget (max_num_batched_tokens, {budget}) was used by other"
    " requests",
    "BLOCKS": "memory: other requests held the KV blocks that it needed",
    "LEADER": "another answer to the same prompt computed the prompt that they share",
    "REMOTE_KVS": "the first request in the queue waited for a load of cached blocks",
    "IN_FLIGHT": "its steps in flight had to end first",
}


_MISSES = {
    "changed": "Token {token} differs from the most alike recent prompt",
    "forgotten": "The cache has given up the blocks from token {token} on",
    "no_state": "The cache has no recurrent state after token {token}",
    "other_adapter": "A recent prompt of the same tokens used another adapter, or none, and"
    " adapters do not share the blocks from token {token} on",
    "emptied": "The cache was emptied {seconds:.1f} s before",
}

_Unit = Literal["ms", "tokens", "blocks"]
MAX_ANSWERS = 100
"""Number of the request's own answers that an explanation lists: those that ended last."""
MAX_NAMED = 8
"""Number of other requests that a span names."""
_UNITS: Mapping[str, _Unit] = {"BUDGET": "tokens", "BLOCKS": "blocks"}
"""Units of `Span.who` by the reason of a wait."""

_SIMULATED = frozenset({"max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes"})
"""Settings that a simulation can change."""


class Names:
    """Names of other requests, for a client.

    Args:
        sees_all: True if the client may see all requests.
        ids: ids of the recorded requests that it may see, by the number of their core's requests.
    """

    def __init__(self, ids: Mapping[int, str], *, sees_all: bool) -> None:
        self._ids, self._sees_all = ids, sees_all

    def find(self, core_id: str) -> explain_answers.OtherRequest | None:
        """Return the name of a request; None if the client may not see it."""
        number = number_of(core_id)
        name = None if number is None else self._ids.get(number)
        if name is not None:
            return {"number": label_of(core_id), "id": name}
        return {"number": label_of(core_id)} if self._sees_all else None

    def largest(self, who: Mapping[str, float], unit: _Unit) -> list[explain_answers.OtherRequest]:
        """Return the visible requests with the largest amounts, at most `MAX_NAMED`."""
        found: list[explain_answers.OtherRequest] = []
        for core_id, amount in sorted(who.items(), key=lambda item: -item[1]):
            if len(found) < MAX_NAMED and (name := self.find(core_id)) is not None:
                if unit == "ms":
                    name["ms"] = _milliseconds(round(amount * 1e6))
                elif amount:
                    name[unit] = round(amount)
                found.append(name)
        return found


def names_for(state: ServerState, context: RequestContext) -> Names:
    """Return the names of requests as a client may see them, as in the engine view."""
    sees_all = context.is_admin or len(state.api_keys) < 2
    visible = state.stories.visible(state.tenant(context.api_key), is_admin=sees_all)
    ids = {number: story.answer_id for story in visible for number in story.prompts}
    return Names(ids, sees_all=sees_all)


def disabled(what: str) -> str:
    """Return the message of an error: nothing is recorded, so `what` is impossible."""
    return (
        f"{what} is not available, as this server records no requests; start it with "
        "--explain-requests N, the number of recent requests to record."
    )


async def list_requests(request: Request) -> Response:
    """Return the recent requests of the client's key, the newest first."""
    state = _enabled(request)
    context = context_of(request)
    owner = state.tenant(context.api_key)
    stories = state.stories.visible(owner, is_admin=context.is_admin)
    return answers.respond(
        explain_answers.RecentRequests(object="list", data=[_listed(story) for story in stories])
    )


async def explain_request(request: Request) -> Response:
    """Explain a recent request of the client's key."""
    state, name = _enabled(request), request.path_params["request_id"]
    simulates = request.query_params.get("simulate", "true")
    if simulates not in ("true", "false"):
        raise RequestError(
            f"simulate={show(simulates)} is not allowed; use true or false.", "simulate"
        )
    context = context_of(request)
    owner = state.tenant(context.api_key)
    story = state.stories.find(name, owner, is_admin=context.is_admin)
    if story is None:
        raise NotFoundError(
            f"Request {show(name)} is not known to this API key: it is unknown, another key's, or "
            f"not one of the last {state.stories.max_count} (--explain-requests).",
            "request_id",
            "request_not_found",
        )
    names = names_for(state, context)
    return answers.respond(await explain_story(state, story, names, simulates=simulates == "true"))


def _enabled(request: Request) -> ServerState:
    state = state_of(request)
    if not state.stories.max_count:
        raise RequestError(disabled(request.scope["path"]), None, "explain_disabled")
    return state


def _listed(story: Story) -> explain_answers.RecentRequest:
    usage = story.usage
    end = clock.now() if story.end is None else story.end
    return {
        "id": story.answer_id,
        "request_id": story.request_id,
        "path": story.path,
        "model": story.model,
        "created": story.begin,
        "seconds": end - story.begin,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "status": story.status,
        "finished": story.end is not None,
    }


async def explain_story(
    state: ServerState, story: Story, names: Names, *, simulates: bool = False
) -> explain_answers.Explanation:
    """Return the explanation of a request, up to now if it still runs.

    Args:
        state: the server.
        story: the request.
        names: names of the others.
        simulates: True to simulate other settings for the advice, which may take a second.
    """
    engine = await state.get_engine()
    log = engine.step_log
    marks = story.marks(log.ready)
    steps = list(log.between(marks.begin, marks.end))
    deaths = list(log.deaths)
    explanation, line = await asyncio.to_thread(
        _explain, state, engine, story, names, marks, steps, deaths, log.lost_until
    )
    if simulates and state.what_if is not None and line.followed is not None and engine.num_blocks:
        settings = [a["setting"] for a in explanation["advice"] if a["setting"] in _SIMULATED]
        if settings:
            since = max(marks.begin - SECONDS_BEFORE, marks.end - MOST_SECONDS)
            before = list(log.between(since, marks.end))
            async with state.simulating:
                saved = await asyncio.to_thread(
                    _simulate, state.what_if, engine, before, line.followed, settings
                )
            _add_simulated(explanation["advice"], saved)
    for entry in explanation["advice"]:
        if entry["saved_ms"] is not None:
            about = "at most" if entry["estimate"] == "at_most" else "about"
            entry["text"] += f" It would have saved {about} {entry['saved_ms']:,.1f} ms."
    return explanation


def _simulate(
    what_if: WhatIf,
    engine: AsyncLLM,
    steps: Sequence[LoggedStep],
    core_id: str,
    settings: Sequence[str],
) -> Mapping[str, float]:
    """Return the seconds that twice the value of each setting would have saved."""
    records = [(logged.engine_index, logged.record) for logged in steps]
    own = [i for i, r in records for part in r.parts if part.request_id == core_id]
    if not own:
        return {}
    past = Past(
        engine.config,
        engine.spec,
        engine.num_blocks,
        engine.max_model_len,
        engine.max_num_batched_tokens,
        [record for index, record in records if index == own[-1] and record.number],
        core_id,
    )
    return what_if(past, settings)


def _add_simulated(advice: list[explain_answers.Advice], saved: Mapping[str, float]) -> None:
    for entry in advice:
        if (seconds := saved.get(entry["setting"])) is not None:
            entry["saved_ms"] = round(seconds * 1000, 3)
            entry["estimate"] = "simulated"
            entry["text"] += " Simulated with twice the value."


def _explain(
    state: ServerState,
    engine: AsyncLLM,
    story: Story,
    names: Names,
    marks: Marks,
    steps: Sequence[LoggedStep],
    deaths: Sequence[EngineDeath],
    lost: float,
) -> tuple[explain_answers.Explanation, TimeLine]:
    line = make_time_line(marks, steps, deaths, lost)
    limits = {
        "seats": state.engine_config.scheduler.max_num_seqs,
        "budget": engine.max_num_batched_tokens,
        "first_engine": engine.config.parallel.first_engine,
    }
    timeline = [_span(span, marks.begin, limits, names) for span in shortened(line.spans)]
    causes = _causes(line.spans, marks.begin)
    usage = story.usage
    places: dict[int | None, int] = {number: i for i, number in enumerate(story.prompts)}
    explanation: explain_answers.Explanation = {
        **_listed(story),
        "object": "request.explanation",
        "wall_ms": _milliseconds(_micros(marks.end, marks.begin)),
        "first_token_ms": None
        if story.first is None
        else _milliseconds(_micros(story.first, marks.begin)),
        "timeline": timeline,
        "causes": causes,
        "answers": [
            _answer(answer, places, line, marks.begin)
            for answer in sorted(line.answers.values(), key=lambda it: it.last)[-MAX_ANSWERS:]
        ],
        "cache": told_cache(
            {
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_tokens,
                "miss": story.cache_miss,
                "difference": story.difference,
                "given_up": _given_up(line, marks.begin, names),
                "text": [],
            }
        ),
        "advice": _advice(causes, line, story, limits),
    }
    return explanation, line


def shortened(spans: Sequence[Span]) -> list[Span]:
    """Return at most `MAX_SPANS` spans; neighbours that are short are joined to `several`."""
    if len(spans) <= MAX_SPANS:
        return list(spans)
    kept = sorted(range(len(spans)), key=lambda i: spans[i].begin - spans[i].end)
    long = set(kept[: MAX_SPANS // 2])
    found: list[Span] = []
    for i, span in enumerate(spans):
        if i not in long:
            span = Span(span.begin, span.end, "several")
            if found and found[-1].cause == "several":
                found[-1].end = span.end
                continue
        found.append(span)
    return found


def _micros(time: float, begin: float) -> int:
    return round((time - begin) * 1e6)


def _milliseconds(micros: int) -> float:
    return micros / 1000


def _span(
    span: Span, origin: float, limits: Mapping[str, int], names: Names
) -> explain_answers.ExplainedSpan:
    begin, end = _micros(span.begin, origin), _micros(span.end, origin)
    found: explain_answers.ExplainedSpan = {
        "cause": span.cause,
        "begin_ms": _milliseconds(begin),
        "ms": _milliseconds(end - begin),
        "text": "",
    }
    if span.reason is not None:
        found |= {"reason": span.reason, "is_behind": span.is_behind}
        if span.is_behind:
            found["behind"] = names.largest(span.behind, "ms")
    if span.cause in STEPS:
        found |= {
            "steps": span.steps,
            "tokens": span.tokens,
            "theirs_ms": _milliseconds(round(span.theirs * 1e6)),
            "between_ms": _milliseconds(round(span.between * 1e6)),
        }
    if span.cause in STEPS or span.cause == "queued":
        found["others"] = span.others
    if span.who:
        unit: _Unit = "tokens" if span.cause in STEPS else _UNITS.get(span.reason or "", "ms")
        found["who"] = who = names.largest(span.who, unit)
        found["more"] = len(span.who) - len(who)
    found["text"] = _text(span, found, limits)
    return found


def _named(
    others: Sequence[explain_answers.OtherRequest], more: int = 0, *, with_counts: bool = False
) -> str:
    """Return the numbers of other requests, such as "#7 (40), #9 (12) and 3 more"; may be ""."""
    named = []
    for other in others:
        count = other.get("blocks") or other.get("tokens")
        named.append(f"#{other['number']}" + (f" ({count})" if count and with_counts else ""))
    if named and more:
        named[-1] += f" and {more} more"
    return ", ".join(named)


def _text(span: Span, shown: explain_answers.ExplainedSpan, limits: Mapping[str, int]) -> str:
    """Return the sentence that tells the cause of a span."""
    title, is_queued = TITLES[span.cause], span.cause == "queued"
    names = _named(shown.get("who") or (), shown.get("more") or 0, with_counts=is_queued)
    listed = f": {names}" if names else ""
    if is_queued:
        why = _QUEUED[span.reason or "BLOCKS"].format(**limits)
        behind = f" behind {_named(shown.get('behind') or ()) or 'another request'}"
        return f"queued{behind if span.is_behind else ''}: {why}{listed}"
    if span.cause == "preempted":
        return f"preempted: {names} needed its blocks" if names else title
    if span.cause not in STEPS:
        return title + listed
    what = {"prefill": "chunk", "recompute": "chunk"}.get(span.cause, "step")
    text = f"{title} in {_counted(span.steps, what)}, {_counted(span.tokens, 'token')}"
    if span.others:
        seconds = (span.end - span.begin - span.between) * 1000
        text += f", shared with {_counted(span.others, 'other')}{listed}"
        text += f" ({span.theirs * 1000:.1f} ms of {seconds:.1f} ms theirs)"
    return text


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _causes(spans: Sequence[Span], origin: float) -> list[explain_answers.ExplainedCause]:
    """Return the time of each cause, the longest first; they sum to the wall time."""
    sums: dict[str, int] = {}
    for span in spans:
        between = round(span.between * 1e6)
        whole = _micros(span.end, origin) - _micros(span.begin, origin)
        between = min(between, whole)
        sums[span.cause] = sums.get(span.cause, 0) + whole - between
        if between:
            sums[BETWEEN] = sums.get(BETWEEN, 0) + between
    return [
        {"cause": cause, "ms": _milliseconds(micros), "text": TITLES[cause]}
        for cause, micros in sorted(sums.items(), key=lambda item: -item[1])
    ]


def _answer(
    answer: Answer, places: Mapping[int | None, int], line: TimeLine, origin: float
) -> explain_answers.ExplainedAnswer:
    child = answer.core_id.partition("_")[0]
    return {
        "number": label_of(answer.core_id),
        "prompt": places.get(number_of(answer.core_id), 0),
        "index": int(child) if child.isascii() and child.isdecimal() else 0,
        "followed": answer.core_id == line.followed,
        "begin_ms": _milliseconds(_micros(answer.first, origin)),
        "end_ms": _milliseconds(_micros(answer.last, origin)),
        "steps": answer.num_steps,
        "prompt_chunks": answer.num_chunks,
        "computed_tokens": answer.num_tokens,
        "cached_tokens": answer.num_cached,
        "preemptions": answer.num_preemptions,
    }


def _given_up(line: TimeLine, origin: float, names: Names) -> explain_answers.GivenUpBlocks | None:
    if line.followed is None or (event := line.answers[line.followed].given_up) is None:
        return None
    seconds = round(origin - event.time, 3)
    by = None if event.by is None else names.find(event.by)
    return {
        "seconds_before": seconds,
        "token": line.answers[line.followed].num_cached,
        "by": by,
    }


def told_cache(cache: explain_answers.ExplainedCache) -> explain_answers.ExplainedCache:
    """Return what is known about the cache with its sentences."""
    text = [
        f"{cache['cached_tokens']:,} of {cache['prompt_tokens']:,} prompt tokens were in the cache."
    ]
    miss, difference, given_up = cache["miss"], cache["difference"], cache["given_up"]
    if miss is not None:
        where = "" if miss["message"] is None else f", in message {miss['message']}"
        text.append(f"{_MISSES[miss['reason']].format(**miss)}{where}.")
    if difference is not None and difference["volatile"] is not None:
        text.append(f"What differs is {difference['volatile']}.")
    if given_up is not None:
        by = given_up["by"]
        other = "another request" if by is None else f"#{by['number']}"
        text.append(
            f"The block of token {given_up['token']} was given up for {other} "
            f"{given_up['seconds_before']:.1f} s before."
        )
    return {**cache, "text": text}


def _advice(
    causes: Sequence[explain_answers.ExplainedCause],
    line: TimeLine,
    story: Story,
    limits: Mapping[str, int],
) -> list[explain_answers.Advice]:
    """Return what would have helped: at most the time of the cause that a setting removes."""
    queued: dict[str, float] = {}
    for span in line.spans:
        if span.reason is not None:
            queued[span.reason] = queued.get(span.reason, 0.0) + span.end - span.begin
    spent = {cause["cause"]: cause["ms"] for cause in causes}
    memory = queued.get("BLOCKS", 0.0) * 1000
    memory += spent.get("preempted", 0.0) + spent.get("recompute", 0.0)
    found: list[explain_answers.Advice] = []

    def add(setting: str, milliseconds: float, text: str) -> None:
        if milliseconds >= 1:
            saved = round(milliseconds, 3)
            found.append(
                {"setting": setting, "text": text, "saved_ms": saved, "estimate": "at_most"}
            )

    add(
        "max_num_seqs",
        queued.get("SEAT", 0.0) * 1000,
        f"More than {limits['seats']} seats, if the memory suffices.",
    )
    add(
        "max_num_batched_tokens",
        queued.get("BUDGET", 0.0) * 1000,
        f"A larger token budget than {limits['budget']}; others' steps then take longer.",
    )
    add(
        "kv_cache_memory_bytes",
        memory,
        "More memory for the KV cache, or fewer seats, so that no request loses its blocks.",
    )
    add("max_loras", spent.get("adapter_turn", 0.0), "More adapters in a step.")
    add("max_cpu_loras", spent.get("adapter", 0.0), "Room for more adapters in memory.")
    add("resources", spent.get("kv_load", 0.0), "Faster storage of cached blocks.")
    holder = _holder(story, line)
    if holder is not None:
        add(
            "routing",
            spent.get("prefill", 0.0),
            f"Engine {limits['first_engine'] + holder[0]} likely had the first {holder[1]} tokens "
            "of the prompt in its cache, but was busier. With less load, a request goes to the "
            "engine that has its prefix.",
        )
    difference = story.difference
    if difference is not None and difference["volatile"] is not None:
        is_header = difference["volatile"] == "an agent's billing header"
        found.append(
            {
                "setting": "strip_client_noise" if is_header else "prompt",
                "text": "Start the server with --strip-client-noise: it leaves out the header."
                if is_header
                else f"Move {difference['volatile']} behind the parts of the prompt that stay the "
                "same.",
                "saved_ms": None,
                "estimate": "unknown",
            }
        )
    return found


def _holder(story: Story, line: TimeLine) -> tuple[int, int] | None:
    """Return another engine that likely had `LONG` tokens more of the followed prompt in its cache,
    and the number of tokens."""
    number = None if line.followed is None else number_of(line.followed)
    if number is None or line.followed is None or (found := story.prompts[number].holder) is None:
        return None
    return found if found[1] - line.answers[line.followed].num_cached >= LONG else None
