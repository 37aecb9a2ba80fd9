"""Failures as the controller reports them to the policy."""

from __future__ import annotations

from phalanx.recovery.state import Failure


def worker_died(rank: int, step: int | None, cause: str = "died", reason: str = "it was killed") -> Failure:
    return Failure(cause, rank, step, reason)


def node_lost(node: int, step: int | None, reason: str = "") -> Failure:
    return Failure("node lost", None, step, reason or f"node {node} is gone", node)


def disconnected(step: int | None, reason: str = "connections broke, but no process died") -> Failure:
    return Failure("connection lost", None, step, reason)


def corrupt(rank: int | None, step: int | None) -> Failure:
    return Failure("corrupt", rank, step, "it holds other numbers than its replicas")
