"""Detects silent corruption: a hook that compares, before a step is applied, what several ranks must hold alike.

Every few steps each rank sends one checksum per group of tensors: parameters, optimizer states, complete gradients. All ranks see all
checksums and come to the same verdict. Of three copies, the one that differs is wrong. Of two, the one whose bits have changed since its
rank last wrote them, if that is known; of two gradients, the one that a repetition of the step does not confirm.

Not compared: offloaded states, the lower-precision copies that ZeRO distributes, and ranks along "tensor" with each other, as each
computes its copy of what they share, and GPU kernels may differ in the last bit.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from phalanx import accelerator
from phalanx.checkpointing.state_tensor import StateTensor
from phalanx.events.records import Corrupted
from phalanx.models.moe import routers
from phalanx.parallel.mesh import AXES
from phalanx.parallel.sharded_model import ParamShard, ShardedModel
from phalanx.training.hooks import StepContext, StepHook, StepRefused
from phalanx.transforms.quantize import QuantizedTensor

WEIGHTS, OPTIMIZER, GRADIENTS = KINDS = ("weights", "optimizer", "gradients")

_MAX_SHARE, _MIN_STEP_SECONDS = 0.001, 0.2
"""Watching weights between comparisons may take this share of a step, which counts as this long if it is shorter."""
_MAX_NAMES = 3
"""Tensors that a message names."""

Key = tuple[str, ...]
"""Mesh axes along which tensors of a group differ: ranks of a stage with the same coordinates there hold the same."""
Slot = tuple[str, Key]
"""One of KINDS, and a group of its tensors."""
Row = dict[Slot, int]
"""One rank's numbers, by slot."""


