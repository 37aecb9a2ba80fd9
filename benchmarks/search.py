"""CPU time of the planner's search: Llama 3 405B and DeepSeek-V3 on large clusters, over all legal layouts.

python benchmarks/search.py
"""

from __future__ import annotations

import resource
import time

start = time.process_time()

from phalanx.planning.machines.hardware import hardware  # noqa: E402
from phalanx.planning.planner import search  # noqa: E402
from phalanx.spec.model import PRESETS  # noqa: E402
from phalanx.spec.run import Cluster, Precision, Run, Train  # noqa: E402

JOBS = (
    ("llama3-405b", 16384, 2048, 8192, 1.0),
    ("llama3-405b", 8192, 2048, 8192, 1.0),
    ("deepseek-v3", 2048, 15360, 4096, 5.0),
    ("deepseek-v3", 16384, 15360, 4096, 5.0),
)
"""Model, GPUs, sequences in a batch, tokens in a sequence, and the limit of the search in seconds."""


def main() -> None:
    print(f"imports: {time.process_time() - start:.2f} s of CPU time")
    for model, gpus, batch, length, limit in JOBS:
        train = Train(batch=batch, sequence_length=length, tokens=15 * 10**12)
        cluster = Cluster(gpu="h100-sxm", gpus=gpus)
        run = Run(model=PRESETS[model], train=train, precision=Precision(compute="bf16"), cluster=cluster)
        result = search(run, hardware(run, None))
        best = result.best
        print(
            f"{model} on {gpus:,} GPUs: {result.seconds:.2f} s of CPU time (at most {limit:.0f}); {result.considered:,} legal layouts, "
            f"{result.timed:,} timed one by one\n"
            f"    {best.layout}\n    micro-batch {best.micro_batch}, recompute {best.recompute}: {best.seconds:.2f} s a step, MFU {best.mfu or 0:.1%}, "
            f"{best.bytes / 2**30:.1f} GiB"
        )
    print(f"largest memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
