"""Checks of a run against this machine before anything starts: packages, addresses, nodes, disk space, memory, the amount of text, and the
storage of its checkpoints. Called by `launch/prepare`. A check returns its problems as sentences, or raises RunError."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from phalanx.checkpointing import directory
from phalanx.checkpointing.format import Marker
from phalanx.checkpointing.location import Location, Remote, error_text, open_location
from phalanx.checkpointing.replicas import shm_slots
from phalanx.control.processes import BYTES_PER_PARAMETER
from phalanx.data.chat_turns import sample_prompts
from phalanx.data.dataset import Dataset
from phalanx.data.files import paths_key, skipped_files
from phalanx.events import frames
from phalanx.events.log import read_events
from phalanx.events.records import Saved
from phalanx.events.rundir import RunDir
from phalanx.host.env import secret
from phalanx.host.interfaces import address_of
from phalanx.host.probe import lacks_instructions
from phalanx.launch.changed_settings import check_changes
from phalanx.spec.check_engine import missing_engine
from phalanx.spec.errors import RUN_FILE, RunError, toml
from phalanx.spec.load import loads
from phalanx.spec.plan import Machine, Plan
from phalanx.spec.run import PORTS_PER_NODE, Data, Run
from phalanx.spec.sources import kind
from phalanx.watch.sinks.sink import sinks_of

ONE_NODE = (
    "checkpoint.memory_every: this run is on one machine, so its in-memory replicas survive the loss of workers but not the loss of the "
    "machine."
)
NO_COPIES = (
    "checkpoint.memory_every has no effect under torchrun, which ends all processes of a machine together: start with `phalanx train`, "
    "or rely on checkpoint.every."
)
NO_CHECKPOINTS = "checkpoint.save = false: nothing is saved, not even at the end, and this run cannot be resumed."
_DISK_SLACK = 16 << 20  # bytes for logs, events and the loss curve
_EXTRAS = {"s3": "s3", "s3a": "s3"}  # extras of this package by fsspec's name of the storage
_COMMON_STORES = "s3://, gs:// or az://"
_ON = " = true"
_NAMED_FILES = 3  # skipped files that a notice names
_PADDING_NOTICE = 0.001  # fraction of padding below which it is not reported


def missing_packages(run: Run) -> list[str]:
    """Packages that the run needs and that are not installed."""
    return missing_engine(run) + [
        f"{kind.key} needs the package {kind.package}, which is not installed: pip install 'phalanx[{kind.extra}]', "
        f"or {f'set {kind.key[: -len(_ON)]} = false' if kind.key.endswith(_ON) else f'remove {kind.key}'}."
        for kind in sinks_of(run.watch).values()
        if not kind.installed
    ]


def watch_problems(run: Run) -> list[str]:
    """Why [watch] cannot do what it says here: packages, secrets that are not in the environment, a port that is taken."""
    watch, problems = run.watch, missing_packages(run)
    for key, value in (("alerts.url", watch.alerts.url), ("metrics_token", watch.metrics_token)):
        if value is not None and secret(value) is None:
            problems.append(f"watch.{key} = {toml(value)}: the environment has no such variable: set it, or remove the key.")
    if watch.metrics_port is not None:
        try:
            with socket.create_server((watch.metrics_host, watch.metrics_port), family=_family(watch.metrics_host)):
                pass
        except OSError as error:
            problems.append(
                f"watch.metrics_port = {watch.metrics_port}: {watch.metrics_host} cannot listen there ({error.strerror or error}): name another "
                "port, correct watch.metrics_host, or end the process that has the port."
            )
    return problems


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def adapter_problems(run: Run) -> list[str]:
    """Why adapters, or preferences, would be trained in vain."""
    if run.model.from_ is not None:
        return []
    if run.train.objective == "dpo":
        return [
            'train.objective = "dpo" compares a model with the one that training starts from, and without model.from that would be random: '
            "set model.from to a folder of trained weights."
        ]
    if run.lora.rank is None:
        return []
    return [
        f"lora.rank = {run.lora.rank} freezes all weights but those of the adapters, and without model.from they would be random: set "
        "model.from to a folder of trained weights, or remove [lora]."
    ]


def address_problems(run: Run) -> list[str]:
    """Why the run's processes cannot listen at cluster.bind, on cluster.ports. Tries to."""
    bind, key = address_of(run.cluster.bind) or run.cluster.bind, f"cluster.bind = {toml(run.cluster.bind)}"
    remedy = 'set it to an address of this machine, such as "127.0.0.1", or remove it.'
    try:
        address = ipaddress.ip_address(bind)
    except ValueError:
        return [f"{key} is neither an IP address nor an interface of this machine that has one: {remedy}"]
    if address.is_unspecified:
        return [f"{key} means every interface, so anyone on the network could connect: {remedy}"]
    with contextlib.ExitStack() as listeners:
        try:
            listeners.enter_context(frames.listen(bind))
        except OSError as error:
            return [f"{key} is not an address of this machine ({error.strerror}): {remedy}"]
        need = PORTS_PER_NODE * run.cluster.nodes
        try:
            for _ in range(need if run.cluster.ports is not None else 0):
                listeners.enter_context(frames.listen(bind, run.cluster.port_range))
        except OSError as error:
            return [
                f"cluster.ports = {toml(run.cluster.ports or '')}: the run needs {need} free ports, {PORTS_PER_NODE} for each node, but "
                f"{error.strerror}: widen the range, or name another."
            ]
    return []


