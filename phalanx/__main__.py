"""The command `phalanx`, `python -m phalanx`, and so `torchrun -m phalanx`."""

from __future__ import annotations

import os
import signal


def main() -> None:
    # Ctrl-C while the command is still being imported ends it without a traceback. The command takes over when it has its verb.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from phalanx.cli.main import main as command

    command()


if __name__ == "__main__":
    main()
