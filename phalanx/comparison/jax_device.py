"""The device of a trainer that computes with JAX, as the comparison sees it: its steps end before they return, and JAX counts the memory of a GPU."""

from __future__ import annotations

from typing import Any

from phalanx import accelerator
from phalanx.accelerator import Accelerator
from phalanx.comparison.peer_loop import PeerJob
from phalanx.host.env import leave_gpu_memory, use_virtual_devices
from phalanx.spec.errors import RunError


class JaxGpu(Accelerator):
    """The first GPU of JAX. It cannot forget a peak: what building the trainer took counts, too, but is less than a step takes."""

    type = "cuda"

    def __init__(self, device: Any) -> None:
        self._device = device

    def max_memory_allocated(self) -> int:
        return self._counted("peak_bytes_in_use")

    def max_memory_reserved(self) -> int:
        return self._counted("peak_pool_bytes")

    def _counted(self, what: str) -> int:
        counts = self._device.memory_stats() or {}
        return int(counts.get(what, counts.get("peak_bytes_in_use", 0)))


def jax_device(job: PeerJob) -> Accelerator:
    """The device on which JAX computes. Called before anything imports JAX. RunError if it does not see the device of the plan."""
    if job.plan.device == "cpu":
        use_virtual_devices(1)
    else:
        leave_gpu_memory()
    import jax

    from phalanx.xla.compiled import use_cache

    device = jax.devices()[0]
    if job.plan.device == "cuda" and device.platform != "gpu":
        raise RunError(f'JAX sees no GPU, but a device of kind "{device.platform}": install jax with its plugin for CUDA.')
    use_cache(job.run)  # the process of a later turn finds its programs compiled
    return JaxGpu(device) if job.plan.device == "cuda" else accelerator.of("cpu")