def node_problems(run: Run, plan: Plan, machine: Machine) -> list[str]:
    """Nodes that would have no rank and are not declared as spares, and several nodes on one machine that would share its GPUs."""
    nodes, spares = run.cluster.nodes, run.resilience.spares
    if nodes > machine.nodes == 1 and plan.device == "cuda" and run.cluster.launcher == "local":
        return [
            f"cluster.nodes = {nodes} on this machine would give the same GPUs to several nodes: remove the key, or set "
            'cluster.device = "cpu" to rehearse several nodes.'
        ]
    if nodes - spares <= plan.processes:
        return []
    without = f" - resilience.spares = {spares}" if spares else ""
    return [
        f"cluster.nodes = {nodes}{without} leaves {nodes - spares} nodes to train on, but the layout has {plan.ranks} "
        f"rank{'s' if plan.ranks > 1 else ''}: set cluster.nodes to at most {plan.ranks + spares}, raise a degree of [layout] such as "
        f"layout.data, or keep more nodes idle with resilience.spares = {nodes - plan.ranks}."
    ]


def try_writing(folder: Path) -> None:
    """Raise OSError unless the folder exists or can be made, and can be listed and written."""
    folder.mkdir(parents=True, exist_ok=True)
    os.listdir(folder)
    probe = folder / ".writable"
    probe.touch()
    probe.unlink()


