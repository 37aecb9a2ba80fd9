"""Where one process stands among the others, as a plain value: `host/env` reads it off, `parallel/mesh` connects by it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One rank's address in the job."""

    rank: int = 0
    ranks: int = 1
    node: int = 0
    """Which machine of the job it is on."""
    local_rank: int = 0
    """Which of its machine's devices is its own."""
    store: tuple[str, int] | None = None
    """Host and port of the key-value store where ranks meet; None: alone, or torchrun has set torch's own variables."""
    token: str | None = field(default=None, repr=False)
    """The run's secret, for a store that an agent keeps; None: the store is torch's own."""
    holder: str | None = None
    """Folder of the process on its machine that keeps copies of the state in memory; None: there is none."""
    generation: int = 0
    """Counts rebuilt process groups; each meets under keys of its own, so stale addresses are never read."""
    copy_every: int | None = None
    """Copy the state into host memory every so many steps; None: never, unless the run file says so."""
