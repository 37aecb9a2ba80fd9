"""What the controller checks while no failure has been reported: hung and slow ranks, broken connections, corrupt replicas, the first step
after a recovery, and a stop that takes too long."""

from __future__ import annotations

import shutil
import signal
import time
from dataclasses import asdict

from phalanx.control import protocol
from phalanx.control.controller_state import Control, Generation
from phalanx.control.recover import Recovery, Replanner, discard_replicas
from phalanx.events.heartbeat import Beat
from phalanx.events.records import Recovered, Straggling, Warned
from phalanx.events.rundir import RunDir
from phalanx.recovery.diagnose import Diagnosis, HangReport, Report, diagnose
from phalanx.recovery.state import Failure
from phalanx.recovery.stragglers import ProgressTimeouts, Stragglers

_DEATH_REPORT = 0.7  # seconds in which the death that broke a connection is reported; later the connection itself is blamed
_NOTICE_FRACTION = 0.25  # part of the preemption notice after which ranks that do not save yet are halted
_COMPILE_SECONDS = 180.0  # a batch of a new shape may be compiled in any step
_RENDEZVOUS_SECONDS = 90.0  # in which the ranks of a generation connect to each other: new ones may have to load first
_DISK_FULL = 1 << 20  # bytes
_LOOKING = 0.1  # part of the time that may be spent on looking for hung ranks


class Watchdog:
    """The checks of one controller."""

    def __init__(self, control: Control, replanner: Replanner):
        self._control, self._replanner = control, replanner
        self._disconnected_since: float | None = None
        self.hangs, self._looked = HangDetector(control), 0.0

    async def check(self) -> None:
        generation = self._control.state.generation
        if generation is None:
            return
        self.record_recovery(generation)
        self._control.release_leaving(generation)
        self._check_connections(generation)
        self._check_corruption(generation)
        await self._check_stop(generation)
        # A look at thousands of ranks takes a tenth of a second, in which no node is heard.
        if not self._control.state.events and (now := time.monotonic()) >= self._looked + self.hangs.seconds / _LOOKING:
            self._looked = now
            await self.hangs.check(generation)

    def record_recovery(self, generation: Generation) -> None:
        """Write `recovered` once the first step is complete, or the run has ended without one."""
        state, agent = self._control.state, self._control.agent
        record = state.recovery
        if record is None:
            if not state.first_step and generation.number == 0 and generation.restored:
                state.first_step = min(generation.restored.values())
            return
        if record.restarted is None and len(generation.restored) == generation.ranks:
            record.restarted = time.time()
        if record.restarted is None or not (generation.first_steps or generation.complete):
            return
        first, step = min(generation.first_steps.values(), default=time.time()), min(generation.restored.values())
        agent.emit(
            Recovered(
                failures=record.failures,
                action=record.action,
                generation=generation.number,
                ranks=generation.ranks,
                layout=asdict(generation.plan.layout),
                source=_source(record.source, generation, trains=agent.run.command.program is None),
                step=step,
                steps_lost=max(0, (record.step_before or 0) - step),
                noticed=record.noticed,
                decided=record.decided,
                restarted=record.restarted,
                first_step=first,
                seconds=first - record.noticed,
            )
        )
        state.recovery = None
        agent.spawn(discard_replicas(self._control, generation.number))
        if generation.plan.process_layout != state.wanted:  # nodes with free slots may allow the run to grow
            free = {node for node, slots in state.nodes().items() if len(generation.ranks_on(node)) < slots}
            state.joined |= free | state.joined_during_recovery
        state.joined_during_recovery.clear()

    def _check_connections(self, generation: Generation) -> None:
        """Ranks lost a connection and no rank died: the connection itself broke."""
        if not generation.disconnected:
            self._disconnected_since = None
            return
        now = time.monotonic()
        self._disconnected_since = self._disconnected_since or now
        if now - self._disconnected_since > _DEATH_REPORT:
            self._disconnected_since = None
            rank, reason = next(iter(generation.disconnected.items()))
            message = f"rank {rank} lost its connection to another rank, and no process has died: {reason.splitlines()[0]}"
            self._control.state.events.append(Failure("connection lost", None, generation.step, message))

    def _check_corruption(self, generation: Generation) -> None:
        corruption = generation.corruption
        if corruption is None or generation.corruption_handled:
            return
        generation.corruption_handled = True
        step, reason, events = generation.step, corruption.reason, self._control.state.events
        events += [Failure("corrupt", rank, step, reason) for rank in corruption.culprits]
        if not corruption.culprits:
            # If every state is right, the same ranks repeat the step.
            cause = "connection lost" if generation.valid_state_known else "corrupt"
            events.append(Failure(cause, None, step, reason))

    async def _check_stop(self, generation: Generation) -> None:
        """Ranks that were asked to stop end at the next step. If that takes too long, a new generation saves the state, unless the run
        saves no checkpoints."""
        state = self._control.state
        if state.stop_requested is None or state.saving or generation.ended:
            return
        if time.monotonic() - state.stop_requested < _NOTICE_FRACTION * self._control.settings.preemption_notice:
            return
        phases = {beat.phase for beat in generation.beats.values()}
        if phases and phases <= {"saving", "ending"}:
            return
        state.saving = True
        if generation.untouched:
            self._control.end_stopped(max(generation.restored.values(), default=0))
        elif not self._control.agent.run.resumable:
            self._control.end_stopped(generation.step or 0)
        else:
            await Recovery(self._control, self._replanner, save_only=True).run()


