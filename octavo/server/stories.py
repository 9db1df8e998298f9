"""Records of recent requests, from which `explain` tells why they took as long as they did."""

from __future__ import annotations

import heapq
import math
import re
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from octavo.frontend.time_line import Marks, Stages
from octavo.server import explain_answers
from octavo.system import clock

BYTES_OF_ONE = 2**14
"""Bytes of a record on average, at most: a request may have many prompts."""
MAX_BLOCKED = 100
"""Number of times in which a client did not read that are recorded for a request."""
SHORTEST_BLOCK = 0.001
"""Seconds that sending a piece takes at least if the client does not read."""

_ENTRY = 4096
_PROMPT = 400
_PREFIX = re.compile("[a-z]+[-_]")
_STAGES = ("receive", "parse", "start", "render")


class Counts(Protocol):
    """Token counts of a request so far."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens that were in the cache."""


class Story:
    """Record of a request: what the front end knows of its life.

    Times are those of `octavo.system.clock`.

    Args:
        request_id: id of the HTTP request.
        answer_id: id of its answer.
        owner: tenant that may see it; None: everyone who may use the API.
        path: path of the HTTP request.
        model: served name of the model.
        usage: token counts of the request, which change while it runs.
        times: the arrival, and the ends of the first of `_STAGES`.
        num_prompts: number of its prompts.
        is_line: True for a line of a batch.
    """

    __slots__ = (
        "answer_id",
        "begin",
        "blocked",
        "cache_miss",
        "difference",
        "done",
        "end",
        "first",
        "http_ended",
        "is_complete",
        "is_line",
        "is_one",
        "model",
        "nbytes",
        "owner",
        "path",
        "prompts",
        "request_id",
        "status",
        "times",
        "usage",
    )

    def __init__(
        self,
        request_id: str,
        answer_id: str,
        owner: str | None,
        path: str,
        model: str,
        usage: Counts,
        times: Sequence[float],
        num_prompts: int = 1,
        *,
        is_line: bool = False,
    ) -> None:
        self.request_id, self.answer_id, self.owner = request_id, answer_id, owner
        self.path, self.model, self.usage = path, model, usage
        self.is_line = is_line
        self.begin = times[0]
        self.nbytes = _ENTRY + _PROMPT * num_prompts
        """Bytes of the record, rounded up."""
        self.times = list(times[1:])
        self.prompts: dict[int, Stages] = {}
        """Further stages of each prompt, by the number of its core's requests."""
        self.is_one = False
        """True for a beam search."""
        self.first: float | None = None
        """Time of the first token."""
        self.done: float | None = None
        self.is_complete = False
        self.http_ended: float | None = None
        self.end: float | None = None
        """Time of the end; None: the request runs."""
        self.status: int | None = None
        self.blocked = array("d")
        """Begins and ends of the times in which the client did not read."""
        self.cache_miss: explain_answers.CacheMiss | None = None
        self.difference: explain_answers.PromptDifference | None = None

    def has_id(self, name: str) -> bool:
        """Return True if the request has this id, or its answer, with or without its prefix.

        In the engine view a prompt has the answer's id with its index and its number.
        """
        if name in (self.request_id, self.answer_id, _PREFIX.sub("", self.answer_id, count=1)):
            return True
        of_prompt, _, number = name.rpartition("-")
        return of_prompt.rpartition("-")[0] == self.answer_id and number in map(str, self.prompts)

    def mark(self) -> None:
        """Note the end of the next of the stages before the prompts."""
        self.times.append(clock.now())

    def begin_prompt(self, number: int) -> Stages:
        """Begin a prompt; return its stages, to which the engine's front end adds."""
        return self.prompts.setdefault(number, Stages())

    def note_sending(self, begin: float, end: float) -> None:
        """Note that sending a piece took from `begin` to `end` (seconds of `time.monotonic`)."""
        if len(self.blocked) < 2 * MAX_BLOCKED:
            self.blocked.extend((clock.from_monotonic(begin), clock.from_monotonic(end)))

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Note the end of the outputs, and whether they are complete."""
        try:
            yield
            self.is_complete = True
        finally:
            self.done = clock.now()
            if self.http_ended is not None:  # it went on without the client
                self.end = self.done

    def end_http(self, status: int | None, end: float) -> None:
        """Note the end of the HTTP request; the work may go on in the background.

        Args:
            status: its status.
            end: second of `time.monotonic`.
        """
        self.status = status
        self.http_ended = clock.from_monotonic(end)
        if self.done is not None:
            self.end = self.http_ended

    def marks(self, ready: float | None) -> Marks:
        """Return the marks for the time line, up to now if the request runs.

        Args:
            ready: time at which the model was loaded; None: it is not loaded yet.
        """
        end = clock.now() if self.end is None else self.end
        stages = list(zip(_STAGES, self.times, strict=False))
        if len(stages) < len(_STAGES):  # it failed there, or is there now
            stages.append((_STAGES[len(stages)], end if self.done is None else self.done))
        prompts = {number: list(stages.ends) for number, stages in self.prompts.items()}
        for marked in prompts.values():
            if not marked:
                marked.append(("tokenize", end if self.done is None else self.done))
        times = self.blocked.tolist()
        return Marks(
            self.begin,
            end,
            stages,
            prompts,
            self.is_one,
            self.done,
            self.is_complete,
            list(zip(times[::2], times[1::2], strict=True)),
            math.inf if ready is None else ready,
        )


class Stories:
    """The recent requests, and the recent lines of batches; the oldest of each are dropped.

    Args:
        max_count: maximum number of each; 0: none is recorded.
    """

    def __init__(self, max_count: int) -> None:
        self.max_count = max_count
        self._requests, self._lines = _Recent(max_count), _Recent(max_count)

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return self._requests.nbytes + self._lines.nbytes

    def add(self, story: Story) -> None:
        """Record a request."""
        (self._lines if story.is_line else self._requests).add(story)

    def remove(self, story: Story) -> None:
        """Forget a request; it may have been dropped."""
        (self._lines if story.is_line else self._requests).remove(story)

    def visible(self, owner: str | None, *, is_admin: bool) -> Iterator[Story]:
        """Yield the requests that a client may see, the newest first.

        Args:
            owner: tenant of the client.
            is_admin: True if the client is the operator, who may see all.
        """
        kinds = reversed(self._requests.stories), reversed(self._lines.stories)
        for story in heapq.merge(*kinds, key=lambda story: story.begin, reverse=True):
            if is_admin or story.owner == owner:
                yield story

    def find(self, name: str, owner: str | None, *, is_admin: bool) -> Story | None:
        """Return the newest visible request with an id; None if there is none."""
        stories = self.visible(owner, is_admin=is_admin)
        return next((story for story in stories if story.has_id(name)), None)


class _Recent:
    """Records of one kind, in order of arrival; see `Stories`."""

    def __init__(self, max_count: int) -> None:
        self._max_count = max_count
        self.stories: deque[Story] = deque()
        self.nbytes = 0

    def add(self, story: Story) -> None:
        self.stories.append(story)
        self.nbytes += story.nbytes
        most = self._max_count * BYTES_OF_ONE
        while len(self.stories) > self._max_count or self.nbytes > most:
            self.nbytes -= self.stories.popleft().nbytes

    def remove(self, story: Story) -> None:
        if story in self.stories:
            self.stories.remove(story)
            self.nbytes -= story.nbytes
