"""Placement of experts on ranks by their loads.

A placement of a layer is int32 [ranks, slots]: the expert in each slot of each rank. Every expert
is in at least one slot, and no rank has an expert twice. If several ranks have an expert, they
divide its tokens evenly.

If there are more slots than experts, the most loaded experts get copies. Then the largest parts of
loads are placed first, each on the least loaded rank, as in DeepSeek's EPLB (2025). That is the
rule LPT (Graham, "Bounds on multiprocessing timing anomalies", 1969) with a number of slots for
each rank.
"""

from __future__ import annotations

from itertools import product

import numpy as np
from numpy.typing import NDArray

Placement = NDArray[np.int32]
Loads = NDArray[np.int64]

# Least share by which the largest load must fall, since moving experts has a cost.
_LEAST_GAIN = 0.05


def first_placement(experts: int, ranks: int, slots: int) -> Placement:
    """Return the placement with which ranks start; see `Rank.experts`."""
    placement: Placement = (np.arange(ranks * slots, dtype=np.int32) % experts).reshape(ranks, -1)
    placement.sort(axis=1)
    return placement


def rank_loads(loads: Loads, placement: Placement) -> NDArray[np.float64]:
    """Return the load of each rank, float64 [ranks], from those of the experts, int64 [experts]."""
    copies = np.bincount(placement.ravel(), minlength=len(loads))
    total: NDArray[np.float64] = (loads / copies)[placement].sum(1)
    return total


def balance(loads: Loads, current: Placement) -> Placement:
    """Return a better placement, or `current` itself if there is none.

    A placement is better if the largest load of a rank is smaller by at least `_LEAST_GAIN`. The
    same arguments give the same result in every process.

    Args:
        loads: tokens of each expert: int64 [experts].
        current: the present placement: int32 [ranks, slots].
    """
    ranks, slots = current.shape
    copies = _copies(loads, ranks, slots)
    held = _place(loads / copies, copies, ranks, slots)
    found = _keep_places(held, current)
    most, before = rank_loads(loads, found).max(), rank_loads(loads, current).max()
    return found if most < (1 - _LEAST_GAIN) * before else current


def _copies(loads: Loads, ranks: int, slots: int) -> NDArray[np.int64]:
    """Return the number of ranks that get each expert: int64 [experts]."""
    copies = np.ones(len(loads), np.int64)
    for _ in range(ranks * slots - len(loads)):
        copies[np.where(copies < ranks, loads / copies, -1).argmax()] += 1
    return copies


def _place(
    parts: NDArray[np.float64], copies: NDArray[np.int64], ranks: int, slots: int
) -> list[set[int]]:
    """Return the experts of each rank.

    Args:
        parts: load of one copy of each expert: float64 [experts].
        copies: number of ranks that get each expert: int64 [experts].
        ranks: number of ranks.
        slots: number of experts of a rank.
    """
    held: list[set[int]] = [set() for _ in range(ranks)]
    totals = [0.0] * ranks
    loads = parts.tolist()

    def add(rank: int, expert: int) -> None:
        held[rank].add(expert)
        totals[rank] += loads[expert]

    for expert in np.argsort(-parts, kind="stable").tolist():
        free = [rank for rank in range(ranks) if len(held[rank]) < slots]
        free = sorted(free, key=lambda rank: totals[rank])[: copies[expert]]
        for rank in free:
            add(rank, expert)
        for _ in range(copies[expert] - len(free)):
            # All ranks with a free slot have the expert. So a full rank takes it, and gives one of
            # its experts to a rank with a free slot.
            full, room, moved = min(
                (
                    (full, room, moved)
                    for full in range(ranks)
                    if expert not in held[full]
                    for room in range(ranks)
                    if len(held[room]) < slots
                    for moved in sorted(held[full] - held[room])
                ),
                key=lambda it: max(
                    totals[it[0]] - loads[it[2]] + loads[expert], totals[it[1]] + loads[it[2]]
                ),
            )
            held[full].remove(moved)
            totals[full] -= loads[moved]
            add(full, expert)
            add(room, moved)
    return held


def _keep_places(held: list[set[int]], current: Placement) -> Placement:
    """Return a placement with the given sets of experts, in which few experts move.

    Each set goes to the rank that has most of its experts now, and these experts keep their slots.
    """
    ranks = len(held)
    have = [set(row) for row in current.tolist()]
    pairs = sorted(product(range(ranks), repeat=2), key=lambda p: -len(held[p[0]] & have[p[1]]))
    found = current.copy()
    used: set[int] = set()
    taken: set[int] = set()
    for i, rank in pairs:
        if i in used or rank in taken:
            continue
        used.add(i)
        taken.add(rank)
        new = iter(sorted(held[i] - have[rank]))
        for slot, expert in enumerate(current[rank].tolist()):
            if expert not in held[i]:
                found[rank, slot] = next(new)
    return found
