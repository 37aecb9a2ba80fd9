"""The hosts of a run that its owner lists in a file."""

from __future__ import annotations

import ipaddress
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from phalanx.spec.errors import RunError, did_you_mean

_KEYS = ("bind", "slots", "switch", "port", "user", "python")


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One line of a hosts file."""

    name: str
    """Name or address, as ssh knows it."""
    bind: str | None = None
    """Its address in the run's network. Default: the one by which it is reached."""
    slots: int | None = None
    """Ranks that it can run. Default: its GPUs, or its share of the ranks."""
    switch: str = ""
    """Where it is in the network, from the outermost switch, such as "pod1/leaf3": neighboring ranks are on hosts that sort together."""
    port: int | None = None
    user: str | None = None
    python: str | None = None
    """Python interpreter that has Phalanx. Default: the path of the launcher's own."""


def read_hosts(path: Path) -> list[Host]:
    """The hosts of a file: a name or address per line, with settings such as `slots=4` after it. `#` begins a comment."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise RunError(f"The hosts file {path} cannot be read ({reason}): name a file with one host per line.") from None
    problems: list[str] = []
    hosts: list[Host] = []
    for number, line in enumerate(lines, start=1):
        if words := line.partition("#")[0].split():
            try:
                hosts.append(_host(words))
            except ValueError as error:
                problems.append(f"{path}:{number}: {error}")
    names = Counter((host.user, host.name, host.port, host.bind) for host in hosts)
    problems += [
        f"{path}: {key[1]} is listed {count} times: remove {count - 1} of them." for key, count in names.items() if count > 1
    ]
    if not hosts and not problems:
        problems.append(f"{path} lists no host: write one name or address per line.")
    if problems:
        raise RunError(problems)
    return hosts


def _host(words: list[str]) -> Host:
    name, *settings = words
    if name.startswith("-") or "=" in name:
        raise ValueError(f'"{name}" is not a host: a line begins with a name or an address.')
    user, at, name = name.rpartition("@")
    values: dict[str, str] = {"user": user} if at else {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if key not in _KEYS or not equals or not value:
            known = f"known are {', '.join(_KEYS)}, as in slots=4{did_you_mean(_KEYS, key)}"
            raise ValueError(f'"{setting}" is not a setting of a host: {known}')
        values[key] = value
    numbers = {key: _positive(key, values.pop(key)) for key in ("slots", "port") if key in values}
    if (bind := values.get("bind")) is not None:
        try:
            address = ipaddress.ip_address(bind)
        except ValueError:
            raise ValueError(f"bind={bind} is not an IP address.") from None
        if address.is_unspecified:
            raise ValueError(f"bind={bind} means every interface, so anyone on the network could connect: name one address.")
    return Host(name=name, **values, slots=numbers.get("slots"), port=numbers.get("port"))


def _positive(key: str, text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ValueError(f"{key}={text} is not a positive whole number.")
    return int(text)
