"""A plain DistributedDataParallel script for `phalanx launch`. It knows nothing of Phalanx but the folder in which it keeps its checkpoint.

phalanx launch --ranks-per-node 2 -- python examples/launch_ddp.py --steps 200
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=0.0, help="duration of a step")
    options = parser.parse_args()
    dist.init_process_group("gloo")  # the variables of torchrun say where, and which rank this is
    rank, checkpoint = dist.get_rank(), Path(os.environ["PHALANX_RUN_DIR"]) / "state.pt"
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(32, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step, stop = 0, []
    signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    while step < options.steps:
        data = torch.randn(8, 32, generator=torch.Generator().manual_seed(1000 * step + rank))
        loss = model(data).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        time.sleep(options.seconds)
        ending = torch.tensor([float(bool(stop))])
        dist.all_reduce(ending)  # all ranks leave after the same step
        if rank == 0:
            part = checkpoint.with_suffix(".part")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, part)
            os.replace(part, checkpoint)
            print(f"step {step} loss {loss.item():.6f}", flush=True)
            Path(os.environ["PHALANX_PROGRESS"]).touch()
        if ending.item():
            break
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
