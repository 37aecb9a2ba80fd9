"""Who computes what: the degrees of every parallelism. The product of the first five is the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from phalanx.spec.fields import current_keys, within

Schedule = Literal["gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble", "zbv", "dualpipev"]
"""The named pipeline schedules; `schedules/makers` builds them."""
FIXED_STAGES = {"gpipe": 1, "1f1b": 1, "zbv": 2, "dualpipev": 2}
"""Schedules with a fixed number of stages per rank. The others take any number, and 2 by default."""


def default_stages(schedule: str) -> int:
    """Stages per rank of a named schedule where `layout.stages` is not given."""
    return FIXED_STAGES.get(schedule, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Degrees of parallelism, outermost first; left out, the layout is chosen for the machine."""

    pipeline: int = field(default=1, metadata=within(1))
    """Ranks that the layers are dealt to, in stages."""
    data: int | None = field(default=None, metadata=within(1))
    """Replicas of the model, each with its share of the batch; left out: whatever fills the machine."""
    shard: int = field(default=1, metadata=within(1))
    """Ranks that share the state of one replica, each with its own share of the batch."""
    context: int = field(default=1, metadata=within(1))
    """Ranks that share one sequence."""
    tensor: int = field(default=1, metadata=within(1))
    """Ranks that share each matrix."""
    zero: int = field(default=3, metadata=within(1, 3))
    """What `shard` spreads: 1 optimizer state, 2 gradients too, 3 parameters too."""
    sequence: bool = False
    """Norms and residuals are shared over the tensor group, by sequence."""
    context_method: Literal["ring", "gather", "ulysses"] = "ring"
    """How `context` ranks attend to each other's keys: passed round a ring, gathered, or traded for heads."""
    schedule: Schedule = "1f1b"
    """Order of the pipeline's micro-batches; `phalanx schedule NAME` shows one."""
    schedule_file: str | None = None
    """A schedule of your own instead, as `phalanx schedule NAME --csv FILE` writes it."""
    stages: int | None = field(default=None, metadata=within(1))
    """Stages of each pipeline rank; left out: 1 for gpipe and 1f1b, 2 for the others."""
    stage_split: Literal["counted", "measured"] = "counted"
    """How stages get their blocks, so that none keeps the others waiting: by the operations of blocks, embedding and head, or by what these take on this device, timed at each start."""
    expert: int = field(default=1, metadata=within(1))
    """Ranks that share the experts: another view of the same ranks."""
    expert_tensor: int = field(default=1, metadata=within(1))
    """Ranks that share each expert's matrices."""

    @staticmethod
    def from_saved(table: Mapping[str, Any]) -> Layout:
        """The layout in a plan or a checkpoint, of this or an earlier version."""
        return Layout(**current_keys("layout", table))

    @property
    def ranks(self) -> int:
        return self.pipeline * (self.data or 1) * self.shard * self.context * self.tensor

    @property
    def replicas(self) -> int:
        """How many groups of ranks see different samples at the same time."""
        return (self.data or 1) * self.shard

    @property
    def stages_per_rank(self) -> int:
        """Pipeline stages on each rank."""
        return self.stages or default_stages(self.schedule)

    @property
    def expert_data(self) -> int:
        """Ranks of one pipeline stage that hold the same experts."""
        return self.ranks // self.pipeline // (self.expert * self.expert_tensor)

    @property
    def expert_shard(self) -> int:
        """How many of those share the experts' state, as `shard` shares that of everything else."""
        return math.gcd(self.shard, self.expert_data)
