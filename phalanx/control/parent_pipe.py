"""What a supervisor hears from whoever started it: lines on its standard input, whose end is its own. Used by `control/agent`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable


def first_line() -> bytes | None:
    """Byte by byte: what follows is read by the loop. None: nobody is there any more."""
    line = b""
    while not line.endswith(b"\n"):
        if not (one := os.read(0, 1)):
            return None
        line += one
    return line


def follow_lines(loop: asyncio.AbstractEventLoop, hear: Callable[[str], None]) -> None:
    """Every further line, as it comes. Their end ends this process at once, and the workers with it."""
    buffer = bytearray()

    def read() -> None:
        block = os.read(0, 65536)
        if not block:
            os._exit(1)
        buffer.extend(block)
        while (end := buffer.find(b"\n")) >= 0:
            line = bytes(buffer[:end])
            del buffer[: end + 1]
            hear(line.decode())

    loop.add_reader(0, read)