def space_problems(run: Run, plan: Plan, run_dir: Path) -> Iterator[str]:
    """Where there is too little space for checkpoints, logs or offloaded optimizer states. `run_dir` need not exist yet."""
    count = plan.trained or plan.parameters
    state, parameters = count * BYTES_PER_PARAMETER, f"{count / 1e6:,.1f} M parameters"
    layout, offloads = plan.layout, run.memory.offload == "nvme"
    offloaded = state * (layout.ranks // (layout.pipeline * layout.shard * layout.tensor))  # each replica has states of its own
    if not run.checkpoint.save or run.checkpoint.url is None or run.checkpoint.local_first:
        existing = next(parent for parent in (run_dir.absolute(), *run_dir.absolute().parents) if parent.exists())
        free = shutil.disk_usage(existing).free
        # A new checkpoint is complete before an old one is removed, so there must be room for one more than is already there.
        need, what, remedy = state, f"one checkpoint of {parameters} takes", ", or save none with checkpoint.save = false"
        if not run.checkpoint.save:
            need, what, remedy = 0, "logs and events take", ""
            if offloads and run.memory.offload_path is None:
                need, what = offloaded, f"the optimizer states and master weights of {parameters} take"
        if free < (need := need + _DISK_SLACK):
            yield (
                f"The disk of the run directory {run_dir} has {_mib(free)} free, but {what} {_mib(need)}: "
                f"free some space or choose another disk with --run-dir{remedy}."
            )
    if offloads and run.memory.offload_path is not None:  # by default it is in the run directory
        folder, key = Path(run.memory.offload_path).expanduser(), f'memory.offload_path = "{run.memory.offload_path}"'
        try:
            try_writing(folder)
        except OSError as error:
            yield f"{key} cannot be written ({error.strerror}): name a folder on a fast local disk, or remove the key."
            return
        if (free := shutil.disk_usage(folder).free) < offloaded:
            yield (
                f"{key} has {_mib(free)} free, but the optimizer states and master weights of {parameters} take {_mib(offloaded)} there: "
                "free some space or name another folder."
            )


def replica_problems(run: Run, plan: Plan) -> Iterator[str]:
    """Why this machine cannot hold the in-memory replicas that the run file asks for."""
    if run.checkpoint.memory_every is None:
        return
    key, root = f"checkpoint.memory_every = {run.checkpoint.memory_every}", shm_slots.default_root()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        free = shm_slots.free_bytes(root)
    except OSError as error:
        yield f"{key}: in-memory replicas cannot be stored ({error}): remove the key to train without them."
        return
    # Each node holds the replicas of its own ranks and of its neighbors', and all nodes of a local job share this machine.
    slots = len(shm_slots.slots_for(run, plan.layout))
    if free < (
        need := slots
        * (plan.trained or plan.parameters)
        * BYTES_PER_PARAMETER
        * min(1 + run.checkpoint.memory_copies, run.cluster.nodes)
    ):
        yield (
            f"{key}: {slots} replicas of the state of {plan.parameters / 1e6:,.1f} M parameters take {_mib(need)} of memory, "
            f"but {root} has {_mib(free)} free: free some, give the container more shared memory, or remove the key."
        )


def storage_problems(run: Run) -> list[str]:
    """Why checkpoints cannot be stored at checkpoint.url. Tries to write there."""
    url = run.checkpoint.url
    if url is None or not run.checkpoint.save:
        return []
    key = f"checkpoint.url = {toml(url)}"
    protocol = url.partition("://")[0] if "://" in url else "file"
    if problem := _unusable(protocol):
        return [f"{key} {problem}"]
    try:
        place = open_location(url)
        if isinstance(place, Remote):
            place.check_access()
        else:
            try_writing(Path(str(place)))
    except OSError as error:
        if isinstance(error, FileNotFoundError) and protocol != "file":
            return [f"{key} does not exist ({error_text(error)}): create the bucket first, or name another."]
        return [
            f"{key} cannot be used ({error_text(error)}): make sure that this machine can reach and write it, or name another."
        ]
    return []


def _unusable(protocol: str) -> str | None:
    """Why a kind of storage cannot be used at all."""
    import fsspec
    from fsspec.registry import known_implementations, registry

    if protocol == "memory":
        return "is the memory of one process and ends with it: name a folder, or a store such as " + _COMMON_STORES + "."
    if protocol not in registry and protocol not in known_implementations:
        return f"begins with {protocol}://, which fsspec does not support: use {_COMMON_STORES}, or name a folder."
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        how = f"pip install 'phalanx[{extra}]'" if extra else error_text(error)
        return f"needs a package that is not installed: {how}."
    return None


def locations(run: Run, rundir: RunDir) -> list[Location]:
    """All locations where the run's checkpoints may be; of two checkpoints of the same step, the first location counts."""
    url, local = run.checkpoint.url, open_location(rundir.checkpoints)
    if url is None:
        return [local]
    return [local, open_location(url)] if run.checkpoint.local_first else [open_location(url)]


def check_owner(path: Location, saved: Marker, run: Run, *, new: bool, fresh: bool, change: bool = False) -> None:
    """Raise RunError unless the checkpoint at checkpoint.url belongs to this run. `new`: the run directory is new; `change`:
    it may have other settings."""
    key, other = f"checkpoint.url = {toml(run.checkpoint.url or '')}", "name another URL"
    if fresh:
        raise RunError(f"{key} already holds a run ({path.name}) and --fresh was given: {other}.")
    check_changes(loads(saved.run.run or "", name=str(path)), run, key, other, change=change)
    if new and saved.step >= run.steps:
        raise RunError(
            f"{key} holds a run that has finished all its {run.steps} steps: {other}, or raise train.steps to continue it."
        )


def check_lost(locations: list[Location], rundir: RunDir) -> None:
    """Raise RunError if the run has saved but its checkpoints are gone: it must not silently start again."""
    saved = [event for event in read_events(rundir.events_file) if isinstance(event, Saved)]
    if not saved:
        return
    for place in locations:
        directory.restore_replaced(place)  # a save may have been killed between its two renames
    if directory.newest(locations) == (None, []):  # if all are damaged, the workers report what is wrong with each
        where = " or ".join(map(str, locations))
        raise RunError(
            f"The run in {rundir.path} has saved step {saved[-1].step} as {saved[-1].path}, but there is no checkpoint in {where}: "
            "move it there, set checkpoint.url to where it is (relative paths start at the working directory), or start again "
            "from step 0 with another --run-dir."
        )


def checkpoint_notices(run: Run, *, torchrun: bool) -> list[str]:
    """That no checkpoint is saved, and limits of the in-memory replicas that the run file asks for."""
    notices = [] if run.checkpoint.save else [NO_CHECKPOINTS]
    if run.checkpoint.memory_every is None:
        return notices
    return [*notices, NO_COPIES] if torchrun else [*notices, ONE_NODE] if run.cluster.nodes == 1 else notices


def format_notices(plan: Plan, lacks: Callable[[str], bool] = lacks_instructions) -> list[str]:
    """That this CPU has no instructions for the run's format."""
    if plan.device != "cpu" or plan.compute == "fp32" or not lacks(plan.compute):
        return []
    return [
        f'precision.compute = "{plan.compute}": this CPU has no instructions for it, and multiplies 4 to 200 times as slowly as in fp32. Remove '
        "the key to compute in fp32."
    ]


def sample_problems(run: Run, data: Dataset) -> list[str]:
    """Prompts of samples that cannot be used."""
    try:
        if run.train.sample_every is not None:
            sample_prompts(run, data.tokenizer)
    except RunError as error:
        return list(error.problems)
    return []


def too_little_data(run: Run, data: Dataset) -> list[str]:
    """With limited epochs, the text may end before the run does."""
    limit, need = data.train.limit, run.steps * run.batch
    if limit is None or limit >= need:
        return []
    # In a mixture the first source that runs out ends it; which one that is follows from the weights.
    limited = [(f"data.mix.{source.name}.epochs", source.epochs) for source in run.data.mix if source.epochs is not None]
    keys = limited if run.data.mix else [("data.epochs", run.data.epochs or 1.0)]
    named = " and ".join(f"{key} = {epochs:g}" for key, epochs in keys)
    return [
        f"{named} of {source_names(run)} gives {limit:,} sequences, but {run.steps:,} steps of {run.batch} need {need:,}: "
        f"set train.steps to at most {limit // run.batch}, allow more epochs, or give more text. "
        f"`phalanx data inspect {RUN_FILE}` counts documents and tokens."
    ]


def data_notices(data: Dataset) -> list[str]:
    """Skipped records by source, and the padding ratio."""
    notices: list[str] = []
    for name, reasons in data.skipped.items():
        if total := sum(reasons.values()):
            each = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items() if count)
            records, verb = ("records", "were") if total > 1 else ("record", "was")
            notices.append(f"{total:,} {records} of {name} {verb} skipped: {each}.")
    if data.padding_ratio > _PADDING_NOTICE:
        notices.append(f"Packing fills {100 * (1 - data.padding_ratio):.1f} % of the windows; the rest is padding.")
    return notices