class HangDetector:
    """Detects hung and slow ranks from heartbeats, and names the culprit of a hang."""

    def __init__(self, control: Control):
        self._control = control
        self._compiles = bool(control.agent.run.memory.compile)
        self._timeouts = ProgressTimeouts(control.settings.timeout)
        self._stragglers: Stragglers | None = None
        self._generation = -1
        self._steps_compared = 0
        self._extended: dict[int, float] = {}
        """Longer timeouts of ranks that were suspected while everybody worked."""
        self._last_compile = 0.0
        """When a rank was last seen compiling, which the others wait for."""
        self.seconds = 0.0
        """That the last look at all heartbeats took."""

    async def check(self, generation: Generation) -> None:
        if self._control.stalled or self._control.state.observing:
            return
        now, living = time.monotonic(), set(generation.living)
        beats = {rank: beat for rank, beat in generation.beats.items() if rank in living}
        suspect = self._observe(generation, beats)
        self.seconds = time.monotonic() - now
        if suspect is not None:
            await self._investigate(generation, beats, *suspect)

    def _observe(self, generation: Generation, beats: dict[int, Beat]) -> tuple[int, float] | None:
        """Learn from the heartbeats; returns a rank that has made no progress for too long, and for how long."""
        if generation.number != self._generation:
            self._start(generation)
        for rank, beat in beats.items():
            self._timeouts.observe(rank, beat)
        self._check_stragglers(generation, beats)
        if any(beat.phase == "compiling" for beat in beats.values()):
            self._last_compile = time.monotonic()
        for rank, beat in beats.items():
            silent = self._silent(beat)
            if rank not in generation.ended and silent > self._timeout(rank, beat.phase):
                return rank, silent
        return None

    def _start(self, generation: Generation) -> None:
        self._generation, self._steps_compared = generation.number, 0
        if self._compiles:
            self._timeouts.restart()  # the first step of a generation compiles again
        stages = {rank: generation.stage(rank) for rank in range(generation.ranks)}
        self._stragglers = Stragglers(self._control.settings.straggler, stages)
        self._extended.clear()

    def _silent(self, beat: Beat) -> float:
        """Seconds without progress, not counting those in which this process was itself stopped, nor those of waiting for a compiler."""
        excused = self._control.state.last_stall_end
        if beat.phase != "compiling":
            excused = max(excused, self._last_compile)
        return time.monotonic() - max(beat.since, excused)

    def _timeout(self, rank: int, phase: str) -> float:
        if phase == "starting":
            return min(_RENDEZVOUS_SECONDS, self._control.settings.timeout)
        floor = max(self._control.settings.hang, _COMPILE_SECONDS if self._compiles else 0.0)
        return max(self._timeouts.timeout(phase, floor), self._extended.get(rank, 0.0))

    async def _investigate(self, generation: Generation, beats: dict[int, Beat], rank: int, silent: float) -> None:
        """A rank made no progress for too long: ask all ranks where they are and act on the diagnosis."""
        state = self._control.state
        await self._control.ask(generation, generation.living)
        if state.events or state.generation is not generation or not generation.living:
            return  # a rank died meanwhile: that was the reason
        diagnosis = self._diagnose(generation, beats)
        if any(beat.step != generation.beats[other].step for other, beat in beats.items() if other in generation.beats):
            return  # a step was completed meanwhile
        phase = beats[rank].phase
        twice_late = silent > 2 * self._timeout(rank, phase)
        if diagnosis.culprits and (diagnosis.certain or twice_late):
            for culprit in diagnosis.culprits:
                generation.beats.pop(culprit, None)
            self._control.kill_hung(list(diagnosis.culprits), diagnosis.message, diagnosis.stack)
        elif phase == "starting" and not diagnosis.culprits:
            reason = f"ranks did not come together within {silent:.0f} s"
            state.events.append(Failure("connection lost", None, generation.step, reason))
        elif diagnosis.culprits or silent < 2 * self._timeout(rank, phase):
            return  # the next check looks again
        elif diagnosis.cut_off:
            state.events.append(Failure("connection lost", None, generation.step, diagnosis.message))
        elif generation.ranks == 1:
            self._control.kill_hung([0], f"rank 0: {diagnosis.message}", diagnosis.stack)
        else:
            self._extended[rank] = 2 * silent  # all ranks compute: the machine is slow, nothing hangs
            self._control.agent.emit(Warned(message=f"No step was completed for {silent:.0f} s, but {diagnosis.message}."))

    def _diagnose(self, generation: Generation, beats: dict[int, Beat]) -> Diagnosis:
        piped, state = generation.plan.layout.pipeline > 1, self._control.state
        return diagnose(
            Report(
                rank=rank,
                node=generation.assignment[rank],
                stage=generation.stage(rank) if piped else None,
                beat=beats.get(rank),
                location=state.locations.get(rank, HangReport()),
                silent=self._silent(beats[rank]) if rank in beats else 0.0,
            )
            for rank in generation.living
        )

    def _check_stragglers(self, generation: Generation, beats: dict[int, Beat]) -> None:
        """Compare the ranks once for each step that all of them have taken."""
        if len(beats) < generation.ranks or generation.ranks < 2 or self._stragglers is None:
            return
        steps = min(beat.steps_taken for beat in beats.values())
        if steps <= self._steps_compared:
            return
        self._steps_compared = steps
        straggler = self._stragglers.observe({rank: beat.busy_seconds for rank, beat in beats.items()})
        if straggler is not None:
            rank, factor = straggler
            node = generation.assignment[rank]
            message = (
                f"rank {rank} (node {node}) works {factor:.1f} times as long as the others in each step, and they wait for it"
            )
            self._control.agent.emit(Straggling(rank=rank, node=node, step=beats[rank].step, factor=factor, message=message))


