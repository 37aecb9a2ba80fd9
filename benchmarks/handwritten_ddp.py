"""A hand-written training loop: DistributedDataParallel, fused AdamW, gradient clipping, batches that are already in memory.

`benchmarks/ddp.py` starts it under torchrun as the reference. It prints the time at the end of each step and nothing else.
"""

from __future__ import annotations

import sys
import time
from itertools import count

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from phalanx.models.decoder import Decoder
from phalanx.spec.load import load


def main(run_file: str) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    run = load(run_file)
    micro, length = run.train.micro_batch or 1, run.train.sequence_length
    model = Decoder(run.model)
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    data = torch.randint(run.model.rows, (64, micro, length + 1))
    positions = torch.arange(length).expand(micro, length)
    for step in count():
        tokens = data[step % len(data)]
        optimizer.zero_grad()
        logits = replica(tokens[:, :-1], positions)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()
        if dist.get_rank() == 0:
            print(f"{time.time():.6f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
