"""`phalanx node`: one host of a run on several, started once on each by an engine such as srun or torchrun."""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from phalanx.cli.options import Overrides
from phalanx.events.rundir import RunDir, replace_file
from phalanx.host.env import NodePlace, engine_place
from phalanx.host.process_tree import STOP_SIGNALS
from phalanx.launch.node import NodeOptions, run_node
from phalanx.spec.dump import dump, written_secrets
from phalanx.spec.errors import RunError, refuse
from phalanx.spec.load import load


def node(
    run_dir: Annotated[Path, Argument(help="Directory of the run, which all hosts see.")],
    overrides: Overrides = None,
    run_file: Annotated[Path | None, Option(help="Run file, unless `phalanx train --on` has put it there.")] = None,
    number: Annotated[int | None, Option("--node", help="Number of this host, from 0. Default: as the engine says.")] = None,
    nodes: Annotated[int | None, Option(help="Number of hosts. Default: as the engine says.")] = None,
    launch: Annotated[
        str | None, Option(help="Name of this start of the job, the same on all hosts. Default: as the engine says.")
    ] = None,
    bind: Annotated[
        str | None, Option(help="Address or interface of this host. Default: the one that reaches the other hosts.")
    ] = None,
    chaos: Annotated[str, Option(help="Faults to inject, as with `phalanx train`.")] = "",
    alive_file: Annotated[Path | None, Option(help="A file to touch every 10 s, for probes.")] = None,
) -> None:
    """Run this host's part of a training run. Start it once on every host, under srun, torchrun or anything else."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # not lost, and not fatal, until the agent can be told
    place = _place(number, nodes, launch)
    if run_file is not None and place.node == 0:
        rundir = RunDir(run_dir)
        rundir.create()
        run = load(run_file, overrides or [])
        refuse(written_secrets(run, "`phalanx node`"))
        replace_file(rundir.request_file, dump(run))
    host = socket.gethostname()

    def say(text: str) -> None:
        print(f"[node {place.node} {host}] {text}", file=sys.stderr, flush=True)

    raise typer.Exit(run_node(run_dir, place, NodeOptions(bind, chaos, alive_file), say))


def _place(number: int | None, nodes: int | None, launch: str | None) -> NodePlace:
    """This host's place: as given, else as the engine says."""
    engine = engine_place()
    if engine is None and None in (number, nodes, launch):
        raise RunError(
            "phalanx node: no engine (srun, torchrun) says which of how many hosts this is: start it with one of them, or give "
            "--node, --nodes and --launch."
        )
    known = engine or NodePlace(node=0, nodes=1, launch="")
    place = NodePlace(
        node=known.node if number is None else number,
        nodes=known.nodes if nodes is None else nodes,
        launch=known.launch if launch is None else launch,
        peer=known.peer,
        topology=known.topology,
        shared=known.shared,
    )
    if not 0 <= place.node < place.nodes:
        raise RunError(f"--node {place.node} of --nodes {place.nodes}: numbers go from 0 to {place.nodes - 1}.")
    return place