class Corruption(StepRefused):
    """Ranks that must hold the same values do not. The step was applied on no rank."""

    def __init__(self, verdict: Verdict, step: int, last_agreed: int | None, names: list[str]):
        """`names`: tensors that differ."""
        super().__init__(verdict, step, last_agreed, names)  # so that it can be pickled
        self.verdict, self.step, self.last_agreed, self._message = verdict, step, last_agreed, describe(verdict, step, names)
        ranks: tuple[int | None, ...] = verdict.guilty or (None,)
        self.events = [Corrupted(step=step, rank=rank, what=verdict.what, message=self._message) for rank in ranks]

    @property
    def last_valid(self) -> int | None:
        """The newest step whose state is right on every rank that is not guilty; None: the one that was restored.

        Gradients of a rank with wrong weights reach everybody in the next update. So if it is unknown when the values of the guilty became
        wrong, only the state that was last found equal is right.
        """
        guilty, since = self.verdict.guilty, self.verdict.since
        if self.verdict.what == GRADIENTS:
            return self.step - 1
        return min(since[rank] for rank in guilty) - 1 if guilty and since.keys() >= {*guilty} else self.last_agreed

    def __str__(self) -> str:
        return self._message


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks conclude from all checksums."""

    what: str
    """The first of KINDS that differs. If it is "gradients", the state of every rank is right."""
    slots: tuple[tuple[Slot, tuple[int, ...]], ...]
    """The groups of tensors that differ, and the ranks that hold them."""
    guilty: tuple[int, ...]
    """Ranks whose state or gradient is known to be wrong; that of all other ranks is right. Empty if it cannot be decided."""
    suspects: tuple[int, ...]
    """Ranks of which some are wrong, where it cannot be decided which."""
    since: dict[int, int]
    """The step in which a guilty rank noticed changed bits by itself, where it did."""


def judge(rows: list[Row], groups: Mapping[Key, list[tuple[int, ...]]], changed: list[Row]) -> Verdict | None:
    """`rows`: checksums by rank. `changed`: by rank, the step in which bits were found changed without an update; 0 if never."""
    differing = [
        ((kind, key), ranks)
        for kind in KINDS
        for key, replicas in groups.items()
        for ranks in replicas
        if len({rows[rank].get((kind, key)) for rank in ranks}) > 1
    ]
    if not differing:
        return None
    guilty: set[int] = set()
    since: dict[int, int] = {}
    for slot, ranks in differing:
        checksums = {rank: rows[rank].get(slot) for rank in ranks}
        majority, count = Counter(checksums.values()).most_common(1)[0]
        if 2 * count > len(ranks):
            guilty |= {rank for rank in ranks if checksums[rank] != majority}
            continue
        noticed = {rank: step for rank in ranks if (step := changed[rank].get(slot, 0))}
        since |= noticed
        guilty |= noticed.keys()
    undecided = [ranks for _, ranks in differing if not guilty & set(ranks)]
    suspects = sorted({rank for ranks in undecided for rank in ranks})
    what = differing[0][0][0]
    slots = tuple((slot, ranks) for slot, ranks in differing if slot[0] == what)
    return Verdict(what, slots, () if suspects else tuple(sorted(guilty)), tuple(suspects), since)


class ReplicaCheck(StepHook):
    """The comparisons of one rank."""

    def __init__(self, every: int, model: ShardedModel, state: Callable[[], Mapping[str, StateTensor]]):
        """`every`: steps between two comparisons; 0: never. `state`: the live tensors."""
        self._every, self._model, self._mesh, self._state = every, model, model.mesh, state
        self._group = model.mesh.group(*AXES, use="step")
        self._is_first = True
        self._own_sums: dict[Slot, Tensor] = {}
        """Checksums right after this rank's last update."""
        self._changed: Row = {}
        self._last_update = self._cost = 0.0
        self.last_agreed: int | None = None
        """The newest step whose state was compared and found equal."""

    def due(self, step: int) -> bool:
        """Whether to compare before `step` is applied. The first step is always compared: its state may come from several sources."""
        return bool(self._every) and self._mesh.ranks > 1 and (self._is_first or step % self._every == 0)

    def on_state_replaced(self) -> None:
        self._own_sums.clear()
        self._changed.clear()

    def on_roll_forward(self) -> None:
        self._every = 0
        self._own_sums.clear()

    def before_update(self, context: StepContext) -> None:
        """Raises Corruption on all ranks if anything differs. Gradients that are not finite are not compared: NaN has many bit patterns."""
        step = context.number
        if not self.due(step):
            if self._own_sums:  # are the weights still what this rank wrote?
                self._note_changes(self._checksums((WEIGHTS,)), step)
            return
        self._is_first = False
        if not self._groups:
            return
        assert context.finite is not None
        sums = self._checksums(KINDS if context.finite.item() else KINDS[:2])
        self._note_changes(sums, step)
        rows, changed = self._gather([_row(sums), self._changed])
        verdict = judge(rows, self._groups, changed)
        if verdict is None:
            self.last_agreed = step - 1
            self._changed.clear()
            return
        names = self._differing_names(verdict)
        if verdict.what == GRADIENTS:
            self.last_agreed = step - 1
            if verdict.suspects:
                context.repeat()
                (repeated,) = self._gather([_row(self._checksums((GRADIENTS,)))])
                verdict = confirm(verdict, rows, repeated)
        raise Corruption(verdict, step, self.last_agreed, names)

    def after_update(self, step: int) -> None:
        """Keeps checksums of what this rank has just written. Of two copies, the one that changes later is then known to be wrong.

        This is done around a comparison; on CPUs, weights are watched in every step if that takes almost no time. On GPUs it would
        launch many small kernels.
        """
        began, interval = time.perf_counter(), time.perf_counter() - self._last_update
        self._last_update = began
        self._own_sums.clear()
        if not self._every or self._is_first or not self._pair_keys:
            return
        compares_next = self.due(step + 1)
        on_host = not accelerator.of(self._mesh.device).asynchronous
        is_cheap = on_host and 2 * self._cost <= _MAX_SHARE * max(interval, _MIN_STEP_SECONDS)
        if compares_next or is_cheap:
            self._remember(WEIGHTS)
            self._cost = time.perf_counter() - began
        if compares_next:
            self._remember(OPTIMIZER)

    def _remember(self, kind: str) -> None:
        self._own_sums |= {slot: value for slot, value in self._checksums((kind,)).items() if slot[1] in self._pair_keys}

    def _note_changes(self, sums: dict[Slot, Tensor], step: int) -> None:
        for slot in self._own_sums.keys() & sums.keys():
            if sums[slot].item() != self._own_sums[slot].item():
                self._changed.setdefault(slot, step)

    def _gather(self, rows: list[Row]) -> list[list[Row]]:
        """These rows of every rank, by row and rank, in one message."""
        slots = [(kind, key) for kind in KINDS for key in self._groups]
        own = torch.tensor([[row.get(slot, 0) for row in rows for slot in slots]], device=self._mesh.device)
        table = self._group.all_gather(own).view(self._mesh.ranks, len(rows), len(slots)).tolist()
        return [[dict(zip(slots, of_rank[number], strict=True)) for of_rank in table] for number in range(len(rows))]

    def _checksums(self, kinds: Iterable[str]) -> dict[Slot, Tensor]:
        sums = {slot: checksum.now() for slot, checksum in self._state_checksums.items() if slot[0] in kinds}
        if GRADIENTS in kinds:  # their memory changes from step to step
            sums |= {slot: Checksum(tensors.values()).now() for slot, tensors in self._gradients().items()}
        return {slot: value for slot, value in sums.items() if slot[1] in self._groups}

    def _gradients(self) -> dict[Slot, dict[str, Tensor]]:
        slots: dict[Slot, dict[str, Tensor]] = {}
        for param in self._model.owned:
            if param.gradient is not None and param.gradient.numel():
                split = (*param.shard.split, *(("data",) if self._model.is_local_sgd else ()))
                slots.setdefault((GRADIENTS, _key(split, param.shard)), {})[param.name] = param.gradient
        return slots

    @cached_property
    def _state_checksums(self) -> dict[Slot, Checksum]:
        return {slot: Checksum(tensors.values()) for slot, tensors in self._tensors.items()}

    @cached_property
    def _tensors(self) -> dict[Slot, dict[str, Tensor]]:
        """The states that are compared. Their memory never changes."""
        shards = {param.name: param.shard for param in self._model.owned}
        biases = {f"{name}.bias" for part in self._model.parts for name in routers(part)}
        slots: dict[Slot, dict[str, Tensor]] = {}
        for name, state in self._state().items():
            collection, parameter, *_ = name.split("/")
            tensor = state.tensor.stored if isinstance(state.tensor, QuantizedTensor) else state.tensor
            if not isinstance(tensor, Tensor) or tensor.device != self._mesh.device or not tensor.numel():
                continue
            if state.is_buffer and parameter not in biases:
                continue  # buffers of custom modules may differ
            kind = WEIGHTS if collection == "model" or name.endswith("/local") else OPTIMIZER
            key = _key(state.replicas.key, shards.get(parameter))
            slots.setdefault((kind, key), {})[name.partition("/")[2]] = tensor
        return slots

    @cached_property
    def _groups(self) -> dict[Key, list[tuple[int, ...]]]:
        """The ranks that must hold the same, by key: the same table on all ranks, which compute it at the same time."""
        mesh = self._mesh
        keys = {key for _, key in (*self._tensors, *self._gradients())}
        coordinates = mesh.gather_objects({key: (mesh.stage, *(mesh.coordinate(axis) for axis in key)) for key in keys})
        ranks: dict[Key, dict[tuple[int, ...], list[int]]] = {}
        for rank, of_rank in enumerate(coordinates):
            for key, coordinate in of_rank.items():
                ranks.setdefault(key, {}).setdefault(coordinate, []).append(rank)
        groups = {key: [tuple(group) for group in ranks[key].values() if len(group) > 1] for key in sorted(ranks)}
        return {key: replicas for key, replicas in groups.items() if replicas}

    @cached_property
    def _pair_keys(self) -> set[Key]:
        """Keys of which exactly one other rank has a copy."""
        rank = self._mesh.rank
        return {key for key, replicas in self._groups.items() for ranks in replicas if rank in ranks and len(ranks) == 2}

    def _differing_names(self, verdict: Verdict) -> list[str]:
        """The tensors that differ; all ranks find them together."""
        own_slots = {slot for slot, ranks in verdict.slots if self._mesh.rank in ranks}
        tensors = self._tensors | self._gradients()
        own = {
            (slot, name): int(Checksum([tensor]).now()) for slot in own_slots for name, tensor in tensors.get(slot, {}).items()
        }
        by_rank = self._mesh.gather_objects(own)
        names = [
            name
            for slot, ranks in verdict.slots
            for tensor_slot, name in by_rank[ranks[0]]
            if tensor_slot == slot and len({by_rank[rank].get((slot, name)) for rank in ranks}) > 1
        ]
        return list(dict.fromkeys(names))


