"""The only module that reads and sets environment variables. Used by the launcher, the workers and the CLI."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.host.interfaces import interface_of
from phalanx.spec.fields import ENVIRONMENT
from phalanx.spec.plan import Place, Plan

_NVML = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Querying GPUs through NVML does not initialize CUDA, so ranks can be forked afterwards."""
_FORWARDED = ("AWS_", "AZURE_", "GOOGLE_", "FSSPEC_", "HF_", "WANDB_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "JAX_", "XLA_")


def torchrun_place() -> Place | None:
    """Rank and world size from torchrun; None if torchrun did not start this process."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return Place(
        rank=int(os.environ["RANK"]), ranks=int(os.environ["WORLD_SIZE"]), local_rank=int(os.environ.get("LOCAL_RANK", "0"))
    )


def torchrun_store() -> tuple[str, str]:
    """Host and port at which torchrun has told the ranks to meet."""
    return os.environ.get("MASTER_ADDR", "localhost"), os.environ.get("MASTER_PORT", "29500")


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePlace:
    """One host's place in a job that an engine has started, one process per host."""

    node: int
    nodes: int
    launch: str
    """Identifies this start of the job: the same on all its hosts, another one after a restart."""
    peer: str | None = None
    """An address of another host of the job, by which the own one is found."""
    topology: str = ""
    """Where the host is in the network, from the outermost switch: hosts that sort together are near each other."""
    shared: bool = True
    """All hosts see the run directory."""


def engine_place() -> NodePlace | None:
    """The place that Slurm, Kubernetes or torchrun has given this process; None if none of them has started it."""
    get = os.environ.get
    if "SLURM_STEP_ID" in os.environ:
        return NodePlace(
            node=int(os.environ["SLURM_NODEID"]),
            nodes=int(os.environ["SLURM_STEP_NUM_NODES"]),
            launch=f"slurm-{get('SLURM_JOB_ID')}-{get('SLURM_RESTART_COUNT', '0')}",
            peer=get("SLURM_LAUNCH_NODE_IPADDR"),
            topology=get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")[0],  # the last part is the host itself
        )
    if "PHALANX_LAUNCH" in os.environ:  # set in the pods of `launch/kube_manifest`
        return NodePlace(
            node=int(os.environ["JOB_COMPLETION_INDEX"]),
            nodes=int(os.environ["PHALANX_NODES"]),
            launch=f"kubernetes-{get('PHALANX_LAUNCH')}",
            shared=get("PHALANX_SHARED") == "1",
        )
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return NodePlace(
            node=int(os.environ["GROUP_RANK"]),
            nodes=int(os.environ["GROUP_WORLD_SIZE"]),
            launch=f"torchrun-{get('TORCHELASTIC_RUN_ID')}-{get('TORCHELASTIC_RESTART_COUNT', '0')}",
            peer=get("MASTER_ADDR"),
        )
    return None


def pod_name() -> str:
    """The name of the Kubernetes pod that this process runs in."""
    return os.environ["POD_NAME"]


def kubernetes_service() -> tuple[str, int] | None:
    """Host and port of the Kubernetes API server as pods see it; None outside of a cluster."""
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    return None if host is None else (host, int(os.environ.get("KUBERNETES_SERVICE_PORT", "443")))


def kubeconfig() -> Path:
    """The user's kubeconfig: the first existing file of KUBECONFIG, or the one in the home folder."""
    given = [Path(name) for name in os.environ.get("KUBECONFIG", "").split(os.pathsep) if name]
    return next((path for path in given if path.exists()), given[0] if given else Path.home() / ".kube" / "config")


def secret(value: str | None) -> str | None:
    """The secret that a key of the run file holds, or that the environment variable it names holds; None if there is none."""
    named = None if value is None else ENVIRONMENT.fullmatch(value)
    return value if named is None else os.environ.get(named[1]) or None


def visible_gpus() -> str | None:
    """The user's CUDA_VISIBLE_DEVICES; None if not set."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def environment_with_gpus(first: int, count: int) -> dict[str, str]:
    """The environment of a process that sees only so many of the GPUs that this one sees, from the first on."""
    visible = visible_gpus()
    names = visible.split(",") if visible is not None else [str(number) for number in range(first + count)]
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(names[first : first + count])}


def shell_completes() -> bool:
    """Whether a shell asks what may come next on the command line."""
    return "_PHALANX_COMPLETE" in os.environ


def config_folder() -> Path:
    """The user's configuration folder of this program."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "phalanx"


def python_env() -> dict[str, str]:
    """An environment in which another Python process finds this package, even from a checkout that is not installed."""
    path = python_path()
    return dict(os.environ) | ({} if path is None else {"PYTHONPATH": path})


def python_path() -> str | None:
    """PYTHONPATH with which another Python process finds this package; None if it does without."""
    home = str(Path(__file__).parents[2])
    installed = home in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    return os.pathsep.join(filter(None, [None if installed else home, os.environ.get("PYTHONPATH")])) or None


def forwarded() -> dict[str, str]:
    """The user's settings of storage, credentials and communication, which the agents on other hosts need, too."""
    return {name: value for name, value in os.environ.items() if name.startswith(_FORWARDED)}


def adopt(variables: Mapping[str, str]) -> None:
    """Set variables of another host's environment that this one does not have."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def ssh_server_address() -> str | None:
    """The address of this host by which an ssh client has reached it."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    return words[2] if len(words) == 4 else None


def worker_env(plan: Plan, bind: str = "127.0.0.1") -> dict[str, str]:
    """The environment of a plan's workers on a node whose address is `bind`."""
    ours = {
        "OMP_NUM_THREADS": str(plan.threads),
        "MKL_NUM_THREADS": str(plan.threads),
    } | _NVML
    if plan.device == "cpu":
        # If malloc keeps freed activations instead of returning them to the system, a step has thousands fewer page faults and
        # takes up to a tenth less time. With parts of the model gathered and freed as well, mixed sizes fragment the heap
        # (by gigabytes, measured with ZeRO-3), so large blocks are returned.
        layout = plan.layout
        mixes = layout.shard * layout.tensor * layout.context * layout.expert > 1
        ours |= {"MALLOC_MMAP_THRESHOLD_": str(1 << 20 if mixes else 1 << 30), "MALLOC_TRIM_THRESHOLD_": str(4 << 30)}
    return program_env(bind) | ours


def program_env(bind: str) -> dict[str, str]:
    """The environment of any program on a node whose address is `bind`. Interfaces that the user has set stay."""
    interface = interface_of(bind)
    # NCCL takes a name for a prefix unless "=" precedes it. InfiniBand and RoCE are not affected: NCCL_IB_HCA selects their ports.
    sockets = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"} if interface else {}
    if ":" in bind:
        sockets["NCCL_SOCKET_FAMILY"] = "AF_INET6"
    return sockets | python_env() | {"PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramRank:
    """A rank of a program that `phalanx launch` has started."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    node: int
    nodes: int
    host: str
    """Address of rank 0."""
    ports: tuple[int, int]
    """Free ports there: for torch's store, and for JAX's coordinator."""
    restarts: int
    run_dir: str
    progress: str

    def variables(self) -> dict[str, str]:
        """What torchrun would set, what JAX reads, and our own."""
        ranks = {
            "RANK": self.rank,
            "WORLD_SIZE": self.ranks,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_ranks,
            "GROUP_RANK": self.node,
            "NODE_RANK": self.node,
            "GROUP_WORLD_SIZE": self.nodes,
            "MASTER_PORT": self.ports[0],
            "TORCHELASTIC_RESTART_COUNT": self.restarts,
            "JAX_NUM_PROCESSES": self.ranks,
            "JAX_PROCESS_ID": self.rank,
        }
        return {name: str(number) for name, number in ranks.items()} | {
            "MASTER_ADDR": self.host,
            "TORCHELASTIC_RUN_ID": Path(self.run_dir).name,
            "JAX_COORDINATOR_ADDRESS": f"[{self.host}]:{self.ports[1]}" if ":" in self.host else f"{self.host}:{self.ports[1]}",
            "PHALANX_RUN_DIR": self.run_dir,
            "PHALANX_PROGRESS": self.progress,
        }


def rank_environment(rank: ProgramRank, own: Iterable[str]) -> dict[str, str]:
    """The environment of a rank. `own`: the user's variables, as NAME=VALUE."""
    ours = rank.variables()
    if "SLURM_JOB_ID" in os.environ:
        # Slurm's task is the agent. For libraries that look for Slurm, it is as if srun had started the rank.
        tasks = {
            "PROCID": "RANK",
            "LOCALID": "LOCAL_RANK",
            "NODEID": "NODE_RANK",
            "NTASKS": "WORLD_SIZE",
            "NPROCS": "WORLD_SIZE",
        }
        ours |= {f"SLURM_{theirs}": ours[name] for theirs, name in tasks.items()}
        ours |= {"SLURM_STEP_NUM_NODES": ours["GROUP_WORLD_SIZE"], "SLURM_NTASKS_PER_NODE": ours["LOCAL_WORLD_SIZE"]}
    given = {name: value for name, _, value in (entry.partition("=") for entry in own)}
    return dict(os.environ) | ours | given


def use_loopback_only(*, gpus: bool = False) -> None:
    """Ranks that this process becomes or starts use the loopback interface and, unless `gpus`, no GPU."""
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"} | ({"NCCL_SOCKET_IFNAME": "=lo"} if gpus else {"CUDA_VISIBLE_DEVICES": ""})


def count_gpus_without_cuda() -> None:
    """torch counts GPUs through NVML from now on, which does not initialize CUDA: this process can fork ranks that use GPUs."""
    os.environ |= _NVML


def limit_retries() -> None:
    """Make MLflow's client report a server that is away after seconds instead of minutes, unless the user has set its patience."""
    for name, value in (("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1"), ("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")):
        os.environ.setdefault(name, value)


def limit_to_one_thread() -> None:
    """Make libraries that are imported from now on use one thread each."""
    os.environ |= {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "ARROW_IO_THREADS": "1"}


def use_virtual_devices(count: int) -> None:
    """JAX, if it is imported from now on, sees so many devices on the CPU, and no others."""
    others = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
    flags = " ".join([*others, f"--xla_force_host_platform_device_count={count}"])
    os.environ |= {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}


def leave_gpu_memory() -> None:
    """JAX, if it is imported from now on, takes memory of a GPU when it needs it, instead of three quarters at its start. What the user has set stays."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
