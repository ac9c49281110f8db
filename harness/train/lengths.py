"""Arithmetic with the lengths of texts: which are fed together, and to what they are rounded up."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

# Rows of a batch, and how many of their columns hold tokens.
Parts = tuple[tuple[np.ndarray, int], ...]
MOST_PARTS = 4
# What a forward and backward pass of its own costs, in tokens that could be computed instead. On a
# CPU, bert-mini with batches of 16 to 64 news texts: of 100, 300 and 1000, 100 was the fastest.
PART_TOKENS = 100
MOST_SHAPES = 8
DRAWS = 1000  # of batches, to see which sizes are usual
STEP = 8  # sizes are multiples of this


def split(lengths: np.ndarray) -> Parts:
    """The texts in at most MOST_PARTS parts of like length, so that the least is computed."""
    order = np.argsort(lengths, kind="stable")
    ordered, count = lengths[order], len(lengths)
    # cost[i, j]: of the texts from i to before j as one part.
    begins, ends = np.arange(count)[:, None], np.arange(1, count + 1)
    cost = np.where(begins < ends, (ends - begins) * ordered[ends - 1] + PART_TOKENS, np.inf)
    best, cuts = [cost[0]], [np.zeros(count, dtype=np.int64)]
    for _ in range(1, min(MOST_PARTS, count)):
        # Up to i in the parts before, the rest in one more.
        total = best[-1][:-1, None] + cost[1:]
        cuts.append(total.argmin(axis=0) + 1)
        best.append(total.min(axis=0))
    end, parts = count, []
    for number in range(int(np.argmin([each[-1] for each in best])), -1, -1):
        begin = int(cuts[number][end - 1])
        parts.append((order[begin:end], int(ordered[end - 1])))
        end = begin
    return tuple(reversed(parts))


def edges_of(lengths: np.ndarray, texts: int, in_a_row: bool) -> list[int]:
    """At most MOST_SHAPES sizes for all batches of so many texts, close to those that are usual.

    The size of a batch is that of its longest text, or of all its texts in a row.
    """
    drawn = np.random.default_rng(0).choice(lengths, (DRAWS, texts))
    usual = np.quantile(
        drawn.sum(axis=1) if in_a_row else drawn.max(axis=1),
        np.arange(1, MOST_SHAPES) / (MOST_SHAPES - 1),
        method="higher",
    )
    # A model may have no position behind its longest text; a row may be of any length.
    most = -(-int(lengths.max()) * texts // STEP) * STEP if in_a_row else int(lengths.max())
    return sorted({most, *(min(-(-int(size) // STEP) * STEP, most) for size in usual)})


def next_edge(edges: list[int], size: int) -> int:
    return edges[bisect_left(edges, size)]
