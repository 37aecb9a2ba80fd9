"""The degrees of every parallelism. The product of the first five is the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from phalanx.spec.fields import current_keys, within

Schedule = Literal["gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble", "zbv", "dualpipev"]
"""The named pipeline schedules; `schedules/makers` builds them."""
SavedLayout: TypeAlias = Mapping[str, int | str | bool | None]
"""The fields of a Layout as a file of this or an earlier version has them."""
FIXED_STAGES = {"gpipe": 1, "1f1b": 1, "zbv": 2, "dualpipev": 2}
"""Schedules with a fixed number of stages per rank. The others take any number, and 2 by default."""


def default_stages(schedule: str) -> int:
    """Stages per rank of a named schedule where `layout.stages` is not given."""
    return FIXED_STAGES.get(schedule, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Degrees of parallelism, outermost first. Default: chosen for the machine."""

    pipeline: int = field(default=1, metadata=within(1))
    """Pipeline parallel ranks; the layers are divided among them in stages."""
    data: int | None = field(default=None, metadata=within(1))
    """Replicas of the model, each with its share of the batch (DDP). Default: as many as fill the machine."""
    shard: int = field(default=1, metadata=within(1))
    """Ranks that shard the state of one replica (FSDP, ZeRO), each with its own share of the batch."""
    context: int = field(default=1, metadata=within(1))
    """Context parallel ranks, which divide each sequence."""
    tensor: int = field(default=1, metadata=within(1))
    """Tensor parallel ranks, which divide each matrix."""
    zero: int = field(default=3, metadata=within(1, 3))
    """What `shard` shards: 1: optimizer states; 2: also gradients; 3: also parameters."""
    sequence: bool = False
    """Sequence parallelism: norms and residuals are divided over the tensor parallel group along the sequence."""
    context_method: Literal["ring", "gather", "ulysses"] = "ring"
    """How `context` ranks exchange keys and values: ring attention, all-gather, or all-to-all over heads (Ulysses)."""
    schedule: Schedule = "1f1b"
    """Pipeline schedule; `phalanx schedule NAME` shows it."""
    schedule_file: str | None = None
    """A custom pipeline schedule, in the format of `phalanx schedule NAME --csv FILE`."""
    stages: int | None = field(default=None, metadata=within(1))
    """Pipeline stages per rank. Default: 1 for gpipe and 1f1b, 2 for the others."""
    stage_split: Literal["counted", "measured"] = "counted"
    """How blocks are divided among stages: balanced by counted operations of blocks, embedding and head, or by their time on this device, measured at each start."""
    expert: int = field(default=1, metadata=within(1))
    """Expert parallel ranks, which divide the experts; they regroup the ranks of a pipeline stage."""
    expert_tensor: int = field(default=1, metadata=within(1))
    """Ranks that divide each expert's matrices."""

    @staticmethod
    def from_saved(table: SavedLayout) -> Layout:
        """The layout in a plan or a checkpoint, of this or an earlier version."""
        return Layout(**current_keys("layout", table))

    @property
    def ranks(self) -> int:
        return self.pipeline * (self.data or 1) * self.shard * self.context * self.tensor

    @property
    def replicas(self) -> int:
        """Number of rank groups that process different samples at the same time."""
        return (self.data or 1) * self.shard

    @property
    def stages_per_rank(self) -> int:
        """Pipeline stages on each rank."""
        return self.stages or default_stages(self.schedule)

    @property
    def expert_data(self) -> int:
        """Ranks of one pipeline stage that hold the same part of the experts."""
        return self.ranks // self.pipeline // (self.expert * self.expert_tensor)

    @property
    def expert_shard(self) -> int:
        """Ranks that shard the state of the experts, as `shard` does for everything else."""
        return math.gcd(self.shard, self.expert_data)
