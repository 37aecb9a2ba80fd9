"""A plain JAX script for `phalanx launch`, one process per rank.

phalanx launch --ranks-per-node 2 -- python examples/launch_jax.py --steps 200
"""

from __future__ import annotations

import argparse
import os
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=0.0, help="duration of a step")
    options = parser.parse_args()
    rank, ranks = int(os.environ["JAX_PROCESS_ID"]), int(os.environ["JAX_NUM_PROCESSES"])
    jax.distributed.initialize(os.environ["JAX_COORDINATOR_ADDRESS"], ranks, rank)
    mesh = Mesh(jax.devices(), ("data",))
    batches, everywhere = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())

    @partial(jax.jit, out_shardings=everywhere)
    def update(weights: jax.Array, data: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, gradient = jax.value_and_grad(lambda weights: jnp.square(data @ weights).mean())(weights)
        return weights - 0.1 * gradient, loss

    checkpoint = Path(os.environ["PHALANX_RUN_DIR"]) / "state.npz"
    step, weights = 0, np.random.default_rng(0).standard_normal((32, 32), dtype=np.float32)
    if checkpoint.exists():
        saved = np.load(checkpoint)
        step, weights = int(saved["step"]), saved["weights"]
    weights = jax.device_put(weights, everywhere)
    while step < options.steps:
        local = np.random.default_rng([step, rank]).standard_normal((8, 32), dtype=np.float32)
        weights, loss = update(weights, jax.make_array_from_process_local_data(batches, local))
        loss = float(loss.addressable_data(0))
        step += 1
        time.sleep(options.seconds)
        if rank == 0:
            part = checkpoint.with_name("part.npz")
            np.savez(part, step=step, weights=np.asarray(weights))
            os.replace(part, checkpoint)
            print(f"step {step} loss {loss:.6f}", flush=True)
        Path(os.environ["PHALANX_PROGRESS"]).touch()
    multihost_utils.sync_global_devices("end")


if __name__ == "__main__":
    main()
