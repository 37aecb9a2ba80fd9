"""Opening a large corpus and reading from it: seconds and resident memory of opening, tokens per second of the loader, and
what it adds to a step.

    python benchmarks/data.py --folder FOLDER [--gigabytes 10] [--documents 5000000] [--consumed TOKENS_PER_S]

Makes token files of random ids in FOLDER, which needs the room and is emptied of them afterwards, and opens them as a run
would, each time in a fresh process. Beside it stands what the quickstart consumes: measured by running it, or given.
"""

from __future__ import annotations

import argparse
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
from phalanx.data.token_files import META, Part, TokenMeta
from phalanx.data.tokenizer import ByteTokenizer
from phalanx.events.log import read_events
from phalanx.events.records import Step
from phalanx.spec.run import Data

PART = 128 << 20  # tokens
FAR = 10**9
QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart.toml"


def make_corpus(folder: Path, tokens: int, documents: int) -> None:
    """Token files with a real index: documents of many lengths, the end token behind each."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    noise = rng.integers(0, 256, PART, dtype="<u2")
    parts = []
    for first in range(0, tokens, PART):
        size = min(PART, tokens - first)
        count = max(1, documents * size // tokens)
        bounds = np.unique(np.concatenate([[0, size], rng.integers(1, size, count - 1)])).astype("<i8")
        ids = noise[:size].copy()
        ids[bounds[1:] - 1] = ByteTokenizer.end
        name = f"part-{len(parts):06d}"
        ids.tofile(folder / f"{name}.tokens")
        bounds.tofile(folder / f"{name}.index")
        parts.append(Part(name=name, documents=len(bounds) - 1, tokens=size, sha256=""))
    meta = TokenMeta(
        dtype="uint16",
        tokenizer="byte",
        tokenizer_sha256=ByteTokenizer.sha256,
        vocab=ByteTokenizer.vocab,
        end=ByteTokenizer.end,
        masked=False,
        documents=sum(part.documents for part in parts),
        tokens=tokens,
        skipped={},
        parts=tuple(parts),
        fingerprint=f"benchmark {tokens} {documents}",
    )
    (folder / META).write_text(meta.to_json())


def tokens_per_second(
    samples: SampleReader, share: ReplicaShare, length: int, start: int = 0, seconds: float = 3.0
) -> tuple[float, float]:
    """What the loader delivers in a second, and in a second of this process' own time: without what else the machine does."""
    with Loader(samples, share, start=start, prefetch=2, prepare=lambda batch: batch) as steps:
        next(steps)
        taken, began, own = 0, time.perf_counter(), time.process_time()
        while time.perf_counter() - began < seconds:
            next(steps)
            taken += 1
        tokens = taken * share.batch // share.replicas * length
        return tokens / (time.perf_counter() - began), tokens / (time.process_time() - own)


def measure(folder: Path, packing: str, length: int, seconds: float) -> dict[str, float]:
    """Open a corpus and read from it, in this process; called in a fresh one."""
    before = resident()
    began = time.perf_counter()
    data = Data(source="tokens", paths=(str(folder),), packing=packing, cache=str(folder / "cache"))  # type: ignore[arg-type]
    dataset = open_dataset(data, length, seed=0)
    found = {"seconds": time.perf_counter() - began, "python_mb": before, "opened_mb": resident()}
    if seconds:
        share = ReplicaShare(batch=max(1, 1 << 15 >> length.bit_length()), replica=0, replicas=1, micro_batch=1)
        for name, start in (("tokens_per_s", 0), ("tokens_per_s_far", FAR)):
            found[name], _ = tokens_per_second(dataset.train, share, length, start, seconds)
        found["read_mb"] = resident()
    return found | {"waste": dataset.padding_ratio}


