"""`phalanx tune`: finds settings that make the steps of a run faster on this machine without changing what it computes."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text
from typer import Option

from phalanx.cli.options import AsJson, Overrides, RunFile, check_folders
from phalanx.cli.output import console, finish, plain_table, write_file
from phalanx.dashboard.numbers import duration
from phalanx.events.rundir import replace_file
from phalanx.host.probe import this_machine
from phalanx.spec.errors import refuse
from phalanx.spec.json_value import JsonObject
from phalanx.spec.load import given_keys, load, loads
from phalanx.spec.plan import Machine

if TYPE_CHECKING:
    from phalanx.tuning.trial_run import Side
    from phalanx.tuning.tune import TuneSettings
    from phalanx.tuning.tuner import Trial, TuneResult

_INTERRUPTED = 130
_TITLES = ("setting", "time a step", "pairs", "result")


def tune(
    run_file: RunFile,
    overrides: Overrides = None,
    minutes: Annotated[float, Option(min=0.2, max=1440.0, help="Maximum time of all trials.")] = 10.0,
    out: Annotated[
        Path | None, Option("--out", "-o", help="Where to write the tuned run file. Default: tuned.toml in tune/NAME.")
    ] = None,
    write: Annotated[
        bool, Option("--write", help="Also put the chosen keys into the run file. Comments and other keys stay.")
    ] = False,
    ranks: Annotated[
        int | None, Option(min=1, help="Ranks of a trial. Default: those that `phalanx train` starts here.")
    ] = None,
    vary: Annotated[
        list[str] | None,
        Option(help="A key to vary although the run file sets it, such as train.micro_batch or layout. May be repeated."),
    ] = None,
    only: Annotated[
        list[str] | None, Option(help="Vary this key alone, even if the run file sets it. May be repeated. Default: all.")
    ] = None,
    learn: Annotated[
        bool | None,
        Option("--learn/--no-learn", help="Have plans learn from the times. Default: if the machine was idle before."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Try settings that do not change what a run computes (layout, micro-batch, recomputation, compilation, buckets and others) in short
    trials side by side, and keep what is faster beyond noise."""
    from phalanx.tuning import tune_files
    from phalanx.tuning.tune import TuneSettings, Watcher
    from phalanx.tuning.tune import tune as search

    refuse(check_folders(out))
    changed = overrides or []
    run, machine = load(run_file, changed), this_machine()
    settings = TuneSettings(minutes=minutes, ranks=ranks, vary=tuple(vary or ()), only=tuple(only or ()), learn=learn)
    with _View().shown() as view:
        watcher = Watcher(on_status=view.status, on_trial=view.add)
        result, learned = search(run, machine, settings, given_keys(run_file, changed), watcher)
    folder = tune_files.new_folder(run_file.stem)
    write_file(folder / "trials.csv", lambda: tune_files.write_measurements(folder / "trials.csv", result))
    report = folder / "report.json"
    write_file(report, lambda: tune_files.write_report(report, result, learned))
    tuned = out or folder / "tuned.toml"
    if result.changed:
        text = _tuned_text(run_file, changed, machine, settings, result)
        for file in (tuned, *([run_file] if write else [])):
            write_file(file, partial(replace_file, file, text))
    console.print(tune_files.sentence(result), style="bold", soft_wrap=True, markup=False)
    if result.changed:
        words = ["phalanx", "train", str(run_file if write else tuned), *changed]
        console.print(f"To train with them: {shlex.join(words)}", soft_wrap=True, markup=False)
    console.print(tune_files.learned_sentence(learned), style="dim", soft_wrap=True, markup=False)
    files: JsonObject = {"folder": str(folder), "tuned": str(tuned) if result.changed else None}
    finish(json, tune_files.report(result, learned) | files)
    if result.interrupted:
        raise typer.Exit(_INTERRUPTED)


def _tuned_text(run_file: Path, overrides: Sequence[str], machine: Machine, settings: TuneSettings, result: TuneResult) -> str:
    """The run file with the chosen keys. RunError if it would be refused."""
    from phalanx.tuning import tune_files
    from phalanx.tuning.tune import plan_defaults

    def replan(text: str) -> Side:
        return plan_defaults(loads(text, name="the tuned run file", overrides=overrides), machine, settings)[0]

    text = run_file.read_text(encoding="utf-8")
    tuned = tune_files.tuned_text(text, result, None if settings.ranks else replan)
    loads(tuned, name="the tuned run file", overrides=overrides)
    return tuned


class _View:
    """The table of trials: live on a terminal, else a line for each as it ends."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, ...]] = []
        self._status = ""
        self._live: Live | None = None

    @contextmanager
    def shown(self) -> Iterator[_View]:
        if not console.is_terminal:
            yield self
            return
        with Live(console=console, get_renderable=self._render, refresh_per_second=4) as self._live:
            yield self
            self._status = ""

    def _render(self) -> Group:
        return Group(plain_table(_TITLES, self._rows), Text(self._status, style="dim"))

    def status(self, text: str) -> None:
        self._status = text

    def add(self, trial: Trial) -> None:
        """A trial has ended."""
        ratio = trial.ratio
        time, pairs = ("–", "–") if ratio is None else (ratio.words, str(ratio.pairs))
        outcome = trial.outcome if trial.outcome == trial.reason else f"{trial.outcome}: {trial.reason}"
        row = (trial.name or trial.key, time, pairs, outcome)
        self._rows.append(row)
        if self._live is None:
            took = f" ({duration(trial.seconds)})" if trial.number else ""
            console.print(
                f"{row[0]}: {f'{time} of time a step, ' if ratio else ''}{outcome}{took}", markup=False, soft_wrap=True
            )
