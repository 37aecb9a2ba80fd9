"""A cluster of somebody's own, in a TOML file like those of the catalogue: `cluster.name = "our-cluster.toml"`, or what `phalanx bench`
wrote. Called by `planning/hardware`.

    name = "Our cluster"
    gpu = "h100-sxm"            # of the catalogue, or a table [gpu] with what its files hold
    gpus = 512
    node = "dgx-h100"           # left out: the GPU's usual one
    network = "roce-400"
    storage = 200               # GB/s, of all hosts together
"""

from __future__ import annotations

import math
from typing import Any

from phalanx.planning.devices import FORMATS, gpu_entry
from phalanx.planning.entries import own_file
from phalanx.spec.errors import RunError
from phalanx.spec.nearest import did_you_mean
from phalanx.spec.words import noun, shown

_KEYS: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "gpu": (str, dict),
    "gpus": (int,),
    "node": (str,),
    "network": (str,),
    "rails": (bool,),
    "storage": (int, float),
    "price": (int, float),
    "failures": (str,),
    "source": (str,),
    "note": (str,),
    "measured": (dict,),
}
_NEEDED = ("gpu", "gpus")
_GPU: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "match": (str,),
    "device": (str,),
    "family": (str,),
    **dict.fromkeys((*FORMATS, "memory", "bandwidth", "power", "price"), (int, float)),
    "node": (str,),
    "price_source": (str,),
    "failures": (str,),
    "source": (str,),
    "note": (str,),
}
_GPU_NEEDED = ("memory", "bandwidth", "node")
_DEVICES = ("cpu", "cuda", "tpu")


def own_cluster(path: str) -> dict[str, Any]:
    """What the file says, checked; its [gpu], where it has one, as an entry."""
    values = own_file(path, "cluster.name")
    problems = _problems(path, values, _KEYS, _NEEDED)
    gpu = values.get("gpu")
    if isinstance(gpu, dict):
        problems += _problems(f"{path}, [gpu]", gpu, _GPU, _GPU_NEEDED)
        if gpu.get("device", "cuda") not in _DEVICES:
            problems.append(f"{path}, [gpu]: device = {shown(gpu['device'])} is none of {', '.join(_DEVICES)}.")
        if not any(name in gpu for name in FORMATS):
            problems.append(f"{path}, [gpu] gives no peak: set one of {', '.join(FORMATS)}, in TFLOP/s.")
    measured = values.get("measured")
    if isinstance(measured, dict):
        problems += _problems(f"{path}, [measured]", measured, _constants(), ())
    if problems:
        raise RunError(problems)
    if isinstance(gpu, dict):
        unsaid = {"name": "own GPU", "match": "(?!)", "family": "unknown", "source": path}
        values["gpu"] = gpu_entry(gpu.get("name", "own"), unsaid | gpu)
    return {"name": path, "source": path} | values


def _constants() -> dict[str, tuple[type, ...]]:
    from phalanx.planning.rates import NAMES  # which reads clusters, and so this file

    return dict.fromkeys(NAMES, (int, float))


def _problems(where: str, values: dict[str, Any], known: dict[str, tuple[type, ...]], needed: tuple[str, ...]) -> list[str]:
    found = [f"{where}: {key} is missing: set it." for key in needed if key not in values]
    for key, value in values.items():
        if key not in known:
            found.append(f"{where}: {key} is not a key of such a file{did_you_mean(known, key) or '.'}")
        elif not isinstance(value, known[key]) or (isinstance(value, bool) and bool not in known[key]):
            found.append(f"{where}: {key} = {shown(value)} is {noun(value)}, which is not what belongs there.")
        elif not isinstance(value, bool) and isinstance(value, int | float) and not 0 < value < math.inf:
            found.append(f"{where}: {key} = {shown(value)} must be above 0 and finite.")
    return found
