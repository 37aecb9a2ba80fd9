"""The Slurm launcher: writes a batch script, submits it, and follows the job. On every host of the job srun starts `phalanx node`, which does the
rest. Slurm decides when the run starts and stops; the agents' own heartbeats decide who is lost.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import sys
import time

from phalanx.control.protocol import RESUMABLE
from phalanx.events.rundir import RunDir, replace_file
from phalanx.host.env import python_path
from phalanx.host.process_tree import run_program
from phalanx.spec.dump import dump
from phalanx.spec.errors import RunError
from phalanx.spec.run import Run

_SECONDS = 60.0  # in which Slurm answers: its controller may be busy
_MARGIN = 30  # seconds between the end of a save and the end of the job; Slurm looks at limits that seldom
_GONE = 300.0  # seconds without an answer of Slurm after which nobody follows the job any more
_PATIENCE = 20  # seconds that the hosts have to clean up after the run is over
_OURS = (
    "--nodes",
    "-N",
    "--ntasks",
    "-n",
    "--ntasks-per-node",
    "--requeue",
    "--no-requeue",
    "--no-kill",
    "-k",
    "--signal",
    "--output",
    "-o",
)
_ENDED = {"COMPLETED": 0, "CANCELLED": RESUMABLE}
_RUNNING = (
    "PENDING",
    "RUNNING",
    "CONFIGURING",
    "COMPLETING",
    "REQUEUED",
    "SUSPENDED",
    "STOPPED",
    "SIGNALING",
    "STAGE_OUT",
    "RESIZING",
)

_SCRIPT = """\
#!/bin/bash
{options}

# Slurm sends USR1 before the time limit: the run saves, and the job goes back into the queue. After scancel, which sends TERM, it stays out.
limit= late=0
rm -f {exit_file}
srun --input=none --no-kill --kill-on-bad-exit=0 --wait=0 --ntasks-per-node=1 \\
    bash -c {node} &
srun=$!
trap 'limit=1; kill -USR1 $srun' USR1
trap 'kill -TERM $srun' TERM
while kill -0 $srun 2>/dev/null; do
    sleep 1 & wait $!
    # The run is over, but srun waits for hosts that were lost.
    [ -e {exit_file} ] && [ $((late += 1)) -gt {patience} ] && kill -KILL $srun
done
wait $srun; code=$?
# srun's own exit code is that of the worst host, one that was lost included.
code=$(cat {exit_file} 2>/dev/null || echo $code)
if [ "$code" = {resumable} ] && [ -n "$limit" ]; then
    scontrol requeue "$SLURM_JOB_ID" && sleep 60
fi
exit $code
"""


class SlurmJob:
    """A submitted job. Implements `launch/launcher.SubmittedJob`."""

    def __init__(self, number: str, rundir: RunDir, patience: float = _GONE):
        """`patience`: seconds that Slurm may be out of reach."""
        self.number, self.rundir, self._patience, self._answered = number, rundir, patience, time.monotonic()

    @property
    def title(self) -> str:
        return f"job {self.number}"

    @property
    def remarks(self) -> str:
        return f"To stop it, `scancel {self.number}`; to see it, `phalanx logs {self.rundir.path} --follow`."

    def ended(self) -> str | None:
        """How the job has ended, in Slurm's words; None while it waits or runs. RunError if Slurm is gone, or does not know the job any
        more."""
        try:
            done = run_program(["scontrol", "-o", "show", "job", self.number], _SECONDS)
            answer, why = (done.stdout if done.returncode == 0 else None), done.stderr.strip()
        except OSError as error:
            answer, why = None, str(error)
        if answer is not None:
            self._answered = time.monotonic()
            state = fields(answer).get("JobState")
            return None if state in _RUNNING else state
        silent = time.monotonic() - self._answered
        if "Invalid job id" in why:  # Slurm forgets jobs that have ended (MinJobAge)
            raise RunError(
                f"Slurm does not know job {self.number} any more: it has ended. `phalanx status` shows how far the run is."
            )
        if silent > self._patience:
            raise RunError(
                f"Slurm has not answered for {silent:.0f} s ({why or 'no reason given'}), so job {self.number} is not followed any longer: it "
                f"may go on. `phalanx status` shows how far the run is, `squeue -j {self.number}` whether Slurm is back."
            )
        return None

    def cancel(self) -> None:
        """The run saves and ends, and can be resumed."""
        _tell("scancel", self.number)

    def news(self) -> list[str]:
        return []

    def exit_code(self, state: str) -> int:
        return _ENDED.get(state, 1)

    def close(self) -> None: ...


def script(run: Run, rundir: RunDir) -> str:
    """The batch script of a run."""
    if run.cluster.slurm and (taken := [word for word in run.cluster.slurm if word.partition("=")[0] in _OURS]):
        raise RunError(
            f"cluster.slurm: {', '.join(taken)} is set by Phalanx: remove it; cluster.nodes sets the number of hosts."
        )
    path = python_path()
    words = [
        *(["env", f"PYTHONPATH={path}"] if path else []),
        sys.executable,
        "-P",
        "-m",
        "phalanx",
        "node",
        str(rundir.path.absolute()),
    ]
    setup = "".join(f"{line}; " for line in run.cluster.setup)
    options = [
        f"--job-name={rundir.path.name}",
        f"--nodes={run.cluster.nodes}",
        "--ntasks-per-node=1",
        "--requeue" if run.resumable else "--no-requeue",
        "--no-kill",
        f"--signal=B:USR1@{int(run.resilience.preemption_notice) + _MARGIN}",
        f"--output={rundir.logs.absolute()}/slurm-%j.log",
        "--open-mode=append",
        *run.cluster.slurm,
    ]
    return _SCRIPT.format(
        options="\n".join(f"#SBATCH {option}" for option in options),
        # USR1 before Python has its handlers would end it.
        node=shlex.quote(f"trap '' USR1; {setup}exec {shlex.join(words)}"),
        exit_file=shlex.quote(str(rundir.exit_file.absolute())),
        patience=_PATIENCE,
        resumable=RESUMABLE,
    )


def submit(run: Run, rundir: RunDir) -> SlurmJob:
    """Write the run file and the script into the run directory, and submit the job."""
    if shutil.which("sbatch") is None:
        raise RunError('cluster.launcher = "slurm" needs sbatch, which is not on PATH: use a login node of the cluster.')
    rundir.create()
    replace_file(rundir.request_file, dump(run))
    file = rundir.path / "job.sbatch"
    replace_file(file, script(run, rundir))
    done = run_program(["sbatch", "--parsable", str(file)], _SECONDS)
    if done.returncode:
        raise RunError(f"sbatch refuses {file}: {done.stderr.strip() or done.stdout.strip()}; cluster.slurm sets its options.")
    return SlurmJob(done.stdout.strip().partition(";")[0], rundir)


def end_job(launch: str, *, resumable: bool) -> None:
    """End the job of a run that is over, if it is a Slurm job: it has lost the host of its batch script, and would stay until its limit."""
    engine, _, number = launch.partition("-")
    if engine == "slurm":
        _tell(*(("scontrol", "requeue") if resumable else ("scancel",)), number.partition("-")[0])


def fields(line: str) -> dict[str, str]:
    """The fields of a line that `scontrol -o show` prints."""
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def _tell(*command: str) -> None:
    """Tell Slurm something; it may not be there to hear it."""
    with contextlib.suppress(OSError):
        run_program(command, _SECONDS)