def skipped_file_notices(data: Data) -> list[str]:
    """Files in the data folders that are not read."""
    notices: list[str] = []
    for source in data.mix or (data,):
        if skipped := skipped_files(source, kind(source)):
            more = len(skipped) - _NAMED_FILES
            names = ", ".join(skipped[:_NAMED_FILES]) + (f" and {more:,} more" if more > 0 else "")
            are = "is no text and is" if len(skipped) == 1 else "are no text and are"
            notices.append(f"{paths_key(source)}: {names} {are} not read; to read such a file, name it itself.")
    return notices


def run_directory_problems(data: Data, run_dir: Path) -> list[str]:
    """Data folders that the run directory would be in: the next launch would read its records as text."""
    problems: list[str] = []
    for source in data.mix or (data,):
        for path in source.paths if kind(source) not in ("parquet", "hf") else ():
            top, place = Path(path).expanduser().resolve(), run_dir.resolve()
            if (
                top.is_dir()
                and place.is_relative_to(top)
                and not any(part.startswith(".") for part in place.relative_to(top).parts)
            ):
                problems.append(
                    f"The run directory {run_dir} is inside {path} ({paths_key(source)}), so its records and checkpoints would be read as "
                    "text: name one outside with --run-dir, or name the files to read with a glob."
                )
    return problems


def source_names(run: Run) -> str:
    """The run's data sources as its run file names them."""
    if run.data.mix:
        return ", ".join(f"[data.mix.{source.name}]" for source in run.data.mix)
    return f'data.source = "{kind(run.data)}"'


def _mib(size: float) -> str:
    return f"{size / 2**20:,.0f} MiB"
