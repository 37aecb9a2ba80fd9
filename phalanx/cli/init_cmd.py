"""`phalanx init`: asks, or takes options, and writes a run file that runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from glob import glob
from importlib.resources import files
from pathlib import Path
from typing import Annotated

from rich.prompt import Prompt
from typer import Argument, Option

from phalanx.cli.options import AsJson
from phalanx.cli.output import console, finish, write_file
from phalanx.host.probe import this_machine
from phalanx.spec import hub
from phalanx.spec.errors import RunError, either
from phalanx.spec.load import loads
from phalanx.spec.model import PRESETS
from phalanx.spec.new_run_file import GOALS, Answers, Goal, default_model, run_file
from phalanx.spec.plan import Machine

_EXAMPLES = "examples"


def init(
    file: Annotated[Path, Argument(help="The run file to write.", metavar="RUN.toml")] = Path("run.toml"),
    goal: Annotated[str | None, Option(help=f"{', '.join(GOALS)}. Default: asks.")] = None,
    model: Annotated[
        str | None,
        Option(
            help="A preset of `phalanx models`; to fine-tune, a Hugging Face model (its folder, or its name on the hub) or a run directory."
        ),
    ] = None,
    data: Annotated[list[str] | None, Option(help="File, folder, pattern or URL of text. May be given several times.")] = None,
    tokenizer: Annotated[str | None, Option(help='"byte", a tokenizer.json, or a folder that holds one.')] = None,
    cluster: Annotated[str | None, Option(help="A cluster of `phalanx clusters` to plan for. Default: this machine.")] = None,
    steps: Annotated[int | None, Option(min=1, help="Steps to train.")] = None,
    example: Annotated[str | None, Option(help='Copy an example instead; "list" shows their names.')] = None,
    yes: Annotated[bool, Option("--yes", "-y", help="Ask nothing: take defaults for whatever is not given.")] = False,
    force: Annotated[bool, Option("--force", help="Replace the file if it exists.")] = False,
    json: AsJson = False,
) -> None:
    """Write a run file: asks for model, data, machine and goal, or takes them as options. The file is checked before it is written."""
    if example is not None:
        finish(json, _copy_example(example, file, force=force))
        return
    _check_free(file, force)
    asks = not yes and not json and sys.stdin.isatty()
    machine = this_machine()
    answers = _answers(goal, model, tuple(data or ()), asks=asks, machine=machine)
    answers = replace(answers, tokenizer=tokenizer, cluster=cluster, gpus=bool(machine.gpus) and cluster is None, steps=steps)
    if asks:
        answers = _asked_for_rest(answers)
    text = run_file(answers, str(file))
    _check(text, file, machine)
    write_file(file, lambda: file.write_text(text, encoding="utf-8"))
    console.print(f"next: phalanx train {file} --dry-run, then phalanx train {file}", markup=False, soft_wrap=True)
    finish(json, {"file": str(file), "goal": answers.goal, "text": text})


def _check_free(file: Path, force: bool) -> None:
    if file.is_dir():
        raise RunError(f"{file} is a folder: name a file, such as {file / 'run.toml'}.")
    if file.exists() and not force:
        raise RunError(f"{file} exists: name another file, or replace it with --force.")
    if not file.parent.is_dir():
        raise RunError(f"{file} cannot be written: there is no folder {file.parent}.")


def _answers(goal: str | None, model: str | None, data: tuple[str, ...], *, asks: bool, machine: Machine) -> Answers:
    """The goal and what belongs to it: given, asked for, or by default."""
    if goal is not None and goal not in GOALS:
        raise RunError(f"--goal {goal} is not known: choose {either(GOALS)}.")
    chosen: Goal
    if goal is not None:
        chosen = goal
    elif model is not None and (os.path.isdir(os.path.expanduser(model)) or ("/" in model and hub.parse(model) is not None)):
        chosen = "finetune"
    elif data:
        chosen = "pretrain"
    else:
        chosen = _ask_goal() if asks else "try"
    if chosen == "try" and data:
        raise RunError("--goal try reads Python's own source code: remove --data, or set --goal pretrain.")
    if chosen != "try" and not data:
        if not asks:
            raise RunError(f"--goal {chosen} needs text: name it with --data PATH.")
        data = (_ask("Where is your text? A file, a folder or a pattern", None, _text_problem),)
    for path in data:
        if (problem := _text_problem(path)) is not None:
            raise RunError(f"--data {problem}")
    if model is None and chosen == "finetune" and not asks:
        raise RunError("--goal finetune needs a model: name its folder with --model PATH.")
    if model is None and asks:
        question = (
            "Which model? Its folder, or its name on the hub"
            if chosen == "finetune"
            else "Which model? A preset of `phalanx models`"
        )
        model = _ask(question, default_model(chosen, bool(machine.gpus)), lambda name: _model_problem(name, chosen))
    model = model or default_model(chosen, bool(machine.gpus))
    if model is not None and (problem := _model_problem(model, chosen)) is not None:
        raise RunError(f"--model {problem}")
    return Answers(goal=chosen, model=model, data=data)


def _asked_for_rest(answers: Answers) -> Answers:
    if answers.tokenizer is None and answers.goal == "pretrain":
        answers = replace(
            answers, tokenizer=_ask("Which tokenizer? byte, or a folder with a tokenizer.json", "byte", _tokenizer_problem)
        )
    if answers.steps is None:
        default = 1000 if answers.gpus else 300
        answers = replace(answers, steps=int(_ask("How many steps?", str(default), _steps_problem)))
    return answers


def _ask_goal() -> Goal:
    goals = list(GOALS)
    console.print("What do you want to do?")
    for number, name in enumerate(goals, start=1):
        console.print(f"  {number}  {GOALS[name]}", markup=False)
    answer = Prompt.ask("Choose", choices=[str(number) for number in range(1, len(goals) + 1)], default="1", console=console)
    return goals[int(answer) - 1]


def _ask(question: str, default: str | None, problem_of: Callable[[str], str | None]) -> str:
    while True:
        answer = (
            Prompt.ask(question, default=default, console=console)
            if default is not None
            else Prompt.ask(question, console=console)
        )
        problem = "say something" if not answer else problem_of(answer)
        if problem is None:
            return answer
        console.print(problem, style="red", markup=False, soft_wrap=True)


def _text_problem(path: str) -> str | None:
    if "://" in path or glob(os.path.expanduser(path), recursive=True):
        return None
    return f"{path}: there is no such file or folder."


def _model_problem(model: str, goal: Goal) -> str | None:
    if goal == "finetune":
        known = os.path.isdir(os.path.expanduser(model)) or hub.parse(model) is not None
        return (
            None if known else f"{model}: there is no such folder, and it is no name of the Hugging Face hub, such as org/name."
        )
    return None if model in PRESETS else f"{model} is not a preset: `phalanx models` lists them."


def _tokenizer_problem(tokenizer: str) -> str | None:
    return (
        None
        if tokenizer == "byte" or os.path.exists(os.path.expanduser(tokenizer))
        else f"{tokenizer}: there is no such file or folder."
    )


def _steps_problem(steps: str) -> str | None:
    return None if steps.isdecimal() and int(steps) > 0 else f"{steps} is not a number of steps."


def _check(text: str, file: Path, machine: Machine) -> None:
    """The file must run: all its problems are reported, and nothing is written."""
    from phalanx.launch.model_check import measure
    from phalanx.planning.machines.hardware import planned
    from phalanx.planning.planner import choose, plan_run

    run = loads(text, name=str(file))
    if planned(run):
        choose(run, None)
    else:
        plan_run(run, machine, None, measure(run))


def _copy_example(name: str, file: Path, *, force: bool) -> dict[str, object]:
    folder = files("phalanx") / _EXAMPLES
    known = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith((".toml", ".py", ".ipynb")))
    if name == "list":
        for entry in known:
            console.print(entry, markup=False)
        return {"examples": known}
    found = next((entry for entry in known if name in (entry, Path(entry).stem)), None)
    if found is None:
        raise RunError(f"--example {name} is not known: choose {either(known)}.")
    target = file if file != Path("run.toml") else Path(found)
    _check_free(target, force)
    content = (folder / found).read_text(encoding="utf-8")
    write_file(target, lambda: target.write_text(content, encoding="utf-8"))
    return {"file": str(target)}
