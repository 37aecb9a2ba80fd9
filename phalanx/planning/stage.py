"""What one rank of a pipeline has: how many blocks, and how many forwards whose backward is still to come at the worst moment.
`planning/footprint` asks for a few ranks, one of which is the fullest."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from phalanx.planning.job_table import SCHEDULES, Column, Work

_CODE = {name: place for place, name in enumerate(SCHEDULES)}


class Share(NamedTuple):
    """One rank's part of the pipeline."""

    rank: Column
    blocks: Column
    sparse: Column
    """Of them, with experts."""
    widest: Column
    """Blocks of its largest stage."""
    flying: Column
    """Forwards of a stage that wait for their backward, at most."""
    owing: Column
    """Backwards whose weight half is put off, at most."""
    begins: Column
    """1: it holds the embedding …"""
    ends: Column
    """… the head."""


def shares(work: Work) -> tuple[Share, ...]:
    """The ranks one of which is the fullest: the first, the first that has a block more than it, the last."""
    ranks = np.asarray(work.pipeline)
    if not np.any(ranks > 1):
        one = np.ones_like(ranks)
        return (Share(0 * one, work.layers, work.sparse_layers, work.layers, one, 0 * one, one, one),)
    table = _cuts(work)
    stages = (ranks * np.asarray(work.stages)).astype(np.int64)
    small, last, fewer = (column[stages] for column in table)
    middle = np.minimum(fewer - ranks * np.floor(fewer / ranks), np.maximum(ranks - 2, 0))
    return tuple(_share(work, rank, (small, last, fewer)) for rank in (0 * ranks, middle, ranks - 1))


def _share(work: Work, rank: Column, cut: tuple[Column, Column, Column]) -> Share:
    small, last, fewer = cut
    ranks, stages = np.asarray(work.pipeline), np.asarray(work.stages)
    kind = np.asarray(work.schedule)
    total = ranks * stages
    v_shaped = (kind == _CODE["zbv"]) | (kind == _CODE["dualpipev"])
    # Stages in a loop: rank, rank + ranks, …; in a V: rank, and its mirror image.
    passed = np.minimum(np.maximum(np.ceil((fewer - rank) / ranks), 0), stages)  # of its stages, those that have `small` blocks
    looped = stages * small + (stages - passed)
    mirror = total - 1 - rank
    turned = 2 * small + (rank >= fewer) + (mirror >= fewer)
    blocks = np.where(v_shaped, turned, looped)
    ends = np.where(v_shaped, rank == 0, rank == ranks - 1) | (ranks == 1)
    in_last = small + (total - 1 >= fewer)  # what the last stage was counted with
    blocks = np.where(ends, blocks - in_last + last, blocks)
    blocks = np.where(ranks == 1, work.layers, blocks)
    plain = work.layers - np.asarray(work.sparse_layers)  # the first ones, on the first rank
    dense = np.where((np.asarray(work.sparse_layers) == 0) | (rank == 0), np.minimum(plain, blocks), 0)
    widest = np.where(ranks == 1, work.layers, np.maximum(small + 1, 1))
    return Share(
        rank,
        blocks,
        blocks - dense,
        np.minimum(widest, blocks),
        _flying(work, rank),
        _owing(work, rank),
        (rank == 0) * 1,
        ends * 1,
    )


def _flying(work: Work, rank: Column) -> Column:
    """As the schedules of `schedules/makers` have them: a test counts them there."""
    kind, ranks, stages = np.asarray(work.schedule), np.asarray(work.pipeline), np.asarray(work.stages)
    count = np.floor(np.asarray(work.accumulation) + 0.5)
    # By division: numpy takes far longer for the floor of one of floats.
    rounds = np.maximum(1, np.floor(count / ranks))
    size = np.ceil(count / rounds)  # micro-batches of a round
    loops = (stages - 1) * size
    found = np.minimum(ranks - rank, count)
    found = np.where(kind == _CODE["gpipe"], count, found)
    found = np.where(kind == _CODE["looped-bfs"], count * stages, found)
    found = np.where(kind == _CODE["interleaved-1f1b"], np.minimum(loops + 2 * (ranks - 1 - rank) + 1, count * stages), found)
    # Weight halves that are put off keep what they need: rank r puts off r of them.
    found = np.where(kind == _CODE["interleaved-zero-bubble"], np.minimum(loops + ranks, count * stages), found)
    down = 2 * ranks - rank - 1  # forwards on the way down before the first backward; up, rank + 1
    turned = np.minimum(down, count) + np.minimum(rank + 1, count)
    found = np.where(kind == _CODE["zbv"], turned, found)
    found = np.where(kind == _CODE["dualpipev"], turned + (count > down), found)
    return np.where(ranks == 1, 1, found)


def _owing(work: Work, rank: Column) -> Column:
    """Rank by rank one more, in ZB-V two; with few micro-batches a V puts nothing off."""
    kind, ranks = np.asarray(work.schedule), np.asarray(work.pipeline)
    many = np.asarray(work.accumulation) > 2 * ranks - 1.5
    found = np.where(
        kind == _CODE["interleaved-zero-bubble"], np.minimum(rank + 1, work.accumulation * np.asarray(work.stages)), 0
    )
    found = np.where(kind == _CODE["zbv"], np.where(many, 2 * rank + 1, 1), found)
    found = np.where(kind == _CODE["dualpipev"], np.where(many, rank + 1, 1), found)
    return np.where(ranks == 1, 0, found)


def _cuts(work: Work) -> tuple[npt.NDArray[np.int64], ...]:
    """For each number of stages: blocks of a small stage, of the last one, and how many small ones come before larger ones, as
    `schedules/stage_split` deals equal blocks out."""
    layers = int(np.max(work.layers))
    head = float(np.max(_head_in_blocks(work)))
    stages = np.arange(layers + 1)
    others = np.maximum(stages - 1, 1)
    best = np.full((2, layers + 1), np.inf)
    lasts = np.ones(layers + 1, dtype=np.int64)
    aim = np.floor((layers + head) / np.maximum(stages, 1) - head).astype(np.int64)
    for shift in (-1, 0, 1, 2):
        last = np.clip(aim + shift, 1, np.maximum(layers - (stages - 1), 1))
        small, larger = np.divmod(layers - last, others)
        dearest = np.maximum(small + (larger > 0), last + head)
        squares = larger * (small + 1) ** 2 + (others - larger) * small**2 + (last + head) ** 2
        better = (dearest < best[0] - 1e-9) | ((dearest < best[0] + 1e-9) & (squares < best[1] - 1e-9))
        best = np.where(better, (dearest, squares), best)
        lasts = np.where(better, last, lasts)
    small, larger = np.divmod(layers - lasts, others)
    return small, lasts, stages - 1 - larger


def _head_in_blocks(work: Work) -> Column:
    """FLOPs of the head over those of a block."""
    sparse = np.asarray(work.sparse_layers) > 0
    dense = (2 + np.asarray(work.gated)) * work.dim * work.ffn
    experts = 3 * work.dim * (work.active * np.asarray(work.expert_ffn) + work.shared_ffn) + work.dim * np.asarray(work.experts)
    matrices = work.attention_weights + np.where(sparse, experts, dense)
    return work.vocab * work.dim / (matrices + (work.score_width + work.value_width) * work.sequence)