def confirm(verdict: Verdict, first: list[Row], repeated: list[Row]) -> Verdict:
    """Of gradients without a majority: those that a repetition of the step does not confirm are wrong."""
    guilty: set[int] = set()
    for slot, ranks in verdict.slots:
        agree_now = len({repeated[rank][slot] for rank in ranks}) == 1
        # If they differ again, one of them computes something different each time.
        wrong = {rank for rank in ranks if first[rank][slot] != repeated[ranks[0] if agree_now else rank][slot]}
        if not wrong or len(wrong) == len(ranks):
            return verdict  # GPU kernels may differ each time
        guilty |= wrong
    return replace(verdict, guilty=tuple(sorted(guilty)), suspects=())


def describe(verdict: Verdict, step: int, names: list[str]) -> str:
    """The message of a Corruption."""
    what = "optimizer states" if verdict.what == OPTIMIZER else verdict.what
    ranks = sorted({rank for _, ranks in verdict.slots for rank in ranks})
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    differ = f"Step {step} was not applied: the {what} on {rank_list(ranks)} must be equal but differ"
    message = f"{differ} ({', '.join(names[:_MAX_NAMES])}{more})"
    if not verdict.guilty:
        return f"{message}; {'two' if len(ranks) == 2 else 'so few'} copies cannot show which of them is wrong."
    message += f": {rank_list(verdict.guilty)} {'has' if len(verdict.guilty) == 1 else 'have'} the wrong ones"
    if verdict.since:
        message += f"; their bits changed without an update before step {min(verdict.since.values())} was applied"
    elif verdict.what == GRADIENTS and len(ranks) == 2:
        message += "; a repetition of the step confirmed the other rank's"
    return f"{message}."


