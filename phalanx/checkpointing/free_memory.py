"""How much memory this machine, or the container around this process, still has. Asked before a copy of the state is made."""

from __future__ import annotations

import sys
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def free_memory() -> int:
    """Bytes that can be had without anything being put out for them."""
    with open("/proc/meminfo") as lines:
        found = (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        return max(0, min(next(found, sys.maxsize), _allowed(_CGROUP)))


def _allowed(group: Path) -> int:
    """Bytes that this container may still take: files that are only cached would make room."""
    try:
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # "max", or no such limits here
        return sys.maxsize
    return limit - used + int(cached.get("inactive_file", 0)) + int(cached.get("active_file", 0))
