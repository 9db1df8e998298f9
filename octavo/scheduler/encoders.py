"""Choice of the items, such as pictures, that encoders compute in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from octavo.errors import RequestError
from octavo.kv_cache.encoder_cache import EncoderCacheManager
from octavo.messages import EncoderSlice, Modality, MultiModalFeatureSpec, SchedulerOutput
from octavo.request import Request, RequestStatus
from octavo.scheduler.fairness import Tenant
from octavo.scheduler.pace import ItemPace, ItemWork

Served: TypeAlias = Callable[[Tenant], int]
"""Function from a tenant to the counter of its tokens."""
_CROSS_SHARE = 0.5
"""Time of whole runs beside answers of other tenants, as a share of that of the other steps."""


@dataclass(slots=True)
class _Run:
    """Run of an encoder that takes several steps."""

    request: Request
    """Request that waits for it."""
    item: MultiModalFeatureSpec
    num_pieces: int
    num_done: int = 0
    """Number of pieces in scheduled steps."""
    num_sent: int = 0
    """Number of pieces in the steps before the one that is being scheduled; if it is not 0, the
    workers have the item's data."""
    is_late: bool = False
    """True if it could have ended in an earlier step, and its request had no use for the rows."""

    @property
    def num_left(self) -> int:
        """Number of pieces that are not scheduled."""
        return self.num_pieces - self.num_done

    @property
    def piece(self) -> float:
        """Work of a piece, as in `ItemWork.tokens`."""
        return self.item.num_encoder_tokens / self.num_pieces


