"""What the controller looks for while nothing has been reported: ranks that hang, connections that broke, a recovery's first step,
a stop that takes too long. Never loads torch."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from phalanx.checkpointing.replicas import replica_index
from phalanx.control.protocol import RESUMABLE, describe_exit
from phalanx.control.recover import Recovery
from phalanx.control.state import Generation, Message
from phalanx.events.heartbeat import Beat
from phalanx.events.records import Recovered, Stopped, Straggling, Warned
from phalanx.recovery.diagnose import Diagnosis, Report, diagnose
from phalanx.recovery.state import Corrupt, Disconnected, WorkerDied
from phalanx.recovery.stragglers import ProgressTimeouts, Stragglers

if TYPE_CHECKING:
    from phalanx.control.controller import Controller


_NOBODY = 0.7  # seconds after which a lost connection is nobody's death
_NOTICE = 0.25  # of the notice: then ranks that have not come to a save are halted


class Watchdog:
    """Of one controller."""

    def __init__(self, controller: Controller):
        self._c = controller
        self._broken: float | None = None
        self.hangs = HangDetector(controller)

    def died(self, rank: int, message: Message) -> WorkerDied:
        """A worker's end as the policy reads it."""
        current, failure = self._c.generation, message["failure"]
        step = current.step if current is not None else None
        if failure is not None:
            cause = failure.get("cause", "failed")
            reason = failure["reason"] if cause == "hung" else f"rank {rank}: {failure['reason']}"
            return WorkerDied(rank, step, cause, reason, traceback=failure["traceback"], final=failure.get("expected", False))
        reason, words = describe_exit(self._c.agent.rundir, rank, message["code"])
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


_ANSWER = 1.0  # seconds in which a rank says where it is
_COMPILING = 180.0  # seconds: a batch of another shape may have to be compiled for, in any step
_TOGETHER = 90.0  # seconds in which the ranks of a generation join each other: new ones may have to load first
_INSPECT = 1.5  # seconds in which its node looks at one that does not


