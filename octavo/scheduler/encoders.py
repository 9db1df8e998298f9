"""Choice of the items, such as pictures, that encoders compute in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.errors import RequestError
from octavo.kv_cache.encoder_cache import EncoderCacheManager
from octavo.messages import EncoderSlice, Modality, MultiModalFeatureSpec, SchedulerOutput
from octavo.request import Request
from octavo.scheduler.costs import MANY, learn

_SHARE = 0.25
"""Time of encoders beside texts, as a share of the time of the steps without them."""


class EncoderPace:
    """Chooser of the number of layers that an encoder computes in a step beside texts.

    It measures the time of a layer. An encoder takes `_SHARE` of a step's time: as many layers as
    fit into it, or one layer, and then none in the next steps until their shares have paid for it.
    """

    def __init__(self) -> None:
        self._step: float | None = None
        """Seconds of a step without encoders."""
        self._layer: dict[Modality, float] = {}
        """Seconds of a layer for one encoder token."""
        self._unpaid: dict[Modality, int] = {}
        """Work whose time is unknown: layers times encoder tokens."""
        self._credit = 0.0
        """Seconds that encoders may still take; negative if they have taken more."""

    def begin_step(self, *, has_texts: bool) -> None:
        """Begin a step; without texts nothing is owed any more."""
        if has_texts:
            self._credit = min(self._credit, 0.0) + _SHARE * (self._step or 0.0)
        else:
            self.forget_debts()

    def num_layers(self, item: MultiModalFeatureSpec) -> int:
        """Return the most layers that may be computed for an item in this step."""
        if self._credit < 0:
            return 0
        seconds = self._seconds(item)
        return max(1, int(self._credit / seconds)) if seconds else 1

    def spend(self, item: MultiModalFeatureSpec, num_layers: int) -> None:
        """Note that the step computes layers for an item."""
        if item.modality in self._layer:
            self._credit -= self._seconds(item) * num_layers
        else:
            work = item.num_encoder_tokens * num_layers
            self._unpaid[item.modality] = self._unpaid.get(item.modality, 0) + work

    def step_ended(self, output: SchedulerOutput, seconds: float) -> None:
        """Learn from the time of a step, if it has no long chunks of prompts."""
        requests = len(output.scheduled_reqs)
        if output.scheduled_encoder_inputs or output.total_num_scheduled_tokens >= MANY * requests:
            return
        part = output.encoder_slice
        if part is None:
            self._step = learn(self._step, seconds)
        elif self._step is not None:
            work = part.item.num_encoder_tokens * (part.end - part.begin)
            own = max(seconds - self._step, 0.0) / work
            self._layer[part.item.modality] = learn(self._layer.get(part.item.modality), own)
            self._credit -= own * self._unpaid.pop(part.item.modality, 0)

    def forget_debts(self) -> None:
        """Forget what the work so far has taken."""
        self._credit = 0.0
        self._unpaid.clear()

    def _seconds(self, item: MultiModalFeatureSpec) -> float:
        return self._layer.get(item.modality, 0.0) * item.num_encoder_tokens


@dataclass(slots=True)
class _Run:
    """Run of an encoder that takes several steps."""

    request: Request
    """Request that waits for it."""
    item: MultiModalFeatureSpec
    num_layers: int
    num_done: int = 0
    """Number of layers in scheduled steps."""
    is_late: bool = False
    """True if it could have ended in an earlier step, and its request had no use for the rows."""


class EncoderInputs:
    """Chooser of the items that encoders compute beside a step's tokens.

    A step computes items of at most `max_num_tokens` encoder tokens together, or one larger item
    (without chunked prefill, the items of one prompt). So the others wait at most that long for the
    pictures of one request. A request's tokens stop before an item whose rows are not there and
    cannot be computed in this step.

    A request that has begun can always continue once it is the first one to be scheduled: it uses
    the rows of an item only until its tokens have passed it, and needs no others before.

    While texts (requests without items) get their tokens, the run for an item is cut into slices
    of whole layers, which are computed in several steps; see `EncoderPace`. There is one such run
    at a time. Its request waits until the step with the last slice, which has the item's rows. If
    the request then has no use for them, the next item takes the place of the run, so that no
    request waits for another for ever. Without texts the rest of the run is one slice.

    Args:
        num_rows: number of rows that the encoder cache holds.
        max_num_tokens: most encoder tokens, and most tokens, of a step.
        max_num_seqs: most requests of a step.
        num_layers: numbers of layers of the encoders whose runs may be cut, by modality.
    """

    def __init__(
        self,
        num_rows: int,
        max_num_tokens: int,
        max_num_seqs: int,
        num_layers: Mapping[Modality, int] | None = None,
    ) -> None:
        self.pace = EncoderPace()
        self._num_layers = num_layers or {}
        self._has_texts = False
        """True if texts get their tokens in the step."""
        self._run: _Run | None = None
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
        in it, and no drafts: the scheduler leaves these out once a range has found no room.

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
                if not (known or whole) and self._is_cut(feature):
                    has_time &= self._may_end(request, feature)
                if not has_room or not has_time:
                    self._is_full |= not has_room
                    if not has_time and not self._is_cut(feature) and self._late is None:
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
        for index in new:
            if self._run is not None and self._run.item.identifier == features[index].identifier:
                self._end_run(self._run, output)
        self._chosen = []
        # Rows whose tokens were charged are computed again after a preemption.
        begun = request.num_charged
        return sum(
            features[index].num_encoder_tokens
            for index in new
            if not features[index].mm_position.num_embeds_before(begun)
        )

    def begin_step(self, running: Iterable[Request]) -> None:
        """Begin a step.

        Args:
            running: the requests that run.
        """
        if self._num_layers:
            self._has_texts = any(
                not request.mm_features and request.num_computed_tokens >= request.num_prompt_tokens
                for request in running
            )
            self.pace.begin_step(has_texts=self._has_texts)

    def end_step(self, output: SchedulerOutput) -> None:
        """Complete a step, whose requests are all scheduled."""
        if self._run is not None and self._run.request.status.finished:
            self._run = None
        if self._run is not None and self._has_texts and output.scheduled_reqs:
            self._advance(self._run, output)
        output.free_encoder_mm_hashes = self.cache.take_freed()
        self.cache.release_computed()
        self._budget, self._is_full, self._late = self._max_num_tokens, False, None

    def forget_run(self) -> None:
        """Forget the run in progress: its request will begin it again."""
        self._run = None
        self.pace.forget_debts()

    def _is_cut(self, item: MultiModalFeatureSpec) -> bool:
        """Return True if the run for an item is cut in this step."""
        return self._has_texts and item.modality in self._num_layers

    def _may_end(self, request: Request, item: MultiModalFeatureSpec) -> bool:
        """Return True if the run for an item can end in this step; begin it if there is no other.

        Args:
            request: the request that needs the item.
            item: its item.
        """
        run = self._run
        if run is None or run.request.status.finished or run.is_late:
            if run is None or run.item.identifier != item.identifier:
                run = self._run = _Run(request, item, self._num_layers[item.modality])
        elif run.item.identifier != item.identifier:
            return False
        run.request = request
        return run.num_layers - run.num_done <= self.pace.num_layers(item)

    def _advance(self, run: _Run, output: SchedulerOutput) -> None:
        """Add a slice, which does not end the run, to a step."""
        count, left = self.pace.num_layers(run.item), run.num_layers - run.num_done
        run.is_late |= count >= left
        count = min(count, left - 1)
        if count > 0 and output.encoder_slice is None:
            self._add_slice(run, run.num_done + count, output)

    def _end_run(self, run: _Run, output: SchedulerOutput) -> None:
        """Compute the rest of a run in a step."""
        self._run = None
        if run.num_done and output.encoder_slice is None:
            self._add_slice(run, run.num_layers, output)
        else:  # the whole run at once
            self.pace.spend(run.item, run.num_layers)

    def _add_slice(self, run: _Run, end: int, output: SchedulerOutput) -> None:
        item = msgspec.structs.replace(run.item, data={}) if run.num_done else run.item
        output.encoder_slice = EncoderSlice(item, run.num_done, end)
        self.pace.spend(item, end - run.num_done)
        run.num_done = end

    def next_waiting(
        self, requests: Iterable[Request], rank: Callable[[Request], Any]
    ) -> list[Request]:
        """Return the waiting requests whose first items fit into the next step, in order.

        Args:
            requests: requests that wait for encoders.
            rank: order of service.
        """
        owner = None if self._run is None else self._run.request
        found: list[Request] = []
        budget = self._max_num_tokens
        for i, request in enumerate(sorted(requests, key=rank)):
            if request is owner:
                found.append(request)
                continue
            missing = (f for f in request.mm_features if f.identifier not in self.cache)
            first = next(missing, None)
            tokens = 0 if first is None else first.num_encoder_tokens
            if tokens > budget and i:
                budget = 0
                continue
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
