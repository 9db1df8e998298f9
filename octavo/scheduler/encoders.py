"""Choice of the items, such as pictures, that encoders compute in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from octavo.errors import RequestError
from octavo.kv_cache.encoder_cache import EncoderCacheManager
from octavo.messages import MultiModalFeatureSpec, SchedulerOutput
from octavo.request import Request


class EncoderInputs:
    """Chooser of the items that encoders compute beside a step's tokens.

    A step computes items of at most `max_num_tokens` encoder tokens together, or one larger item
    (without chunked prefill, the items of one prompt). So the others wait at most that long for the
    pictures of one request. A request's tokens stop before an item whose rows are not there and
    cannot be computed in this step.

    A request that has begun can always continue once it is the first one to be scheduled: it uses
    the rows of an item only until its tokens have passed it, and needs no others before.

    Args:
        num_rows: number of rows that the encoder cache holds.
        max_num_tokens: most encoder tokens, and most tokens, of a step.
        max_num_seqs: most requests of a step.
    """

    def __init__(self, num_rows: int, max_num_tokens: int, max_num_seqs: int) -> None:
        self.cache = EncoderCacheManager(num_rows)
        self._max_num_tokens, self._max_num_seqs = max_num_tokens, max_num_seqs
        self._budget = max_num_tokens
        """Number of encoder tokens that may still be added to the step."""
        self._is_full = False
        """True if an item found no room in the step: later ones in the order of service may then
        not use more rows, so that it finds room soon."""
        self._late: Request | None = None
        """First request with an item that found no time in the step: later ones in the order of
        service may then begin no items, so that it finds time soon."""
        self._chosen: list[int] = []
        """Items that the tokens need that `fit` has checked last."""

    def check(self, request: Request) -> None:
        """Reject a request with an item that never fits.

        Tokens that see each other are in one step. Other running requests may have one token each
        in it.

        Raises:
            RequestError: the encoder cache has less room than an item needs, or a step has less
                than the tokens that see each other.
        """
        room = self._max_num_tokens - self._max_num_seqs + 1
        for index, feature in enumerate(request.mm_features):
            if feature.num_rows > self.cache.num_rows:
                raise RequestError(
                    f"Item {index + 1} ({feature.modality}) has {feature.num_rows} embeddings, and "
                    f"the encoder cache holds {self.cache.num_rows}. Send a smaller one, or raise "
                    "max_num_batched_tokens.",
                    "multi_modal_data",
                )
            longest = max((end - begin for begin, end in feature.ranges), default=0)
            if longest > room:
                least = longest + self._max_num_seqs - 1
                raise RequestError(
                    f"Item {index + 1} ({feature.modality}): {longest} tokens of the prompt see "
                    f"each other, and a step has room for {room} of a request. Raise "
                    f"max_num_batched_tokens to {least}, or send less.",
                    "multi_modal_data",
                )

    @staticmethod
    def fit_ranges(request: Request, start: int, num_new: int, room: int) -> int:
        """Return the number of a request's tokens from `start` that do not end within a range.

        It is `num_new`, or more if the rest of a range fits into `room`, or less.
        """
        for feature in request.mm_features:
            for begin, end in feature.ranges:
                if begin < start + num_new < end:
                    return end - start if end - start <= room else max(begin - start, 0)
        return num_new

    def fit(self, request: Request, start: int, num_new: int, *, whole: bool = False) -> int:
        """Return the number of a request's tokens from `start`, at most `num_new`, that can be
        computed with the items that fit into the step.

        If `whole` is True, that is all or none. Then the first request of the step with new items
        may compute more than `max_num_tokens` encoder tokens.
        """
        self._chosen = chosen = []
        end, cache = start + num_new, self.cache
        budget = self._budget if self._late in (None, request) else 0
        room = cache.num_free_rows
        begun: set[str] = set()
        for index, feature in enumerate(request.mm_features):
            place = feature.mm_position
            if place.offset >= end:
                break
            if not _reads(feature, start, end) or cache.is_held(request, index):
                continue
            identifier = feature.identifier
            if identifier not in begun:
                known = identifier in cache
                tokens = 0 if known else feature.num_encoder_tokens
                rows = feature.num_rows if not known or cache.is_unused(identifier) else 0
                has_room = rows <= (0 if self._is_full else room)
                left = self._budget if whole else budget
                has_time = tokens <= max(budget, 0) or left == self._max_num_tokens
                if not has_room or not has_time:
                    self._is_full |= not has_room
                    if not has_time and self._late is None:
                        self._late = request
                    begin = min([place.offset, *(begin for begin, _ in feature.ranges)])
                    return 0 if whole else max(begin - start, 0)
                room, budget = room - rows, budget - tokens
                begun.add(identifier)
            chosen.append(index)
        return num_new

    def add(self, request: Request, output: SchedulerOutput) -> int:
        """Add the items that the last call of `fit` chose for a request to the step.

        Returns:
            Number of the encoder tokens that are computed for the request for the first time.
        """
        features, cache = request.mm_features, self.cache
        # Those in the cache first: they must not be given up for the others.
        chosen = sorted(self._chosen, key=lambda index: features[index].identifier not in cache)
        new = [index for index in chosen if cache.acquire(request, index)]
        if new:
            output.scheduled_encoder_inputs[request.request_id] = new
            self._budget -= sum(features[index].num_encoder_tokens for index in new)
        self._chosen = []
        # Rows whose tokens were charged are computed again after a preemption.
        begun = request.num_charged
        return sum(
            features[index].num_encoder_tokens
            for index in new
            if not features[index].mm_position.num_embeds_before(begun)
        )

    def end_step(self, output: SchedulerOutput) -> None:
        """Complete a step, whose requests are all scheduled."""
        output.free_encoder_mm_hashes = self.cache.take_freed()
        self.cache.release_computed()
        self._budget, self._is_full, self._late = self._max_num_tokens, False, None

    def next_waiting(
        self, requests: Iterable[Request], rank: Callable[[Request], Any]
    ) -> list[Request]:
        """Return the waiting requests whose first items fit into the next step, in order.

        Args:
            requests: requests that wait for encoders.
            rank: order of service.
        """
        found: list[Request] = []
        budget = self._max_num_tokens
        for request in sorted(requests, key=rank):
            missing = (f for f in request.mm_features if f.identifier not in self.cache)
            first = next(missing, None)
            tokens = 0 if first is None else first.num_encoder_tokens
            if tokens > budget and found:
                break
            found.append(request)
            budget -= tokens
        return found


def uncomputed(features: list[MultiModalFeatureSpec], start: int) -> list[MultiModalFeatureSpec]:
    """Return a request's items for the worker, without the data of those before token `start`."""
    return [
        msgspec.structs.replace(feature, data={})
        if 0 < feature.mm_position.end <= start
        else feature
        for feature in features
    ]


def _reads(feature: MultiModalFeatureSpec, start: int, end: int) -> bool:
    """Return True if the tokens from `start` up to `end` need an item's rows."""
    place = feature.mm_position
    return place.num_embeds_before(start) < place.num_embeds_before(end)
