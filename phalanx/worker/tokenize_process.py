"""The program of a tokenizer process, started by `data/ingest`. Not for people.

python -c "… from phalanx.worker.tokenize_process import main; main()" HOME CONNECTION_FD PARENT_PID
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

from phalanx.host.env import limit_to_one_thread
from phalanx.host.process_tree import die_with


def main() -> None:
    connection, parent = map(int, sys.argv[2:4])
    die_with(parent)
    limit_to_one_thread()  # before the libraries are loaded: there is one process per core
    from phalanx.data.pieces import serve

    serve(Connection(connection))
