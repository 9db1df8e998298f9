"""Hit rate of chat sessions: the real KV-cache manager serves simulated ones, without a model.

All sessions begin with the same system prompt. In each turn a session sends all of its tokens so
far and a new message, and gets an answer. Sessions take turns: the next prompt of a session waits
until all others have sent theirs.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from octavo.errors import ConfigError
from octavo.kv_cache.groups import KVCacheConfig
from octavo.kv_cache.hashing import make_block_hasher
from octavo.kv_cache.manager import KVCacheManager
from octavo.messages import CoreSamplingParams, EngineCoreRequest, RequestOptions
from octavo.request import Request

_END = 0
"""Token that ends messages."""
_SYSTEM = 1
_MOST_SNAPSHOTS = 64
"""Upper bound of the snapshots that a request takes."""
_MOST_TOKENS = 2**26
"""Most tokens of all prompts together; simulating this number takes a minute."""


@dataclass(frozen=True)
class SessionShape:
    """Shape of the sessions.

    Raises:
        ConfigError: a number is below 1, or the prompts have too many tokens.
    """

    sessions: int = 16
    """Number of concurrent sessions."""
    turns: int = 8
    """Number of messages of the user in a session."""
    system_tokens: int = 1024
    """Tokens of the system prompt, which all sessions share."""
    message_tokens: int = 256
    """Tokens of a message of the user."""
    answer_tokens: int = 256
    """Tokens of an answer."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ConfigError(f"{name}={value}: must be at least 1.")
        if self.num_tokens > _MOST_TOKENS:
            raise ConfigError(
                f"sessions={self.sessions} with turns={self.turns} have prompts of "
                f"{self.num_tokens:,} tokens together; lower one of the two to get at most "
                f"{_MOST_TOKENS:,}."
            )

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all prompts together."""
        return self.sessions * sum(self.prompt_tokens(turn) for turn in range(self.turns))

    def prompt_tokens(self, turn: int) -> int:
        """Return the number of tokens of a turn's prompt; the first turn is 0."""
        before = turn * (self.message_tokens + self.answer_tokens)
        return self.system_tokens + before + self.message_tokens

    def turns_within(self, max_model_len: int) -> int:
        """Return the number of turns of a session that fit a context."""
        return sum(
            self.prompt_tokens(turn) + self.answer_tokens <= max_model_len
            for turn in range(self.turns)
        )

    def __str__(self) -> str:
        return (
            f"{self.sessions:,} sessions of {self.turns:,} turns (system prompt "
            f"{self.system_tokens:,} tokens, messages {self.message_tokens:,}, answers "
            f"{self.answer_tokens:,})"
        )


@dataclass(frozen=True)
class SessionHits:
    """Hits of the sessions."""

    shape: SessionShape
    """The sessions, with the turns that fit the context."""
    turns_left_out: int
    """Number of turns of a session that do not fit it."""
    hit_rate: float
    """Share of the prompt tokens that the cache has."""
    best_hit_rate: float
    """The same of a cache that forgets nothing."""
    snapshots_given_up: int
    """Number of snapshots of recurrent states that were given up for other states."""
    blocks_forgotten: int
    """Number of known blocks that were used for other tokens."""

    def __str__(self) -> str:
        left_out = self.turns_left_out
        more = f", without {left_out:,} turns that exceed the context" if left_out else ""
        return (
            f"{self.shape}{more}: {self.hit_rate:.1%} of the prompts' tokens are cached "
            f"({self.best_hit_rate:.1%} if nothing were forgotten)"
        )