def resident() -> float:
    """Most memory this process has had, in megabytes. A child begins with its parent's, so the parent must stay small."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def fresh(folder: Path, packing: str, length: int, seconds: float) -> dict[str, float]:
    command = [sys.executable, "-P", __file__, "--measure", packing, "--length", str(length), "--seconds", str(seconds)]
    out = subprocess.run([*command, "--folder", str(folder)], check=True, stdout=subprocess.PIPE)
    found: dict[str, float] = json.loads(out.stdout)
    return found


def quickstart_consumption() -> float:
    """Tokens per second of the quickstart, by its steps' median."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "phalanx", "train", str(QUICKSTART), "train.steps=60", "--run-dir", f"{directory}/run"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        steps = [event for event in read_events(Path(directory) / "run" / "events.jsonl") if isinstance(event, Step)]
    return float(np.median([step.tokens_per_second for step in steps]))


def compare_with_quickstart(consumed: float) -> None:
    """What the loader delivers of the quickstart's own text, as one rank asks for it and as each of four does."""
    samples = open_dataset(Data(), 128, seed=0).train
    print(f"\nquickstart consumes {consumed:,.0f} tokens/s on all its ranks")
    for replicas in (1, 4):
        share = ReplicaShare(batch=16, replica=0, replicas=replicas, micro_batch=4)
        rate, own = tokens_per_second(samples, share, 128)
        print(
            f"  the loader of one of {replicas} ranks delivers {rate:,.0f} tokens/s, {rate / consumed:.0f}× what all of them "
            f"consume, and takes {consumed / replicas / own:.2%} of its rank's time"
        )


def step_time(blocks: int = 20, steps: int = 10) -> None:
    """Steps of the quickstart in one process, in turns with the loader and with batches that lie ready in memory."""
    import statistics

    import torch

    import phalanx as px

    torch.set_num_threads(1)
    run = px.load(QUICKSTART, ["layout.data=1", "cluster.device=cpu"])
    trainer = px.trainer(run)
    ready = [trainer.feed.next(0) for _ in range(8)]
    seconds: dict[str, list[float]] = {"loader": [], "ready": []}
    for block in range(2 * blocks):
        way = ("loader", "ready")[block % 2]
        for index in range(steps):
            began = time.perf_counter()
            batches = trainer.feed.next(0) if way == "loader" else ready[index % len(ready)]
            trainer.stepper.step(batches, trainer.optimizer, 1e-3, lambda: False)
            if index > 1:  # the turn's first steps find the other way's leftovers
                seconds[way].append(time.perf_counter() - began)
    trainer.close()
    added = statistics.median(seconds["loader"]) / statistics.median(seconds["ready"]) - 1
    print(
        f"  a step with the loader takes {added:+.2%} of one whose batch lies ready, by the medians of {blocks * (steps - 2)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--documents", type=int, nargs="+", default=[5_000_000])
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 2048])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--consumed", type=float, help="tokens/s of the quickstart; left out: it is run")
    parser.add_argument("--measure", choices=["stream", "best-fit"], help=argparse.SUPPRESS)
    parser.add_argument("--length", type=int, default=2048, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(given.folder, given.measure, given.length, given.seconds)))
        return
    for documents in given.documents:
        folder = given.folder / "benchmark-corpus"
        began = time.perf_counter()
        try:
            making = multiprocessing.get_context("spawn").Process(
                target=make_corpus, args=(folder, int(given.gigabytes * 1e9 / 2), documents)
            )
            making.start()
            making.join()
            print(f"\n{given.gigabytes:g} GB, {documents:,} documents, made in {time.perf_counter() - began:.0f} s")
            for packing in ("stream", "best-fit"):
                for length in given.lengths:
                    first = fresh(folder, packing, length, 0.0)  # best-fit is worked out when it is opened for the first time
                    again = fresh(folder, packing, length, given.seconds)
                    print(
                        f"  {packing:8} {length:5}: first opened in {first['seconds']:.2f} s with {first['opened_mb']:.0f} MB, "
                        f"again in {again['seconds']:.2f} s with {again['opened_mb']:.0f} MB (Python and numpy alone "
                        f"{again['python_mb']:.0f}), {again['read_mb']:.0f} MB after reading {again['tokens_per_s'] / 1e6:.1f} M "
                        f"tokens/s, {again['tokens_per_s_far'] / 1e6:.1f} M from sample 10⁹ on, waste {again['waste']:.2%}"
                    )
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    compare_with_quickstart(given.consumed or quickstart_consumption())
    step_time()


if __name__ == "__main__":
    main()
