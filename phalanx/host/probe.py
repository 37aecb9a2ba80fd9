"""Detects the hardware of this computer without importing torch: cores, memory, vector width, GPUs, and its measured profile."""

from __future__ import annotations

import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from phalanx.host.env import visible_gpus
from phalanx.host.machine_profile import read_profile
from phalanx.host.process_tree import run_program
from phalanx.spec.plan import Gpu, Machine

_SMI_TIMEOUT = 10.0  # seconds; without persistence mode the driver wakes every GPU first


def this_machine() -> Machine:
    """This computer, with the GPUs that the user lets programs see."""
    return probe(visible_gpus())


def probe(visible: str | None = None, *, root: Path = Path("/")) -> Machine:
    """Describe this computer.

    `visible` is the text of CUDA_VISIBLE_DEVICES, None where it is not set; `root` is where /proc and /sys are.
    """
    cpuinfo = _fields(root / "proc/cpuinfo")
    memory = _memory(root)
    machine = Machine(
        host=socket.gethostname(),
        cpu=processor_name(root),
        cores=_cores(root),
        memory=memory,
        core_flops=_core_flops(cpuinfo, root),
        scalar=_scalar(cpuinfo),
        gpus=_gpus(visible, memory),
    )
    return replace(machine, measured=read_profile(machine))


def processor_name(root: Path = Path("/")) -> str:
    """The model of this computer's processor."""
    cpuinfo = _fields(root / "proc/cpuinfo")
    return cpuinfo.get("model name") or cpuinfo.get("Model") or os.uname().machine


def driver_problem(*, root: Path = Path("/")) -> str | None:
    """A sentence on what is wrong with the NVIDIA driver; None without a driver, or with a healthy one."""
    if shutil.which("nvidia-smi") is None:
        if not (root / "proc/driver/nvidia").exists():
            return None
        return (
            "The NVIDIA driver is loaded but nvidia-smi is not on PATH, so GPUs cannot be listed; install the driver's "
            "utilities, or start the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility."
        )
    _, failure = _smi("--query-gpu=name", "--format=csv,noheader")
    if failure is None:
        return None
    return f"nvidia-smi fails ({failure}), so no GPU can be used; reload or reinstall the NVIDIA driver, then reboot."


def driver_version(*, root: Path = Path("/")) -> str | None:
    """Version of the NVIDIA kernel driver; None without one."""
    try:
        first = (root / "proc/driver/nvidia/version").read_text(errors="replace").partition("\n")[0]
    except OSError:
        return None
    found = re.search(r"\b\d+(?:\.\d+)+", first)
    return found[0] if found else None


def gpu_links() -> str | None:
    """The matrix of links between GPUs as `nvidia-smi topo -m` prints it; None if it fails."""
    text, _ = _smi("topo", "-m")
    return text


def _fields(path: Path) -> dict[str, str]:
    """The `name : value` lines of the first processor; the others repeat them."""
    try:
        first = path.read_text(errors="replace").partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, colon, value in pairs if colon}


def _cgroups(root: Path) -> Iterator[Path]:
    """The cgroup v2 folders of this process, innermost first. Each may set a limit."""
    top = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    inner = next((line[3:] for line in lines if line.startswith("0::")), "/")
    folder = top / inner.strip("/")
    yield folder
    while folder != top and top in folder.parents:
        folder = folder.parent
        yield folder


def _cgroup_values(root: Path, name: str) -> Iterator[list[str]]:
    for folder in _cgroups(root):
        try:
            words = (folder / name).read_text().split()
        except OSError:
            continue  # the root folder has no limits, and a container may hide the others
        if words and words[0] != "max":
            yield words


def _cores(root: Path) -> int:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # A quota is CPU time per period. Half a core can still run a rank, so round up.
    quotas = [-(-int(quota) // int(period)) for quota, period in _cgroup_values(root, "cpu.max")]
    return max(1, min([allowed, *quotas]))


def _memory(root: Path) -> int:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(int(limit[0]) for limit in _cgroup_values(root, "memory.max"))])


