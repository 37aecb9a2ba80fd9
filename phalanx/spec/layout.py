"""Who computes what: the degrees of every parallelism. The product of the first five is the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.spec.fields import later, within


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Degrees of parallelism, outermost first; left out, the layout is chosen for the machine."""

    pipeline: int = field(default=1, metadata=later("pipeline parallelism") | within(1))
    """Stages that the layers are cut into."""
    data: int | None = field(default=None, metadata=within(1))
    """Replicas of the model, each with its share of the batch; left out: whatever fills the machine."""
    shard: int = field(default=1, metadata=later("sharded data parallelism") | within(1))
    """Ranks that share the state of one replica."""
    context: int = field(default=1, metadata=later("context parallelism") | within(1))
    """Ranks that share one sequence."""
    tensor: int = field(default=1, metadata=later("tensor parallelism") | within(1))
    """Ranks that share each matrix."""
    zero: int = field(default=3, metadata=later("sharded data parallelism") | within(1, 3))
    """What `shard` spreads: 1 optimizer state, 2 gradients too, 3 parameters too."""
    sequence: bool = field(default=False, metadata=later("sequence parallelism"))
    """Shard norms and residuals over the tensor group."""
    schedule: str = field(default="1f1b", metadata=later("pipeline parallelism"))
    """Order of the pipeline's micro-batches."""
    expert: int = field(default=1, metadata=later("expert parallelism") | within(1))
    """Ranks that share the experts: another view of the same ranks."""
    expert_tensor: int = field(default=1, metadata=later("expert parallelism") | within(1))
    """Ranks that share each expert's matrices."""

    @property
    def ranks(self) -> int:
        return self.pipeline * (self.data or 1) * self.shard * self.context * self.tensor

    @property
    def replicas(self) -> int:
        """How many ranks see different samples at the same time."""
        return (self.data or 1) * self.shard
