"""Whether ranks that must hold the same still do: silent corruption, found before a step is applied. `training/step` asks.

Every few steps each rank sends one checksum for each group of tensors: parameters, optimizer states, complete gradients. All ranks
see all of them, so all come to the same verdict without another word. Of three copies the odd one is wrong. Of two, the one whose
bits have changed since it wrote them itself, as far as that is known; of gradients, the one that a repetition does not confirm.

Compared is what the optimizer works on and what lies on the device: not the lower-precision copies that ZeRO spreads anew after
each step, nor states in host memory of a GPU or in files. Ranks along "tensor" are not compared with each other, as what they hold
alike each has computed by itself, and kernels of GPUs may differ in the last bit.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from phalanx.checkpointing.state_tensor import StateTensor
from phalanx.events.records import Corrupted
from phalanx.models.moe import routers
from phalanx.parallel.mesh import AXES
from phalanx.parallel.owned_param import ParamShard
from phalanx.parallel.sharded_model import ShardedModel
from phalanx.spec.errors import RunFailed
from phalanx.training.hooks.checksum import Checksum

WEIGHTS, OPTIMIZER, GRADIENTS = WHATS = ("weights", "optimizer", "gradients")

_SHARE, _STEP = 0.001, 0.2
"""Of a step, or of one of so many seconds if it is shorter, watching weights may take so much."""
_NAMED = 3
"""Tensors that a message names."""

Key = tuple[str, ...]
"""Mesh axes along which tensors of a group differ: ranks of a stage with the same coordinates there hold the same."""
Slot = tuple[str, Key]
"""One of WHATS, and which tensors of it."""
Row = dict[Slot, int]
"""What one rank says."""


class Corruption(RunFailed):
    """Ranks that must hold the same do not: the step was not applied on any."""

    def __init__(self, verdict: Verdict, step: int, agreed: int | None, words: str):
        self.verdict, self.step, self.agreed, self.words = verdict, step, agreed, words
        super().__init__(words)

    def __reduce__(self) -> tuple[type[Corruption], tuple[object, ...]]:
        return Corruption, (self.verdict, self.step, self.agreed, self.words)

    @property
    def guilty(self) -> tuple[int, ...]:
        """Ranks whose state, or gradient, is known to be wrong; that of all others is right. Empty: it cannot be told."""
        return self.verdict.guilty

    @property
    def suspects(self) -> tuple[int, ...]:
        """Ranks of which some are wrong, where it cannot be told which."""
        return self.verdict.suspects

    @property
    def what(self) -> str:
        """What was found to differ first; where it is "gradients", every rank's state is right."""
        return self.verdict.what

    @property
    def events(self) -> list[Corrupted]:
        ranks: tuple[int | None, ...] = self.guilty or (None,)
        return [Corrupted(step=self.step, rank=rank, what=self.what, message=self.words) for rank in ranks]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks conclude from all ranks' checksums."""

    what: str
    slots: tuple[tuple[Slot, tuple[int, ...]], ...]
    """Which tensors differ, and between whom."""
    guilty: tuple[int, ...]
    suspects: tuple[int, ...]
    """Where no one is known to be guilty."""
    since: dict[int, int]
    """In which step a guilty rank's bits were found changed, where it noticed that by itself."""


def judge(rows: list[Row], groups: Mapping[Key, list[tuple[int, ...]]], changed: list[Row]) -> Verdict | None:
    """`rows`: every rank's checksums. `changed`: by rank, the step in which bits were found to have changed by themselves; 0: never."""
    differing = [
        ((what, key), ranks)
        for what in WHATS
        for key, together in groups.items()
        for ranks in together
        if len({rows[rank].get((what, key)) for rank in ranks}) > 1
    ]
    if not differing:
        return None
    guilty: set[int] = set()
    since: dict[int, int] = {}
    for slot, ranks in differing:
        said = {rank: rows[rank].get(slot) for rank in ranks}
        value, count = Counter(said.values()).most_common(1)[0]
        if 2 * count > len(ranks):
            guilty |= {rank for rank in ranks if said[rank] != value}
            continue
        own = {rank: changed[rank].get(slot, 0) for rank in ranks}
        since |= {rank: step for rank, step in own.items() if step}
        guilty |= {rank for rank, step in own.items() if step}
    open_ = [ranks for _, ranks in differing if not guilty & set(ranks)]
    suspects = sorted({rank for ranks in open_ for rank in ranks})
    slots = tuple((slot, ranks) for slot, ranks in differing if slot[0] == differing[0][0][0])
    return Verdict(differing[0][0][0], slots, () if suspects else tuple(sorted(guilty)), tuple(suspects), since)


