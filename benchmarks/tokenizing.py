"""`phalanx tokenize` against a bare loop over `tokenizers`, side by side on the same file.

    python benchmarks/tokenizing.py [--megabytes 150] [--rounds 3]

Makes a JSONL file and a BPE tokenizer, then takes turns: the bare loop (read lines, json.loads, `encode_batch`, ids thrown
away) in one thread, `phalanx tokenize --processes 1` on the same file; then two of each at once on two cores, the loop on a
half each. Prints tokens per second and per second of CPU and, as the last line, the ratios (ours to the loop's) as JSON. Turns
are taken because a machine's speed drifts; CPU seconds are what to look at where others use it too (they include start-up).
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
    """The file, the tokenizer and the byte of the file's middle where a line begins."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    dice = random.Random(0)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    weights = [1 / (rank + 2) for rank in range(len(letters))]
    vocabulary = ["".join(dice.choices(letters, weights, k=min(14, 1 + int(dice.expovariate(0.25))))) for _ in range(50_000)]
    odds = [1 / (rank + 3) for rank in range(len(vocabulary))]  # as words of a language are distributed
    path, size = folder / "text.jsonl", 0
    middle = 0
    with path.open("w") as file:
        while size < megabytes << 20:
            words = dice.choices(vocabulary, odds, k=1 + int(dice.expovariate(1 / 400)))
            for place in range(0, len(words), 12):
                words[place] = words[place].capitalize() + dice.choice([",", ".", " –", "!", " 42"])
            size += file.write(json.dumps({"id": size, "text": " ".join(words)}) + "\n")
            if not middle and size >= megabytes << 19:
                middle = size
    words_file = Tokenizer(models.BPE())
    words_file.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words_file.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=32_000,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with path.open() as file:
        words_file.train_from_iterator((json.loads(line)["text"] for line, _ in zip(file, range(5000), strict=False)), trainer)
    words_file.save(str(folder / "tokenizer.json"))
    return path, folder / "tokenizer.json", middle


def children() -> float:
    """Seconds of CPU that ended processes of ours, and theirs, have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def loop(path: Path, tokenizer: Path, cuts: list[int]) -> tuple[float, float]:
    """Tokens per second of a bare loop in each of the ranges between cuts, at the same time; and per second of CPU."""
    command = [sys.executable, "-c", LOOP, str(path), str(tokenizer)]
    before = children()
    started = [
        subprocess.Popen([*command, str(a), str(b)], stdout=subprocess.PIPE, env=os.environ | ONE_THREAD)
        for a, b in itertools.pairwise(cuts)
    ]
    ended = [json.loads(process.communicate()[0]) for process in started]
    tokens = sum(one["tokens"] for one in ended)
    return tokens / max(one["seconds"] for one in ended), tokens / (children() - before)


def ours(path: Path, tokenizer: Path, processes: int) -> tuple[float, float]:
    """The same of the command, from the start of its work to the finished folder."""
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
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path, tokenizer, middle = make(Path(folder), asked.megabytes)
        size = path.stat().st_size
        ratios: dict[str, list[float]] = {}
        for round_ in range(asked.rounds):
            for name, cuts in {"one": [0, size], "two": [0, middle, size]}.items():
                bare, own = loop(path, tokenizer, cuts), ours(path, tokenizer, len(cuts) - 1)
                for unit, theirs, mine in zip(("second", "cpu_second"), bare, own, strict=True):
                    ratios.setdefault(f"{name}_per_{unit}", []).append(mine / theirs)
                    print(
                        f"round {round_}, {name}: tokens per {unit}: bare {theirs:,.0f}, phalanx {mine:,.0f}, {mine / theirs:.2f}×",
                        flush=True,
                    )
    print(json.dumps({name: round(statistics.median(values), 3) for name, values in ratios.items()}))


if __name__ == "__main__":
    main()
