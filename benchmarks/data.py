"""Opening and reading a large corpus: time and resident memory of opening, tokens per second of the loader, and its share of a step.

    python benchmarks/data.py --folder FOLDER [--gigabytes 10] [--documents 5000000] [--consumed TOKENS_PER_S]

Writes token files of random ids into FOLDER, opens them like a run, each time in a new process, and removes them. Compares with the tokens
per second that the quickstart consumes: measured by running it, or args.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from phalanx.data.dataset import open_dataset
from phalanx.data.loader import Loader, ReplicaShare, SampleReader
from phalanx.data.token_files import Part, write_meta
from phalanx.data.tokenizer import ByteTokenizer
from phalanx.events.log import read_events
from phalanx.events.records import Step
from phalanx.spec.run import Data

PART = 128 << 20  # tokens
FAR = 10**9
QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart.toml"


def make_corpus(folder: Path, tokens: int, documents: int) -> None:
    """Writes token files with an index: documents of random lengths, each followed by the end token."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    noise = rng.integers(0, 256, PART, dtype="<u2")
    parts: list[Part] = []
    for first in range(0, tokens, PART):
        size = min(PART, tokens - first)
        count = max(1, documents * size // tokens)
        bounds = np.unique(np.concatenate([[0, size], rng.integers(1, size, count - 1)])).astype("<i8")
        ids = noise[:size].copy()
        ids[bounds[1:] - 1] = ByteTokenizer.end
        name = f"part-{len(parts):06d}"
        ids.tofile(folder / f"{name}.tokens")
        bounds.tofile(folder / f"{name}.index")
        parts.append(Part(name=name, documents=len(bounds) - 1, tokens=size, sha256=f"{tokens} {documents} {name}"))
    write_meta(folder, ByteTokenizer(), parts, masked=False, skipped={})


def tokens_per_second(
    samples: SampleReader, share: ReplicaShare, length: int, start: int = 0, seconds: float = 3.0
) -> tuple[float, float]:
    """Tokens that the loader delivers per second, and per second of CPU time, which other programs do not affect."""
    with contextlib.closing(Loader(samples, share, start=start, prefetch=2, prepare=lambda batch: batch)) as steps:
        next(steps)
        count, start_time, own = 0, time.perf_counter(), time.process_time()
        while time.perf_counter() - start_time < seconds:
            next(steps)
            count += 1
        tokens = count * share.batch // share.replicas * length
        return tokens / (time.perf_counter() - start_time), tokens / (time.process_time() - own)


def measure(folder: Path, packing: str, length: int, seconds: float) -> dict[str, float]:
    """Opens a corpus and reads from it, in this process; called in a new process."""
    before = resident()
    began = time.perf_counter()
    data = Data(source="tokens", paths=(str(folder),), packing=packing, cache=str(folder / "cache"))  # type: ignore[arg-type]
    dataset = open_dataset(data, length, seed=0)
    measured = {"seconds": time.perf_counter() - began, "python_mb": before, "opened_mb": resident()}
    if seconds:
        share = ReplicaShare(batch=max(1, 1 << 15 >> length.bit_length()), replica=0, replicas=1, micro_batch=1)
        for name, start in (("tokens_per_s", 0), ("tokens_per_s_far", FAR)):
            measured[name], _ = tokens_per_second(dataset.train, share, length, start, seconds)
        measured["read_mb"] = resident()
    return measured | {"waste": dataset.padding_ratio}


def resident() -> float:
    """Peak memory of this process in megabytes. A child starts with its parent's value, so the parent must stay small."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def in_new_process(folder: Path, packing: str, length: int, seconds: float) -> dict[str, float]:
    command = [sys.executable, "-P", __file__, "--measure", packing, "--length", str(length), "--seconds", str(seconds)]
    out = subprocess.run([*command, "--folder", str(folder)], check=True, stdout=subprocess.PIPE)
    measured: dict[str, float] = json.loads(out.stdout)
    return measured


def quickstart_consumption() -> float:
    """Tokens per second of the quickstart, as the median over its steps."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "phalanx", "train", str(QUICKSTART), "train.steps=60", "--run-dir", f"{directory}/run"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        steps = [event for event in read_events(Path(directory) / "run" / "events.jsonl") if isinstance(event, Step)]
    return float(np.median([step.tokens_per_second for step in steps]))


def compare_with_quickstart(consumed: float) -> None:
    """Tokens per second of the loader on the quickstart's text, for the only rank and for one of four."""
    samples = open_dataset(Data(), 128, seed=0).train
    print(f"\nthe quickstart consumes {consumed:,.0f} tokens/s on all ranks")
    for replicas in (1, 4):
        share = ReplicaShare(batch=16, replica=0, replicas=replicas, micro_batch=4)
        rate, own = tokens_per_second(samples, share, 128)
        print(
            f"  the loader of one of {replicas} ranks delivers {rate:,.0f} tokens/s, {rate / consumed:.0f}× what all ranks "
            f"consume, and takes {consumed / replicas / own:.2%} of its rank's time"
        )


def step_time(blocks: int = 20, steps: int = 10) -> None:
    """Steps of the quickstart in one process, alternating between the loader and batches that are ready in memory."""
    import statistics

    import torch

    import phalanx as px
    from phalanx.training.trainer import Trainer

    torch.set_num_threads(1)
    run = px.load(QUICKSTART, ["layout.data=1", "cluster.device=cpu"])
    trainer = px.trainer(run)
    assert isinstance(trainer, Trainer)
    ready = [trainer.feed.next(0) for _ in range(8)]
    seconds: dict[str, list[float]] = {"loader": [], "ready": []}
    for block in range(2 * blocks):
        source = ("loader", "ready")[block % 2]
        for index in range(steps):
            began = time.perf_counter()
            batches = trainer.feed.next(0) if source == "loader" else ready[index % len(ready)]
            trainer.stepper.step(batches, trainer.optimizer, 1e-3, lambda: False)
            if index > 1:  # the first steps of a block still see effects of the other source
                seconds[source].append(time.perf_counter() - began)
    trainer.close()
    added = statistics.median(seconds["loader"]) / statistics.median(seconds["ready"]) - 1
    print(f"  a step with the loader takes {added:+.2%} more than with ready batches, by the medians of {blocks * (steps - 2)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--documents", type=int, nargs="+", default=[5_000_000])
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 2048])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--consumed", type=float, help="tokens/s of the quickstart; default: run it")
    parser.add_argument("--measure", choices=["stream", "best-fit"], help=argparse.SUPPRESS)
    parser.add_argument("--length", type=int, default=2048, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.folder, args.measure, args.length, args.seconds)))
        return
    for documents in args.documents:
        folder = args.folder / "benchmark-corpus"
        start = time.perf_counter()
        try:
            process = multiprocessing.get_context("spawn").Process(
                target=make_corpus, args=(folder, int(args.gigabytes * 1e9 / 2), documents)
            )
            process.start()
            process.join()
            print(f"\n{args.gigabytes:g} GB, {documents:,} documents, written in {time.perf_counter() - start:.0f} s")
            for packing in ("stream", "best-fit"):
                for length in args.lengths:
                    first = in_new_process(folder, packing, length, 0.0)  # the first opening computes the best-fit packing
                    again = in_new_process(folder, packing, length, args.seconds)
                    print(
                        f"  {packing:8} {length:5}: first opened in {first['seconds']:.2f} s with {first['opened_mb']:.0f} MB, "
                        f"again in {again['seconds']:.2f} s with {again['opened_mb']:.0f} MB (Python and numpy alone "
                        f"{again['python_mb']:.0f}), {again['read_mb']:.0f} MB after reading {again['tokens_per_s'] / 1e6:.1f} M "
                        f"tokens/s, {again['tokens_per_s_far'] / 1e6:.1f} M from sample 10⁹ on, padding {again['waste']:.2%}"
                    )
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    compare_with_quickstart(args.consumed or quickstart_consumption())
    step_time()


if __name__ == "__main__":
    main()