class Agreement:
    """The comparisons of one rank."""

    def __init__(self, every: int, placed: ShardedModel, pieces: Callable[[], Mapping[str, StateTensor]]):
        """`every`: steps between two; 0: never. `pieces`: the live state."""
        self._every, self._placed, self._mesh, self._pieces = every, placed, placed.mesh, pieces
        self._all = placed.mesh.group(*AXES, use="step")
        self._first = True
        self._kept: dict[Slot, Tensor] = {}
        """Right after this rank's last update."""
        self._changed: Row = {}
        self._ended = self._cost = 0.0
        self.agreed: int | None = None
        """The newest step whose state was compared, and found the same."""

    def due(self, step: int) -> bool:
        """Whether `step` is compared before it is applied: the first one too, as the state may have come from many places."""
        return bool(self._every) and self._mesh.ranks > 1 and (self._first or step % self._every == 0)

    def forget(self) -> None:
        """The state was written by somebody else than the optimizer."""
        self._kept.clear()
        self._changed.clear()

    def compare(self, step: int, finite: Tensor, again: Callable[[], object]) -> None:
        """Before `step` is applied, its gradients being complete: raises Corruption, on all ranks, if anything differs.

        `finite`: the gradient is, on all ranks; else it is not compared, as what is no number has many spellings. `again` repeats the
        forwards and backwards of the step, all ranks together.
        """
        if not self.due(step):
            self._look(step)
            return
        self._first = False
        if not self._groups:
            return
        sums = self._sums(WHATS if finite.item() else WHATS[:2])
        for slot in self._kept.keys() & sums.keys():
            if not self._changed.get(slot) and sums[slot].item() != self._kept[slot].item():
                self._changed[slot] = step
        rows, changed = self._gather([{slot: int(value.item()) for slot, value in sums.items()}, self._changed])
        verdict = judge(rows, self._groups, changed)
        if verdict is None:
            self.agreed = step - 1
            self._changed.clear()
            return
        named = self._named(verdict)
        if verdict.what == GRADIENTS:
            self.agreed = step - 1
            if verdict.suspects:
                again()
                (later,) = self._gather([{slot: int(value.item()) for slot, value in self._sums((GRADIENTS,)).items()}])
                verdict = confirmed(verdict, rows, later)
        raise Corruption(verdict, step, self.agreed, words(verdict, step, named))

    def updated(self, step: int) -> None:
        """`step` was applied: what this rank holds now is its own work. Of two copies, one that changes later can be told by that.

        That is looked at around a comparison; on CPU weights are watched in every step, if it takes next to no time. On GPUs it would be
        many small kernels.
        """
        began, pace = time.perf_counter(), time.perf_counter() - self._ended
        self._ended = began
        self._kept.clear()
        if not self._every or self._first or not self._two:
            return
        soon = self.due(step + 1)
        light = self._mesh.device.type == "cpu" and 2 * self._cost <= _SHARE * max(pace, _STEP)
        if soon or light:
            self._keep(WEIGHTS)
            self._cost = time.perf_counter() - began
        if soon:
            self._keep(OPTIMIZER)

    def _keep(self, what: str) -> None:
        self._kept |= {slot: value for slot, value in self._sums((what,)).items() if slot[1] in self._two}

    def _look(self, step: int) -> None:
        """Between two comparisons: whether weights are still what this rank made them."""
        if self._kept:
            now = self._sums(WHATS[:1])
            for slot, value in self._kept.items():
                if slot in now and now[slot].item() != value.item():
                    self._changed.setdefault(slot, step)

    def _gather(self, rows: list[Row]) -> list[list[Row]]:
        """Each of these rows of every rank, by rank, in one message."""
        slots = [(what, key) for what in WHATS for key in self._groups]
        mine = torch.tensor([[row.get(slot, 0) for row in rows for slot in slots]], device=self._mesh.device)
        table = self._all.all_gather(mine).view(self._mesh.ranks, len(rows), len(slots)).tolist()
        return [[dict(zip(slots, of_rank[number], strict=True)) for of_rank in table] for number in range(len(rows))]

    def _sums(self, whats: Iterable[str]) -> dict[Slot, Tensor]:
        found = {slot: checksum.now() for slot, checksum in self._checksums.items() if slot[0] in whats}
        if GRADIENTS in whats:  # which lie elsewhere in every step
            found |= {slot: Checksum(tensors.values()).now() for slot, tensors in self._gradients().items()}
        return {slot: value for slot, value in found.items() if slot[1] in self._groups}

    def _gradients(self) -> dict[Slot, dict[str, Tensor]]:
        found: dict[Slot, dict[str, Tensor]] = {}
        for one in self._placed.owned:
            if one.gradient is not None and one.gradient.numel():
                split = (*one.shard.split, *(("data",) if self._placed.is_local_sgd else ()))
                found.setdefault((GRADIENTS, _key(split, one.shard)), {})[one.name] = one.gradient
        return found

    @cached_property
    def _checksums(self) -> dict[Slot, Checksum]:
        return {slot: Checksum(tensors.values()) for slot, tensors in self._tensors.items()}

    @cached_property
    def _tensors(self) -> dict[Slot, dict[str, Tensor]]:
        """The state that is compared. It never moves."""
        spots = {one.name: one.shard for one in self._placed.owned}
        biases = {f"{name}.bias" for part in self._placed.parts for name in routers(part)}
        found: dict[Slot, dict[str, Tensor]] = {}
        for name, piece in self._pieces().items():
            kind, parameter, *_ = name.split("/")
            tensor = piece.tensor
            if not isinstance(tensor, Tensor) or tensor.device != self._mesh.device or not tensor.numel():
                continue
            if piece.is_buffer and parameter not in biases:
                continue  # buffers of one's own modules may differ
            what = WEIGHTS if kind == "model" or name.endswith("/local") else OPTIMIZER
            found.setdefault((what, _key(piece.replicas.key, spots.get(parameter))), {})[name.partition("/")[2]] = tensor
        return found

    @cached_property
    def _groups(self) -> dict[Key, list[tuple[int, ...]]]:
        """Who must hold the same: the same table on all ranks, which make it at the same time."""
        mesh = self._mesh
        keys = {key for _, key in (*self._tensors, *self._gradients())}
        places = mesh.gather_objects({key: (mesh.stage, *(mesh.coordinate(axis) for axis in key)) for key in keys})
        found = {}
        for key in sorted({key for place in places for key in place}):
            ranks: dict[tuple[int, ...], list[int]] = {}
            for rank, place in enumerate(places):
                if key in place:
                    ranks.setdefault(place[key], []).append(rank)
            together = [tuple(group) for group in ranks.values() if len(group) > 1]
            if together:
                found[key] = together
        return found

    @cached_property
    def _two(self) -> set[Key]:
        """Groups in which this rank has one other."""
        return {
            key for key, together in self._groups.items() for ranks in together if self._mesh.rank in ranks and len(ranks) == 2
        }

    def _named(self, verdict: Verdict) -> list[str]:
        """The tensors that differ; all ranks find them out together."""
        mine = {slot for slot, ranks in verdict.slots if self._mesh.rank in ranks}
        tensors = self._tensors | self._gradients()
        said = {(slot, name): int(Checksum([one]).now()) for slot in mine for name, one in tensors.get(slot, {}).items()}
        of_all = self._mesh.gather_objects(said)
        found = [
            name
            for slot, ranks in verdict.slots
            for of, name in of_all[ranks[0]]
            if of == slot and len({of_all[rank].get((slot, name)) for rank in ranks}) > 1
        ]
        return list(dict.fromkeys(found))


