"""What a step's time is made of, in columns like `planning/job_table`; `planning/time` computes it."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.planning.job_table import Column


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds. The first group sums up to `step`, as a critical rank sees it: what is hidden behind computing is not in it."""

    compute: Column
    """Matrices, attention and everything memory-bound, of all micro-batches, recomputation too."""
    launch: Column
    """Waiting for the host to launch kernels, beyond what computing covers."""
    tensor: Column
    """Exposed communication of each dimension …"""
    context: Column
    expert: Column
    data: Column
    """… of replicas and shards: gradients, gathered parameters."""
    pipeline: Column
    """Between stages."""
    bubble: Column
    optimizer: Column
    offload: Column
    other: Column
    """Stragglers, data, what no equation names."""
    step: Column
    low: Column
    """P10 of the step …"""
    high: Column
    """… and P90."""

    # Of one micro-batch in the busiest stage, exposed communication inside: what a simulation of the schedule starts from.
    forward: Column
    input: Column
    """Backward to the input."""
    weight: Column
    """Backward to the weights."""
    head: Column
    """Forward and backward that the last stage has beyond the others."""
    hop: Column
    """A message between neighbouring stages."""
    tail: Column
    """After the last micro-batch: exposed gradients, optimizer, gathering."""


PARTS = ("compute", "launch", "tensor", "context", "expert", "data", "pipeline", "bubble", "optimizer", "offload", "other")
"""Those that sum up to the step."""
