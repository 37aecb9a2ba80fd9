"""What the controller looks for while nothing has been reported: ranks that hang, connections that broke, a recovery's first step,
a stop that takes too long. Never loads torch."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from phalanx.checkpointing.replicas import replica_index
from phalanx.control.exit_cause import RESUMABLE, ended
from phalanx.control.generation import Generation, Message
from phalanx.control.hang_detector import Hangs
from phalanx.control.recover import Recovery
from phalanx.events.records import Recovered, Stopped
from phalanx.recovery.state import Corrupt, Disconnected, WorkerDied

if TYPE_CHECKING:
    from phalanx.control.controller import Controller

_NOBODY = 0.7  # seconds after which a lost connection is nobody's death
_NOTICE = 0.25  # of the notice: then ranks that have not come to a save are halted


class Overseer:
    """Of one controller."""

    def __init__(self, controller: Controller):
        self._c = controller
        self._broken: float | None = None
        self.hangs = Hangs(controller)

    def died(self, rank: int, message: Message) -> WorkerDied:
        """A worker's end as the policy reads it."""
        current, failure = self._c.generation, message["failure"]
        step = current.step if current is not None else None
        if failure is not None:
            cause = failure.get("cause", "failed")
            reason = failure["reason"] if cause == "hung" else f"rank {rank}: {failure['reason']}"
            return WorkerDied(rank, step, cause, reason, traceback=failure["traceback"], final=failure.get("expected", False))
        reason, words = ended(self._c.agent.rundir, rank, message["code"])
        return WorkerDied(rank, step, "died", f"rank {rank}: {reason}", traceback=words)

    async def look(self) -> None:
        current = self._c.generation
        if current is None:
            return
        self.recovered(current)
        self._lost_connections(current)
        self._corrupt(current)
        await self._stopping(current)
        if not self._c.troubles:
            await self.hangs.look(current)

    def recovered(self, current: Generation) -> None:
        """Write it down, once the first step is done; or the end, where only that was left to do."""
        record, c = self._c.recovering, self._c
        if record is None:
            if not c.begun and current.number == 0 and current.restored:
                c.begun = min(current.restored.values())
            return
        if record.restarted is None and len(current.restored) == current.ranks:
            record.restarted = time.time()
        if record.restarted is None or not (current.stepped or current.complete):
            return
        first, step = min(current.stepped.values(), default=time.time()), min(current.restored.values())
        source = "beginning" if record.source == "disk" and step == 0 else record.source
        c.agent.emit(
            Recovered(
                failures=record.failures,
                action=record.action,
                generation=current.number,
                ranks=current.ranks,
                layout=asdict(current.plan.layout),
                source=source,
                step=step,
                steps_lost=max(0, (record.before or 0) - step),
                noticed=record.noticed,
                decided=record.decided,
                restarted=record.restarted,
                first_step=first,
                seconds=first - record.noticed,
            )
        )
        c.recovering = None
        c.agent.spawn(self.forget(current.number))
        # There may be room for more than the run came back with.
        free = {node for node, member in c.members.items() if current.assignment.count(node) < member.slots}
        if current.plan.layout != c.wanted:
            c.joined |= free | c.returned
        c.returned.clear()

    async def forget(self, generation: int) -> None:
        """What was handed over has been taken; copies go when there are newer ones."""
        if self._c.copies is None:
            holders = [member.holder for member in self._c.members.values()]
            await asyncio.to_thread(replica_index.discard, holders, self._c.agent.token, generation)

    def _lost_connections(self, current: Generation) -> None:
        """Ranks say that another went away, and nobody has: a connection broke."""
        if not current.broken:
            self._broken = None
            return
        now = time.monotonic()
        self._broken = self._broken or now
        if now - self._broken > _NOBODY:
            self._broken = None
            rank, reason = next(iter(current.broken.items()))
            words = f"rank {rank} lost its connection to another, and nobody has died: {reason.splitlines()[0]}"
            self._c.troubles.append(Disconnected(current.step, words))

    def _corrupt(self, current: Generation) -> None:
        found = current.corruption
        if found is None or current.judged:
            return
        current.judged = True
        if not current.guilty and current.told_apart:
            self._c.troubles.append(Disconnected(current.step, found["reason"]))  # the same ranks take the step again
        unknown: list[int | None] = [] if current.told_apart else [None]
        for rank in current.guilty or unknown:
            self._c.troubles.append(Corrupt(rank, current.step, found["reason"]))

    async def _stopping(self, current: Generation) -> None:
        """Told to stop, ranks end by themselves at the next step. One that takes too long is not waited for."""
        c = self._c
        if c.stop_asked is None or c.saving or current.ended:
            return
        if time.monotonic() - c.stop_asked < _NOTICE * c.settings.preemption_notice:
            return
        phases = {beat[2] for _, beat in current.beats.values()}
        if phases and phases <= {"saving", "ending"}:
            return
        c.saving = True
        if current.untouched:
            step = max(current.restored.values(), default=0)
            c.agent.emit(Stopped(step=step, reason=c.agent.stopping or "asked to stop"))
            c.end(RESUMABLE)
        else:
            await Recovery(c, save=True).run()
