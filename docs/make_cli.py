"""Writes docs/cli.md: every verb with its arguments and options, read from the command itself.

python docs/make_cli.py
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer.main

from phalanx.cli.main import app

FILE = Path(__file__).with_name("cli.md")
_HEAD = """# Commands

Each command does one thing to a run file, a run directory or a checkpoint. The sections below list every argument and option, as `phalanx VERB --help` does.

| command | what it does |
|---|---|
| `phalanx train RUN.toml [key=value …]` | Train and recover from failures; the same command resumes after a stop ([more](resilience.md)), `--change` with other settings ([more](run-directory.md#change-a-run)). `--on ssh`, `--on slurm`, `--on ray` and `--on kubernetes` start it on several machines ([ssh](ssh.md), [Slurm](slurm.md), [Ray](ray.md), [Kubernetes](kubernetes.md)). |
| `phalanx train RUN.toml --sweep KEY=A,B` | Train a small grid of settings, one after the other or with `--parallel N` side by side ([more](several-runs.md)). |
| `phalanx lr-find RUN.toml` | Suggest a learning rate, from the loss while it grows ([more](several-runs.md#find-a-learning-rate)). |
| `phalanx runs [FOLDER]` | List runs with state, step, loss and speed ([more](several-runs.md#list-runs)). |
| `phalanx watch RUN_DIR` | A live page in a browser: loss, speed, ranks, failures, the promise; of a folder of runs, several next to each other ([more](watch.md)). |
| `phalanx report RUN_DIR -o report.html` | One document with pictures about a run, as HTML, Markdown or PDF ([more](watch.md#a-document)). |
| `phalanx trace RUN_DIR` | Which rank the others wait for, at which collective, how often and why; `-o trace.json` writes all ranks for Perfetto ([more](trace.md)). |
| `phalanx status RUN_DIR` | Is it running, how far is it, what has failed; from any host that sees the directory. |
| `phalanx logs RUN_DIR [--rank 3] [--grep TEXT] [--follow]` | What ranks and nodes have written, in the order of time; failures first. |
| `phalanx stop RUN_DIR` | Save and end a run; `phalanx train` resumes it. |
| `phalanx launch -- PROGRAM …` | Run any program (DDP, DeepSpeed, Megatron, JAX) on many ranks, with the same launchers, restarts, spares and logs ([more](launch.md)). |
| `phalanx node RUN_DIR` | One host of a run on several, started once on each by srun, torchrun or anything else ([more](slurm.md)). |
| `phalanx init [RUN.toml]` | Write a run file: asks, or takes `--goal`, `--data`, `--model`, `--steps`; `--example NAME` copies an example. |
| `phalanx plan RUN.toml [key=value …]` | Find the best layout on the run's cluster; `--solve`, `--compare RUN_DIR` ([more](planning.md)). |
| `phalanx rehearse RUN.toml --rank R` | Run the program of any rank of any cluster on fake tensors: memory, messages, errors ([more](rehearse.md)). |
| `phalanx simulate RUN.toml --days 54` | Simulate the whole run with its cluster's failures: goodput, finish, spares; `--step`: one step ([more](simulate.md)). |
| `phalanx verify RUN.toml [key=value …]` | Prove on CPU ranks, or with `--device cuda` on as few as one GPU, that the layout equals one device; `--layouts all`, `--chaos` ([more](verify.md)). |
| `phalanx bench` | Measure this machine for later plans ([more](planning.md)). |
| `phalanx bench step [RUN.toml] [--model PRESET]` | Measure the training step next to transformers, torchtitan and a hand-written loop ([more](performance.md)). |
| `phalanx schedule NAME` | Print, draw (`--png`) or write (`--csv`) a pipeline schedule ([more](parallelism.md)). |
| `phalanx generate RUN_DIR "def "` | Sample from the newest checkpoint, or from a given one; `--chat`: answer a message ([more](chat.md)). |
| `phalanx chat RUN_DIR` | Talk to a model through its chat template ([more](chat.md)). |
| `phalanx eval RUN_DIR` | Loss and perplexity per source, or multiple-choice accuracy ([more](evaluation.md)). |
| `phalanx import HF_DIR OUT` | Turn a Hugging Face folder into a run directory ([more](hugging-face.md)). |
| `phalanx export RUN_DIR HF_DIR` | Write a checkpoint as a folder that transformers loads, or its LoRA adapters for PEFT ([more](fine-tune.md)). |
| `phalanx checkpoint list RUN_DIR` | List checkpoints: step, size, time, layout, damage ([more](checkpoints.md)). |
| `phalanx checkpoint inspect CKPT` | Show what a checkpoint holds; `--layout tensor=2,pipeline=2`: what another layout would read. |
| `phalanx checkpoint verify PATH` | Compare every byte with its checksum. |
| `phalanx checkpoint diff A B` | Compare two checkpoints by parameter and optimizer state, whatever their layouts. |
| `phalanx checkpoint reshard A LAYOUT OUT` | Write a checkpoint as another layout would have saved it (checkpoint resharding). |
| `phalanx checkpoint export CKPT OUT` | Write a Hugging Face folder, plain safetensors, or one file for torch.load. |
| `phalanx checkpoint import HF_DIR OUT` | The same as `phalanx import`. |
| `phalanx checkpoint prune RUN_DIR` | Remove older checkpoints, never the newest valid one. |
| `phalanx tokenize SRC... OUT` | Write [token files](token-files.md) on all cores; continues where it was killed. |
| `phalanx tokenizer train SRC... OUT` | Train a BPE tokenizer on one's own text ([more](data.md#a-tokenizer-of-ones-own)). |
| `phalanx data inspect WHAT` | Documents, lengths, duplicates and a sample of any source. |
| `phalanx data preview RUN.toml --step 120` | Show what the model reads at a step, with document boundaries and masks. |
| `phalanx models` | List the presets with parameters, FLOPs and memory. |
| `phalanx clusters` | List the clusters, GPUs, nodes, links and failure rates to plan for; `show NAME --toml` prints one as a file for a cluster of your own ([more](catalogue.md)). |
| `phalanx doctor` | Show what this machine has and what would stop a run. |
| `phalanx completion SHELL` | Print the completion of bash, zsh or fish. |
| `phalanx schema` | Print the JSON schema of the run file. |
| `torchrun --standalone --nproc-per-node 2 -m phalanx train RUN.toml` | Train in processes that torchrun starts. |

With `--json` standard output holds one JSON object and nothing else; the text for people goes to standard error. [run-directory.md](run-directory.md) describes what a
run leaves behind.

Exit codes: 0 success; 1 a run or a proof failed; 2 refused before anything started; 75 stopped on request, saved, can be resumed; 130 stopped on request, not saved.

"""


def text() -> str:
    """The page."""
    return _HEAD + "\n".join(
        _verb("phalanx", name, command) for name, command in sorted(typer.main.get_command(app).commands.items())
    )  # type: ignore[attr-defined]


def _verb(parent: str, name: str, command: Any) -> str:
    inner = getattr(command, "commands", {})
    own = "" if inner and not getattr(command, "invoke_without_command", False) else _entry(parent, name, command)
    return own + "".join(_verb(f"{parent} {name}", verb, child) for verb, child in sorted(inner.items()))


def _entry(parent: str, name: str, command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    words = " ".join(_word(argument) for argument in arguments)
    lines = [
        f"## `{parent} {name}`",
        "",
        f"    {parent} {name} {words}".rstrip() + (" [OPTIONS]" if options else ""),
        "",
        _cell(command.help or ""),
        "",
    ]
    rows = [(_word(argument), _cell(argument.help or "")) for argument in arguments]
    rows += [(", ".join(option.opts + option.secondary_opts), _cell(option.help or "")) for option in options]
    if rows:
        lines += ["| argument | meaning |", "|---|---|", *(f"| `{left}` | {right} |" for left, right in rows), ""]
    return "\n".join(lines) + "\n"


def _word(argument: Any) -> str:
    word = str(argument.metavar or argument.name.upper())
    if "[" in word:  # it says for itself what may be left out
        return word
    word = word.strip("{}") + (" …" if argument.nargs == -1 else "")
    return word if argument.required else f"[{word}]"


def _cell(help: str) -> str:
    return re.sub(r"\s+", " ", help).strip().replace("|", "\\|")


if __name__ == "__main__":
    FILE.write_text(text())