def rank_list(ranks: Iterable[int]) -> str:
    """ "rank 3", "ranks 0 and 1", "ranks 0, 1 and 2"."""
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def _row(sums: dict[Slot, Tensor]) -> Row:
    return {slot: int(value.item()) for slot, value in sums.items()}


def _key(split: Iterable[str], shard: ParamShard | None) -> Key:
    computed = ("expert", "expert_tensor") if shard is not None and shard.expert else ("tensor",)
    return tuple(sorted({*split, *computed}))


_COLUMNS = 256
_SEED = 20_011  # any number, the same on all ranks


class Checksum:
    """One int64 number for the bits of many tensors, computed where they are, at the speed of reading them once.

    Bits are summed as 64-bit integers in 256 columns, and every column of every tensor has an odd weight. So one changed bit always
    changes the checksum, and so do values that change places, except by whole rows. Ranks that hold the same tensors in the same
    order get the same number.
    """

    def __init__(self, tensors: Iterable[Tensor]):
        """The tensors' memory must not change later."""
        self._whole: list[Tensor] = []
        self._rest: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            flat = tensor.detach().reshape(-1)
            row = max(8 // flat.element_size(), 1) * _COLUMNS
            whole = flat.numel() // row * row
            if whole:
                self._whole.append(flat[:whole])
            if whole < flat.numel():
                self._rest.setdefault(flat.dtype, []).append(flat[whole:])
        for dtype, parts in self._rest.items():
            missing = -sum(part.numel() for part in parts) % max(8 // dtype.itemsize, 1)
            parts.append(torch.zeros(missing, dtype=dtype, device=parts[0].device))

    @torch.no_grad()
    def now(self) -> Tensor:
        """The present checksum, on the tensors' device. Overflow wraps around."""
        terms = []
        if self._whole:
            terms.append(torch.stack([_rows(flat).sum(0) for flat in self._whole]))
        terms += [torch.cat(parts).view(torch.int64) for parts in self._rest.values()]
        if not terms:
            return torch.zeros((), dtype=torch.int64)
        return torch.stack([(term * _odd_weights(tuple(term.shape), term.device)).sum() for term in terms]).sum()


def _rows(flat: Tensor) -> Tensor:
    """A view as int64 needs aligned memory, so unaligned tensors are copied."""
    is_aligned = flat.storage_offset() * flat.element_size() % 8 == 0
    return (flat if is_aligned else flat.clone()).view(torch.int64).view(-1, _COLUMNS)


@lru_cache(maxsize=64)
def _odd_weights(shape: tuple[int, ...], device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(_SEED)
    return (torch.randint(-(1 << 62), 1 << 62, shape, generator=generator) | 1).to(device)