class HangDetector:
    """Of one controller."""

    def __init__(self, controller: Controller):
        self._c = controller
        self._usual = ProgressTimeouts(controller.settings.timeout)
        self._stragglers: Stragglers | None = None
        self._generation = -1
        self._counted = 0
        self._question = 0
        self._answers: dict[int, Message] = {}
        self._spared: dict[int, float] = {}

    def hear(self, message: Message) -> None:
        """An answer of a rank, or of its node about it."""
        self._answers[message["rank"]] = self._answers.get(message["rank"], {}) | message

    async def look(self, current: Generation) -> None:
        if self._c.stands_still:
            return
        if current.number != self._generation:
            self._begin(current)
        beats = {rank: _beat(heard, beat) for rank, (heard, beat) in current.beats.items() if rank in current.living}
        for rank, beat in beats.items():
            self._usual.see(rank, beat)
        self._slow(current, beats)
        now = time.monotonic()
        for rank, beat in beats.items():
            silent = now - max(beat.since, self._c.awake)
            if rank not in current.ended and silent > self._patience(rank, beat.phase):
                await self._suspect(current, beats, rank, silent)
                return

    def _begin(self, current: Generation) -> None:
        self._generation, self._counted = current.number, 0
        if self._c.run.memory.compile:
            self._usual.begin()  # its first step compiles again
        each = current.ranks // current.plan.layout.pipeline
        self._stragglers = Stragglers(self._c.settings.straggler, {rank: rank // each for rank in range(current.ranks)})
        self._spared.clear()

    def _patience(self, rank: int, phase: str) -> float:
        if phase == "starting":
            return min(_TOGETHER, self._c.settings.timeout)
        floor = max(self._c.settings.hang, _COMPILING if self._c.run.memory.compile else 0.0)
        return max(self._usual.patience(phase, floor), self._spared.get(rank, 0.0))

    async def _suspect(self, current: Generation, beats: dict[int, Beat], rank: int, silent: float) -> None:
        """Ask everybody, and act on what comes out."""
        await self._ask(current, current.living)
        if self._c.troubles or self._c.generation is not current or not current.living:
            return  # somebody died meanwhile: that is what it was
        found = self._diagnosed(current, beats)
        if any(beat.step != current.beats[one][1][1] for one, beat in beats.items() if one in current.beats):
            return  # it goes on
        if found.culprits and (found.certain or silent > 2 * self._patience(rank, beats[rank].phase)):
            failure = {"cause": "hung", "reason": found.message, "traceback": found.stack}
            for culprit in found.culprits:
                current.beats.pop(culprit, None)
            self._c.order({"order": "kill", "generation": current.number, "ranks": list(found.culprits), "failure": failure})
        elif beats[rank].phase == "starting" and not found.culprits:
            self._c.troubles.append(Disconnected(current.step, f"ranks did not come together within {silent:.0f} s"))
        elif found.culprits or silent < 2 * self._patience(rank, beats[rank].phase):
            return  # looked at once more, a little later
        elif found.cut_off:
            self._c.troubles.append(Disconnected(current.step, found.message))
        elif current.ranks == 1:
            failure = {"cause": "hung", "reason": f"rank 0: {found.message}", "traceback": found.stack}
            self._c.order({"order": "kill", "generation": current.number, "ranks": [0], "failure": failure})
        else:
            self._spared[rank] = 2 * silent  # all work on: this machine is slow, not stuck
            self._c.agent.emit(Warned(message=f"No step was completed for {silent:.0f} s, but {found.message}."))

    async def stacks(self, current: Generation, ranks: list[int]) -> dict[int, str]:
        """Where these ranks are, as they say or as their nodes see it."""
        await self._ask(current, ranks)
        told = {rank: self._answers.get(rank, {}) for rank in ranks}
        return {rank: (said.get("where") or {}).get("stack") or said.get("stack") or "" for rank, said in told.items()}

    async def _ask(self, current: Generation, ranks: list[int]) -> None:
        c = self._c
        self._answers.clear()
        self._question += 1
        c.order({"order": "where", "generation": current.number, "question": self._question})
        await c.until(lambda: bool(c.troubles) or all(rank in self._answers for rank in ranks), _ANSWER)
        silent = [rank for rank in ranks if rank not in self._answers]
        if silent:
            c.order({"order": "inspect", "generation": current.number, "ranks": silent})
            await c.until(lambda: bool(c.troubles) or all(rank in self._answers for rank in silent), _INSPECT)

    def _diagnosed(self, current: Generation, beats: dict[int, Beat]) -> Diagnosis:
        """From the answers."""
        c = self._c
        each = current.ranks // current.plan.layout.pipeline
        now = time.monotonic()
        return diagnose(
            [
                Report(
                    rank=rank,
                    node=current.assignment[rank],
                    stage=rank // each if current.plan.layout.pipeline > 1 else None,
                    beat=beats.get(rank),
                    where=self._answers.get(rank, {}).get("where"),
                    state=self._answers.get(rank, {}).get("state"),
                    fallback_stack=self._answers.get(rank, {}).get("stack"),
                    silent=now - max(beats[rank].since, c.awake) if rank in beats else 0.0,
                )
                for rank in current.living
            ]
        )

    def _slow(self, current: Generation, beats: dict[int, Beat]) -> None:
        """Once for each step that all ranks have taken."""
        if len(beats) < current.ranks or current.ranks < 2 or self._stragglers is None:
            return
        taken = min(beat.taken for beat in beats.values())
        if taken <= self._counted:
            return
        self._counted = taken
        named = self._stragglers.see({rank: beat.busy_seconds for rank, beat in beats.items()})
        if named is not None:
            rank, factor = named
            node = current.assignment[rank]
            message = (
                f"rank {rank} (node {node}) works {factor:.1f} times as long as the others in each step, and they wait for it"
            )
            self._c.agent.emit(Straggling(rank=rank, node=node, step=beats[rank].step, factor=factor, message=message))


def _beat(heard: float, said: list[Any]) -> Beat:
    """As the rank's node saw it, on this machine's clock."""
    _, step, phase, age, seconds, busy, taken, memory = said
    return Beat(step, phase, heard - age, seconds, busy, taken, memory)