def confirmed(verdict: Verdict, first: list[Row], second: list[Row]) -> Verdict:
    """Of gradients that differ between as many ranks: who had what a repetition of the step has."""
    guilty: set[int] = set()
    for slot, ranks in verdict.slots:
        agreed = len({second[rank][slot] for rank in ranks}) == 1
        # Where they differ again, one of them computes something else each time.
        wrong = {rank for rank in ranks if first[rank][slot] != second[ranks[0] if agreed else rank][slot]}
        if not wrong or len(wrong) == len(ranks):
            return verdict  # kernels of GPUs may differ each time
        guilty |= wrong
    return Verdict(verdict.what, verdict.slots, tuple(sorted(guilty)), (), verdict.since)


def words(verdict: Verdict, step: int, named: list[str]) -> str:
    """For a person."""
    what = {WEIGHTS: "weights", OPTIMIZER: "optimizer states", GRADIENTS: "gradients"}[verdict.what]
    ranks = sorted({rank for _, ranks in verdict.slots for rank in ranks})
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    said = f"Step {step} was not applied: the {what} on {numbers(ranks)} must be the same and are not ({', '.join(named[:_NAMED])}{more})"
    if not verdict.guilty:
        return f"{said}; which of them is wrong cannot be told from {'two' if len(ranks) == 2 else 'so few'} copies."
    one = len(verdict.guilty) == 1
    said += f": {numbers(verdict.guilty)} {'has' if one else 'have'} the wrong ones"
    if verdict.since:
        said += f"; they changed there by themselves before step {min(verdict.since.values())} was applied"
    elif verdict.what == GRADIENTS and len(ranks) == 2:
        said += "; the step was repeated, and came out as on the other"
    return f"{said}."


def numbers(ranks: Iterable[int]) -> str:
    """ "rank 3", "ranks 0 and 1", "ranks 0, 1 and 2"."""
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def _key(split: Iterable[str], spot: ParamShard | None) -> Key:
    computed = ("expert", "expert_tensor") if spot is not None and spot.expert else ("tensor",)
    return tuple(sorted({*split, *computed}))
