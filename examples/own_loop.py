"""A custom training loop around `Trainer`: restore, step, evaluate, save.

python examples/own_loop.py [key=value …]
torchrun --nproc-per-node 2 examples/own_loop.py   # the same program on two ranks
"""

import sys
from pathlib import Path

import phalanx as px


def main() -> None:
    run = px.load(Path(__file__).parent / "quickstart.toml", ["train.steps=20", *sys.argv[1:]])
    trainer = px.trainer(run, checkpoints="runs/own-loop/checkpoints")
    trainer.restore()  # continues from the newest checkpoint, if there is one
    while not trainer.finished:
        taken = trainer.step()
        if taken is None:  # a stop was requested; the step was not taken
            break
        print(f"step {taken.step}: loss {taken.loss:.4f}")
    print(f"held-out loss {trainer.evaluate().loss:.4f}")
    print(f"saved {trainer.save().path}")
    trainer.close()


if __name__ == "__main__":
    main()
