"""The process that tokenises pieces of a source, started by `data/ingest`. Not for people.

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
    limit_to_one_thread()  # before the libraries that look for it are loaded; there are as many processes as cores are to be used
    from phalanx.data.tokenize_piece import serve

    serve(Connection(connection))
