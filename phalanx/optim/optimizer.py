"""AdamW, or Muon for the matrices with AdamW for the rest, behind one step that can be refused. Driven by `training/step`.

The arithmetic is torch.optim's own. Added here: which parameter goes where, states that exist from the start, are known by
parameter name and lie where the run file says, and clipping, normalising and skipping folded into the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from phalanx.optim.adamw import AdamW, Bytes, Move, State
from phalanx.optim.muon import Muon
from phalanx.optim.offload.offloaded_adamw import Offloaded, to_file, to_host
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.owned_param import OwnedParam
from phalanx.spec.errors import RunError
from phalanx.spec.run import Memory, Precision
from phalanx.spec.run import Optimizer as OptimizerSpec

_LAYERS = ("blocks.", "mtp.")  # not the embedding and not the head, which are matrices too
_PRECISION, _MEMORY = Precision(), Memory()


class Optimizer:
    """The optimizer of one rank's parameters."""

    def __init__(
        self,
        held: Sequence[OwnedParam],
        spec: OptimizerSpec,
        *,
        precision: Precision = _PRECISION,
        memory: Memory = _MEMORY,
        mesh: Mesh | None = None,
        folder: Path | None = None,
    ):
        """`folder`: for states in files, where the run file names none. Ranks of one job make theirs at the same time."""
        if refused := refusal(spec, memory):
            raise RunError([refused])
        self._held, self._spec = list(held), spec
        assert all(one.value.dtype == torch.float32 for one in held), "held values are master weights"
        kept = torch.bfloat16 if precision.optimizer == "bf16" else torch.float32
        by_muon = [one for one in held if spec.name == "muon" and _is_muons(one)]
        names = {one.name for one in by_muon}
        self._muon = Muon(by_muon, spec, mesh, kept) if by_muon else None
        rest = [one for one in held if one.name not in names]
        self._adamw: AdamW | Offloaded
        if memory.offload == "cpu":
            self._adamw = to_host(rest, spec, kept)
        elif memory.offload == "nvme":
            place = Path(memory.offload_path).expanduser() if memory.offload_path else folder
            assert place is not None and mesh is not None, "states in files need a folder and a rank"
            self._adamw = to_file(rest, spec, kept, memory, mesh, place)
        else:
            self._adamw = AdamW(rest, spec, kept)

    def step(self, learning_rate: float, divisor: Tensor, bad: Tensor) -> None:
        """Step with every gradient divided by `divisor`; if `bad` is 1, change nothing at all.

        Both are fp32 scalars on the device: there AdamW's fused kernel divides and refuses by itself, without asking the host.
        """
        move = Move(self._spec, learning_rate, divisor, bad)
        self._adamw.step(move)
        if self._muon is not None:
            self._muon.step(move)

    def adopt(self) -> None:
        """Values were changed by somebody else, from a checkpoint or by the outer optimizer: master weights elsewhere follow."""
        if isinstance(self._adamw, Offloaded):
            self._adamw.adopt()

    def state(self) -> dict[str, State]:
        """Every state by "parameter name/state name". They are the live ones: writing into them restores."""
        found = self._adamw.state() | (self._muon.state() if self._muon else {})
        place = {one.name: number for number, one in enumerate(self._held)}
        return dict(sorted(found.items(), key=lambda pair: place[pair[0].rpartition("/")[0]]))

    def bytes(self) -> Bytes:
        """Where the states lie, in bytes; single numbers are not counted."""
        return self._adamw.bytes() + (self._muon.bytes() if self._muon else Bytes())

    @property
    def applied(self) -> str:
        """What was made, read off the tensors and files."""
        return f"AdamW: {self._adamw.applied}" + (f"; Muon: {self._muon.applied}" if self._muon else "")

    def close(self) -> None:
        """Let go of files. The states are gone with them."""
        if isinstance(self._adamw, Offloaded):
            self._adamw.close()


def refusal(spec: OptimizerSpec, memory: Memory) -> str | None:
    """Why these settings cannot be had together, in one sentence; None where they can."""
    if spec.name == "muon" and memory.offloads:
        return (
            f'optimizer.name = "muon" and memory.offload = "{memory.offload}" do not go together: Newton–Schulz iterations '
            'belong on the device; take optimizer.name = "adamw", or memory.offload = "none".'
        )
    return None


def _is_muons(one: OwnedParam) -> bool:
    """Decided on the whole parameter, never on a rank's part. Experts are stacked in three dimensions, of which Muon knows nothing."""
    return len(one.shard.slice.whole) == 2 and one.name.startswith(_LAYERS)