class EncoderInputs:
    """Chooser of the items that encoders compute beside a step's tokens.

    A step computes items of at most `max_num_tokens` encoder tokens together, or one larger item
    (without chunked prefill, the items of one prompt). So the others wait at most that long for the
    pictures of one request. A request's tokens stop before an item whose rows are not there and
    cannot be computed in this step.

    A request that has begun can always continue once it is the first one to be scheduled: it uses
    the rows of an item only until its tokens have passed it, and needs no others before.

    While texts (requests without items) get their tokens, the run for an item is cut into slices
    of some pieces, which are computed in several steps; see `ItemPace`. There is one such run at a
    time. Its request waits until the step with the last slice, which has the item's rows. If the
    request cannot use them then, the last piece waits, and the next item that has room may take the
    place of the run, so that no request waits for another for ever. Without texts the rest of the
    run is one slice. Items whose tokens see each other are not cut: a step needs all their rows.

    Prompts have the same pace up to their last item: beside texts they are computed in short
    chunks. A run and the prompts of other requests take turns, so that neither waits for ever.

    Args:
        num_rows: number of rows that the encoder cache holds.
        max_num_tokens: most encoder tokens, and most tokens, of a step.
        max_num_seqs: most requests of a step.
        num_pieces: for each modality whose runs may be cut, a function from the tokens and rows of
            an item to the number of pieces of its run.
        has_cross: True if tokens attend to the rows, whose run is in the step in which a request
            starts; see `must_wait`.
    """

    def __init__(
        self,
        num_rows: int,
        max_num_tokens: int,
        max_num_seqs: int,
        num_pieces: Mapping[Modality, Callable[[int, int], int]] | None = None,
        *,
        has_cross: bool = False,
    ) -> None:
        self.pace = ItemPace(_CROSS_SHARE) if has_cross else ItemPace()
        self._has_cross = has_cross
        self._num_pieces = num_pieces or {}
        self._has_texts = False
        """True if texts get their tokens in the step."""
        self._run: _Run | None = None
        self._is_turn_of_run = False
        """True if the prompt of another request has had the last turn."""
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
        if whole or num_new == 1 or not self._has_texts:
            return self._fit(request, start, num_new, whole=whole)
        count = min(num_new, self.pace.num_tokens())
        count = self._fit(request, start, self.fit_ranges(request, start, count, num_new))
        run = self._run
        if run is not None and run.request is request:
            is_next = run.is_late or self.pace.may_begin
        else:
            is_next = self.pace.may_begin and (run is None or not self._is_turn_of_run)
        return count if is_next else 0

    def _fit(self, request: Request, start: int, num_new: int, *, whole: bool = False) -> int:
        """Implement `fit` without the pace of prompts."""
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
                is_cut = self._is_cut(request, feature)
                if is_cut and not (known or whole):
                    has_time &= self._may_end(request, feature, has_room=has_room)
                if not has_room or not has_time:
                    self._is_full |= not has_room
                    if not has_time and not is_cut and self._late is None:
                        self._late = request
                    return 0 if whole else max(feature.begin - start, 0)
                room, budget = room - rows, budget - tokens
                begun.add(identifier)
            chosen.append(index)
        return num_new

    def add(self, request: Request, num_new: int, output: SchedulerOutput) -> int:
        """Add the items that the last call of `fit` chose for a request to the step.

        Args:
            request: the request.
            num_new: number of its tokens in the step.
            output: the step.

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
            elif self._has_texts and not features[index].is_embeds:
                self.pace.spend(features[index].modality, features[index].num_encoder_tokens)
        self._chosen = []
        if self._has_texts and num_new > 1:
            self.pace.spend("prompt", num_new, in_step=True)
            self._is_turn_of_run = True
        # Rows whose tokens were charged are computed again after a preemption.
        begun = request.num_charged
        return sum(
            features[index].num_encoder_tokens
            for index in new
            if not features[index].mm_position.num_embeds_before(begun)
        )

    def begin_step(self, running: Sequence[Request]) -> None:
        """Begin a step.

        Args:
            running: the requests that run.
        """
        if self._num_pieces:
            self._has_texts = any(
                not request.mm_features and request.num_computed_tokens >= request.num_prompt_tokens
                for request in running
            )
            self.pace.begin_step(has_texts=self._has_texts)
        elif self._has_cross:
            self.pace.begin_step(has_texts=bool(running))

    def must_wait(self, request: Request, running: Iterable[Request], served: Served) -> bool:
        """Return True if a request that starts with a whole run must wait for answers of others.

        These are the answers of tenants that are less served, without those of a worse priority.
        Beside them, runs take `_CROSS_SHARE` of the time of the steps without one, and the step
        that is being scheduled has no time left. What runs have taken is owed while anything runs:
        else a tenant with short answers would owe nothing at each of its runs.

        Args:
            request: the request.
            running: the requests that run.
            served: returns the counter of a tenant.
        """
        return not self.pace.may_begin and _is_beside(request, running, served)

    def add_run(self, request: Request, running: Iterable[Request], served: Served) -> None:
        """Note that a request starts with a whole run; the arguments are those of `must_wait`."""
        if _is_beside(request, running, served):
            for item in request.mm_features:
                self.pace.spend(item.modality, item.num_encoder_tokens, in_step=True)

    def data_for_worker(self, request: Request, start: int) -> list[MultiModalFeatureSpec]:
        """Return the items of a request that starts at token `start`, for the workers.

        Items before that token have no data, and the one whose run has begun, whose data the
        workers have.
        """
        run = self._run
        known = run.item.identifier if run is not None and run.num_sent else None
        return [
            msgspec.structs.replace(item, data={})
            if item.identifier == known or 0 < item.mm_position.end <= start
            else item
            for item in request.mm_features
        ]

    def end_step(self, output: SchedulerOutput) -> ItemWork:
        """Complete a step, whose requests are all scheduled; return its work for items."""
        if self._run is not None and self._run.request.status.finished:
            self._run = None
        if self._run is not None and self._has_texts and output.scheduled_reqs:
            self._advance(self._run, output)
        if self._run is not None:
            self._run.num_sent = self._run.num_done
        if self._run is None or self.pace.may_begin:  # the run has had its turn
            self._is_turn_of_run = False
        output.free_encoder_mm_hashes = self.cache.take_freed()
        self.cache.release_computed()
        self._budget, self._is_full, self._late = self._max_num_tokens, False, None
        return self.pace.end_step()

    def forget_run(self) -> None:
        """Forget the run in progress: its request will begin it again."""
        self._run = None
        self.pace.forget_debts()

    def _is_cut(self, request: Request, item: MultiModalFeatureSpec) -> bool:
        """Return True if the run for an item of a request is cut in this step."""
        return (
            self._has_texts
            and item.modality in self._num_pieces
            and not item.is_embeds
            and not (item.reaches_text and _sees_another(request, item))
        )

    def _may_end(self, request: Request, item: MultiModalFeatureSpec, *, has_room: bool) -> bool:
        """Return True if the run for an item can end in this step; begin it if there is no other.

        Args:
            request: the request that needs the item.
            item: its item.
            has_room: True if the item's rows have room; it may then take the place of a late run.
        """
        run = self._run
        if run is None or run.request.status.finished or (run.is_late and has_room):
            if run is None or run.item.identifier != item.identifier:
                count = self._num_pieces[item.modality](item.num_encoder_tokens, item.num_rows)
                run = self._run = _Run(request, item, count)
        elif run.item.identifier != item.identifier:
            return False
        run.request = request
        # A late run may go into debt: else the next item would take its place.
        return run.is_late or run.num_left <= self.pace.num_pieces(item.modality, run.piece)

    def _advance(self, run: _Run, output: SchedulerOutput) -> None:
        """Add a slice, which does not end the run, to a step."""
        count, left = self.pace.num_pieces(run.item.modality, run.piece), run.num_left
        run.is_late |= count >= left
        count = min(count, left - 1)
        if count > 0 and output.encoder_slice is None:
            self._add_slice(run, run.num_done + count, output)

    def _end_run(self, run: _Run, output: SchedulerOutput) -> None:
        """Compute the rest of a run in a step."""
        self._run = None
        if run.num_done and output.encoder_slice is None:
            self._add_slice(run, run.num_pieces, output)
        else:  # the whole run at once
            self.pace.spend(run.item.modality, run.item.num_encoder_tokens)

    def _add_slice(self, run: _Run, end: int, output: SchedulerOutput) -> None:
        # The workers have the data of a request that runs.
        is_known = run.num_done or run.request.status == RequestStatus.RUNNING
        item = msgspec.structs.replace(run.item, data={}) if is_known else run.item
        output.encoder_slice = EncoderSlice(item, run.num_done, end)
        self.pace.spend(item.modality, run.piece * (end - run.num_done))
        run.num_done, self._is_turn_of_run = end, False

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


def _is_beside(request: Request, running: Iterable[Request], served: Served) -> bool:
    """Return True if a request of a tenant that is less served than a request's tenant runs.

    Those of a worse priority do not count.
    """
    own, priority = request.options.share, request.queue_key[0]
    limit = served(own)
    return any(
        it.queue_key[0] <= priority and it.options.share != own and served(it.options.share) < limit
        for it in running
    )


def _sees_another(request: Request, item: MultiModalFeatureSpec) -> bool:
    """Return True if tokens of an item see those of another item of its request."""
    return any(
        begin <= other.mm_position.offset < end
        for other in request.mm_features
        if other.identifier != item.identifier
        for begin, end in item.ranges
    )


def _reads(feature: MultiModalFeatureSpec, start: int, end: int) -> bool:
    """Return True if the tokens from `start` up to `end` need an item's rows."""
    place = feature.mm_position
    return place.num_embeds_before(start) < place.num_embeds_before(end)