def find_hits(
    config: KVCacheConfig,
    shape: SessionShape,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
) -> SessionHits:
    """Return the hits of sessions.

    Args:
        config: shape of the KV cache.
        shape: shape of the sessions.
        max_num_seqs: most requests that run concurrently.
        max_num_batched_tokens: most prompt tokens of a step.
        max_model_len: most tokens of a request; later turns of a session are left out.

    Raises:
        ConfigError: no turn fits the context.
    """
    turns = shape.turns_within(max_model_len)
    if not turns:
        raise ConfigError(
            f"A session needs {shape.prompt_tokens(0) + shape.answer_tokens:,} tokens in its first "
            f"turn, and max_model_len={max_model_len}; lower system_tokens, message_tokens or "
            "answer_tokens."
        )
    left_out, shape = shape.turns - turns, replace(shape, turns=turns)
    # Enough blocks for the tokens of all sessions, and once more for the running requests: more
    # make no difference. The same holds for slots: all requests together use no more.
    longest = -(-(shape.prompt_tokens(turns - 1) + shape.answer_tokens) // config.block_size) + 1
    used = (shape.sessions + min(shape.sessions, max_num_seqs)) * longest
    num_blocks = 2 + used * max(1, len(config.paged_groups))
    num_states = shape.sessions * turns * (config.states_per_request + _MOST_SNAPSHOTS)
    unlimited = replace(config, num_blocks=num_blocks, num_states=num_states)
    limited = replace(
        config,
        num_blocks=min(num_blocks, config.num_blocks),
        num_states=min(num_states, config.num_states),
    )
    found, best = (
        _Engine(one, shape, max_num_seqs, max_num_batched_tokens).run()
        for one in (limited, unlimited)
    )
    return SessionHits(
        shape,
        left_out,
        found.num_hits / found.num_queries,
        best.num_hits / best.num_queries,
        0 if found.states is None else found.states.num_evictions,
        found.pool.num_evictions,
    )


@dataclass
class _Session:
    """Session with the tokens and block hashes of its last turn."""

    index: int
    tokens: list[int]
    hashes: list[bytes]
    turn: int = 0
    request: Request | None = None
    """Request of this turn, once it was admitted."""


class _Engine:
    """Scheduler of the sessions: first come, first served; the last one is preempted first.

    An answer's tokens are computed a block at a time, since the manager's records change only at
    the ends of blocks.
    """

    def __init__(
        self, config: KVCacheConfig, shape: SessionShape, max_num_seqs: int, budget: int
    ) -> None:
        self._shape, self._seats, self._budget = shape, max_num_seqs, budget
        self._size = config.block_size
        self._hasher = make_block_hasher(self._size)
        self._manager = KVCacheManager(config, True, message_ends=(_END,))
        system = _message(_SYSTEM, shape.system_tokens)
        self._waiting = deque(_Session(i, system, []) for i in range(shape.sessions))
        self._running: list[_Session] = []

    def run(self) -> KVCacheManager:
        """Serve all sessions; return the manager."""
        while self._waiting or self._running:
            self._step()
        return self._manager

    def _step(self) -> None:
        budget, were_running = self._budget, list(self._running)
        for session in were_running:
            if session in self._running:  # it was not preempted
                budget -= self._advance(session, budget)
        while self._waiting and len(self._running) < self._seats and budget > 0:
            num_tokens = self._admit(self._waiting[0], budget)
            if not num_tokens:
                break
            budget -= num_tokens
        assert self._running or were_running, "a request does not fit the cache"
        self._manager.take_blocks_to_copy()
        for session in list(self._running):
            self._finish(session)

    def _admit(self, session: _Session, budget: int) -> int:
        """Begin a session's turn; return the number of computed tokens, 0 without room."""
        request = session.request or self._make_request(session)
        session.request = request
        hit, start = self._manager.get_computed_blocks(request)
        num_new = min(budget, request.num_tokens - start)
        if self._manager.allocate_slots(request, num_new, hit) is None:
            return 0
        request.num_computed_tokens = start + num_new
        self._running.append(self._waiting.popleft())
        return num_new

    def _advance(self, session: _Session, budget: int) -> int:
        """Compute the next tokens of a turn; return the number of the prompt's among them."""
        request = session.request
        assert request is not None
        start, known = request.num_computed_tokens, request.num_tokens
        if start < known - 1:
            end = min(known, start + budget)
            if end == start:
                return 0
        else:
            end = min((start // self._size + 1) * self._size, self._last(session))
        while self._manager.allocate_slots(request, end - start) is None:
            if self._preempt() is session:
                return 0
        if end >= known:
            self._answer(session, end + 1 - known)
        request.num_computed_tokens = end
        return end - start if start < known - 1 else 0

    def _last(self, session: _Session) -> int:
        """Return the number of tokens that a turn computes; its last token is only sampled."""
        return self._shape.prompt_tokens(session.turn) + self._shape.answer_tokens - 1

    def _answer(self, session: _Session, count: int) -> None:
        """Append the next tokens of a session's answer."""
        assert session.request is not None
        is_last = session.request.num_tokens + count > self._last(session)
        tokens = _message(session.index + 2, count) if is_last else [session.index + 2] * count
        session.request.append_output_token_ids(tokens)

    def _preempt(self) -> _Session:
        """Free the request that was admitted last; it waits and begins again."""
        session = self._running.pop()
        request = session.request
        assert request is not None
        self._manager.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._waiting.appendleft(session)
        return session

    def _finish(self, session: _Session) -> None:
        """End the turn if its answer is whole; the session's next turn waits."""
        request = session.request
        assert request is not None
        if request.num_computed_tokens < self._last(session):
            if request.num_computed_tokens == request.num_tokens:
                self._answer(session, 1)
            return
        self._manager.free(request)
        self._running.remove(session)
        session.tokens, session.hashes = request.all_token_ids, request.block_hashes
        session.request = None
        session.turn += 1
        if session.turn < self._shape.turns:
            self._waiting.append(session)

    def _make_request(self, session: _Session) -> Request:
        prompt = session.tokens + _message(session.index + 2, self._shape.message_tokens)
        core_request = EngineCoreRequest(
            f"{session.index}-{session.turn}",
            prompt,
            CoreSamplingParams(max_tokens=self._shape.answer_tokens),
            RequestOptions(0.0),
        )
        request = Request(core_request, self._hasher, session.hashes)
        request.append_output_token_ids([])  # hash the new message
        return request


def _message(token: int, count: int) -> list[int]:
    """Return the tokens of a message."""
    return [token] * (count - 1) + [_END]
