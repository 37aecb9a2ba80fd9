"""The process that tokenises pieces of a source, started by `data/pool`. Not for people.

python -c "… from phalanx.cli.piecework import main; main()" HOME CONNECTION_FD PARENT_PID
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

from phalanx.launch.env import one_thread
from phalanx.launch.family import die_with


def main() -> None:
    connection, parent = map(int, sys.argv[2:4])
    die_with(parent)
    one_thread()  # before the libraries that look for it are loaded; there are as many processes as cores are to be used
    from phalanx.data.piecework import serve

    serve(Connection(connection))