def _source(chosen: str, generation: Generation, *, trains: bool) -> str:
    """`Recovered.source`."""
    if not trains:
        return "program"
    source = chosen if generation.from_memory else "disk"
    return "beginning" if source == "disk" and not min(generation.restored.values()) else source


def worker_failure(report: protocol.RankDied, step: int | None, rundir: RunDir) -> Failure:
    """The end of a worker as an event of the policy."""
    rank, failure = report.rank, report.failure
    if failure is None:
        reason, log = describe_exit(rundir, rank, report.code)
        return Failure("died", rank, step, f"rank {rank}: {reason}", traceback=log)
    reason = failure.reason if failure.cause == "hung" else f"rank {rank}: {failure.reason}"
    return Failure(failure.cause, rank, step, reason, traceback=failure.traceback, final=failure.expected)


def describe_exit(rundir: RunDir, rank: int, code: int) -> tuple[str, str]:
    """Why a rank ended that reported no failure itself, and the end of its log."""
    if code == -signal.SIGKILL:
        return "it was killed by SIGKILL; if nobody did that, the machine ran out of memory (see dmesg)", ""
    if code < 0:
        return f"it was ended by {signal.Signals(-code).name}", ""
    log = rundir.rank_log(rank)
    tail = log.read_text(errors="replace")[-4000:] if log.is_file() else ""
    # A rank that cannot write its reason may have failed because the disk is full.
    full = shutil.disk_usage(rundir.path).free < _DISK_FULL
    return f"it ended with exit code {code}{f'; the disk of {rundir.path} is full' if full else ''}", tail
