"""A loop of one's own around the trainer: every call of it is there to be made by hand.

    python examples/own_loop.py

Under `torchrun --nproc-per-node 2 examples/own_loop.py` the same program is one of two ranks.
"""

from pathlib import Path

import phalanx as px


def main() -> None:
    run = px.load(Path(__file__).parent / "quickstart.toml", ["train.steps=20"])
    trainer = px.trainer(run, checkpoints="runs/own-loop/checkpoints")
    trainer.restore()  # goes on from the newest checkpoint there, if there is one
    while not trainer.finished:
        taken = trainer.step()
        if taken is None:  # told to stop: nothing was changed
            break
        print(f"step {taken.step}: loss {taken.loss:.4f}")
    print(f"held-out loss {trainer.evaluate().loss:.4f}")
    print(f"saved {trainer.save().path}")
    trainer.close()


if __name__ == "__main__":
    main()
