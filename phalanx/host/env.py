"""The only place that reads and makes environment variables. Used by the launcher, the worker and the CLI."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from phalanx.spec.plan import Place, Plan


def torchrun_place() -> Place | None:
    """Where torchrun has put this process; None if torchrun did not start it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return Place(
        rank=int(os.environ["RANK"]), ranks=int(os.environ["WORLD_SIZE"]), local_rank=int(os.environ.get("LOCAL_RANK", "0"))
    )


def visible_gpus() -> str | None:
    """The GPUs this process may use, as the person has limited them."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def config_folder() -> Path:
    """Where this person's programs keep what they are told, ours among them."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "phalanx"


def python_env() -> dict[str, str]:
    """The environment in which another Python finds this very package, also in a checkout that was never installed."""
    home = str(Path(__file__).parents[2])
    if home in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        return dict(os.environ)
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))}


def worker_env(plan: Plan) -> dict[str, str]:
    """The environment of the workers of a plan on this machine."""
    ours = {
        "OMP_NUM_THREADS": str(plan.threads),
        "MKL_NUM_THREADS": str(plan.threads),
        # All ranks are on this machine: nothing listens on, or depends on the name of, an outside interface.
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        # Asking for GPUs through the driver's library leaves CUDA untouched, so ranks can be forked afterwards.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if plan.device == "cpu":
        # Activations come and go with every step. Kept by the allocator instead of handed back to the system, they cost
        # no page faults: thousands fewer in each step, and up to a tenth of its time. Where parts of the model are gathered and
        # let go as well, sizes mix until the heap is full of holes (gigabytes of them, measured with ZeRO-3): there what is
        # large is handed back.
        layout = plan.layout
        mixes = layout.shard * layout.tensor * layout.context * layout.expert > 1
        ours |= {"MALLOC_MMAP_THRESHOLD_": str(1 << 20 if mixes else 1 << 30), "MALLOC_TRIM_THRESHOLD_": str(4 << 30)}
    return python_env() | ours


def use_loopback_only() -> None:
    """Ranks that this process becomes or starts meet on this machine's own interface, and use no GPU."""
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}


def limit_to_one_thread() -> None:
    """Libraries that this process loads from now on use one thread each."""
    os.environ |= {
        "RAYON_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "ARROW_IO_THREADS": "1",
    }