def _core_flops(cpuinfo: dict[str, str], root: Path) -> float | None:
    clock, per_cycle = _clock(cpuinfo, root), _flops_per_cycle(cpuinfo)
    if clock is None or per_cycle is None:
        return None
    # The kernel and Machine.cores count hardware threads; those of one core share its vector units.
    siblings, physical = int(cpuinfo.get("siblings", 1)), int(cpuinfo.get("cpu cores", 1))
    return clock * per_cycle / max(1, siblings // max(1, physical))


def _clock(cpuinfo: dict[str, str], root: Path) -> float | None:
    """Highest clock in Hz, from the most reliable source available."""
    try:
        return float((root / "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").read_text()) * 1e3
    except (OSError, ValueError):
        pass  # virtual machines show no frequency driver
    if named := re.search(r"@\s*([\d.]+)\s*GHz", cpuinfo.get("model name", "")):
        return float(named[1]) * 1e9
    now = cpuinfo.get("cpu MHz", "")
    return float(now) * 1e6 if re.fullmatch(r"[\d.]+", now) else None


def _flops_per_cycle(cpuinfo: dict[str, str]) -> int | None:
    """fp32 operations per core and cycle, assuming two vector units with fused multiply-add."""
    flags = _flags(cpuinfo)
    if "avx512f" in flags:
        zen4 = cpuinfo.get("vendor_id") == "AuthenticAMD" and cpuinfo.get("cpu family") == "25"
        return 32 if zen4 else 64  # Zen 4 runs a 512-bit operation as two halves
    if {"avx2", "fma"} <= flags:
        return 32
    if "avx" in flags:
        return 16  # one multiplier and one adder, 8 lanes each
    if "sse" in flags:
        return 8
    return 16 if "asimd" in flags else None


def _scalar(cpuinfo: dict[str, str]) -> tuple[str, ...]:
    """Number formats computed without vector instructions: bf16 on ARM cores up to Neoverse N1. Old x86 cores are not measured."""
    flags = _flags(cpuinfo)
    return ("bf16",) if "asimd" in flags and not flags & {"bf16", "svebf16"} else ()


_INSTRUCTIONS = {
    "bf16": {"avx512_bf16", "amx_bf16", "bf16", "svebf16"},
    "fp16": {"avx512_fp16", "amx_fp16", "asimdhp"},
}
"""Flags of processors that multiply in a format. Without them, torch's products on one x86 core (AVX-512) take 4.5 times as long in bf16 as in fp32
and 218 times in fp16; on a Neoverse N1, 20 to 30 times in bf16."""


def lacks_instructions(compute: str, cpuinfo: dict[str, str] | None = None) -> bool:
    """Whether this CPU has no instructions for a number format. fp8 is emulated everywhere, with bf16 around it."""
    flags = _flags(_fields(Path("/proc/cpuinfo")) if cpuinfo is None else cpuinfo)
    return compute == "fp8" or (bool(flags) and not flags & _INSTRUCTIONS.get(compute, flags))


def _flags(cpuinfo: dict[str, str]) -> set[str]:
    return set(cpuinfo.get("flags", cpuinfo.get("Features", "")).split())


def _smi(*arguments: str) -> tuple[str | None, str | None]:
    """Output of nvidia-smi, or the reason why it fails."""
    if shutil.which("nvidia-smi") is None:
        return None, "it is not installed"
    try:
        done = run_program(["nvidia-smi", *arguments], _SMI_TIMEOUT)
    except OSError as error:
        return None, str(error)
    if done.returncode != 0:
        output = (done.stdout + done.stderr).strip().splitlines()
        return None, output[0].strip() if output else f"exit status {done.returncode}"
    return done.stdout, None


def _gpus(visible: str | None, host_memory: int) -> tuple[Gpu, ...]:
    text, _ = _smi("--query-gpu=name,memory.total,uuid", "--format=csv,noheader,nounits")
    rows = [[cell.strip() for cell in line.split(",")] for line in (text or "").splitlines()]
    rows = [row for row in rows if len(row) >= 2]  # "No devices were found" is one cell
    shown = rows if visible is None else _visible(rows, visible.split(","))
    # A GPU that shares the host's memory prints "[N/A]".
    return tuple(Gpu(name=row[0], memory=int(row[1]) * 2**20 if row[1].isdigit() else host_memory) for row in shown)


def _visible(rows: list[list[str]], wanted: Iterable[str]) -> list[list[str]]:
    """The rows that CUDA would show: selected by index or UUID prefix, in that order, up to the first invalid entry."""
    shown: list[list[str]] = []
    for word in (w.strip() for w in wanted):
        if word.isdigit():
            match = rows[int(word) : int(word) + 1]
        else:
            match = [row for row in rows if word and len(row) > 2 and row[2].startswith(word)][:1]
        if not match:
            break
        shown += match
    return shown


def write_speed(folder: Path, size: int) -> float:
    """Bytes per second of writing `size` bytes to a folder's disk, without caches. Raises OSError if the folder is not writable."""
    block = os.urandom(1 << 20)  # random bytes: a compressing file system would look too fast
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".phalanx-test-") as file:
        begin = time.perf_counter()
        for _ in range(size // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return size / (time.perf_counter() - begin)
