"""`phalanx tokenize` next to a plain loop over `tokenizers`, on the same file.

    python benchmarks/tokenizing.py [--megabytes 150] [--rounds 3]

Writes a JSONL file and a BPE tokenizer, then alternates: the plain loop (read lines, json.loads, `encode_batch`, discard the ids) in one
thread, and `phalanx tokenize --processes 1` on the same file; then two processes of each on two cores, the loop on half of the file
each. Prints tokens per second and per CPU second and, on the last line, the ratios (ours over the loop's) as JSON. Both alternate
because the speed of a machine drifts; on a shared machine use the CPU seconds, which include start-up.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ONE_THREAD = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
LOOP = """
import json, sys, time
from tokenizers import Tokenizer
path, tokenizer, start, stop = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
words = Tokenizer.from_file(tokenizer)
begin, tokens, texts = time.perf_counter(), 0, []
with open(path, "rb") as file:
    file.seek(start)
    while file.tell() < stop:
        lines = file.readlines(1 << 20)
        texts = [json.loads(line)["text"] for line in lines]
        tokens += sum(len(encoding.ids) for encoding in words.encode_batch(texts))
print(json.dumps({"tokens": tokens, "seconds": time.perf_counter() - begin}))
"""


def make(folder: Path, megabytes: int) -> tuple[Path, Path, int]:
    """Writes the text and the tokenizer; returns both files, and the offset of the first line after the middle of the text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    rng = random.Random(0)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    weights = [1 / (rank + 2) for rank in range(len(letters))]
    vocabulary = ["".join(rng.choices(letters, weights, k=min(14, 1 + int(rng.expovariate(0.25))))) for _ in range(50_000)]
    odds = [1 / (rank + 3) for rank in range(len(vocabulary))]  # the distribution of words in a language
    path, size = folder / "text.jsonl", 0
    middle = 0
    with path.open("w") as file:
        while size < megabytes << 20:
            words = rng.choices(vocabulary, odds, k=1 + int(rng.expovariate(1 / 400)))
            for index in range(0, len(words), 12):
                words[index] = words[index].capitalize() + rng.choice([",", ".", " –", "!", " 42"])
            size += file.write(json.dumps({"id": size, "text": " ".join(words)}) + "\n")
            if not middle and size >= megabytes << 19:
                middle = size
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=32_000,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with path.open() as file:
        tokenizer.train_from_iterator((json.loads(line)["text"] for line, _ in zip(file, range(5000), strict=False)), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return path, folder / "tokenizer.json", middle


def children() -> float:
    """CPU seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def loop(path: Path, tokenizer: Path, cuts: list[int]) -> tuple[float, float]:
    """Tokens per second and per CPU second of plain loops, one for each range between cuts, at the same time."""
    command = [sys.executable, "-c", LOOP, str(path), str(tokenizer)]
    before = children()
    started = [
        subprocess.Popen([*command, str(a), str(b)], stdout=subprocess.PIPE, env=os.environ | ONE_THREAD)
        for a, b in itertools.pairwise(cuts)
    ]
    ended = [json.loads(process.communicate()[0]) for process in started]
    tokens = sum(result["tokens"] for result in ended)
    return tokens / max(result["seconds"] for result in ended), tokens / (children() - before)


def ours(path: Path, tokenizer: Path, processes: int) -> tuple[float, float]:
    """Tokens per second and per CPU second of `phalanx tokenize`."""
    with tempfile.TemporaryDirectory(dir=path.parent) as out:
        command = [sys.executable, "-m", "phalanx", "tokenize", str(path), f"{out}/tokens", "--tokenizer", str(tokenizer)]
        before = children()
        done = subprocess.run([*command, "--processes", str(processes), "--json"], stdout=subprocess.PIPE, check=True)
        summary = json.loads(done.stdout.splitlines()[-1])
        tokens = summary["tokens"] - summary["documents"]  # the loop adds no end tokens
        return tokens / summary["seconds"], tokens / (children() - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path, tokenizer, middle = make(Path(folder), args.megabytes)
        size = path.stat().st_size
        ratios: dict[str, list[float]] = {}
        for round_ in range(args.rounds):
            for name, cuts in {"one": [0, size], "two": [0, middle, size]}.items():
                plain, own = loop(path, tokenizer, cuts), ours(path, tokenizer, len(cuts) - 1)
                for unit, theirs, mine in zip(("second", "cpu_second"), plain, own, strict=True):
                    ratios.setdefault(f"{name}_per_{unit}", []).append(mine / theirs)
                    print(
                        f"round {round_}, {name}: tokens per {unit}: plain {theirs:,.0f}, phalanx {mine:,.0f}, {mine / theirs:.2f}×",
                        flush=True,
                    )
    print(json.dumps({name: round(statistics.median(values), 3) for name, values in ratios.items()}))


if __name__ == "__main__":
    main()
