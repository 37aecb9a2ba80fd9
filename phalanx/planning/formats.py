"""What another number format, or compiled blocks, would bring to the winner's layout. A search keeps the run file's own, as both change
what is computed, in its last bits or more: it tells. `planning/search` and `planning/answers` add it to their reasons."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Literal

from phalanx.planning.candidate import Alternative, Candidate
from phalanx.planning.candidates import compute_of
from phalanx.planning.cluster import Hardware
from phalanx.planning.find_layout import judge
from phalanx.spec.check_layout import layout_findings
from phalanx.spec.errors import RunError
from phalanx.spec.run import Run

_FORMATS: tuple[Literal["bf16", "fp8"], ...] = ("bf16", "fp8")
_EQUAL = 0.01


def other_formats(run: Run, hardware: Hardware, best: Candidate) -> tuple[Alternative, ...]:
    """On GPUs, for runs in bf16 or fp8: the same layout and micro-batch in the others, the quickest first."""
    mine = compute_of(run, hardware), run.memory.compile
    if hardware.device != "cuda" or mine[0] not in _FORMATS or run.model.module is not None:
        return ()
    found: list[tuple[float, Alternative]] = []
    for compute, compiled in product(_FORMATS, (False, True)):
        if (compute, compiled) == mine or hardware.gpu.peak(compute) is None:
            continue
        other = replace(
            run,
            layout=best.layout,
            train=replace(run.train, micro_batch=best.micro_batch),
            precision=replace(run.precision, compute=compute),
            memory=replace(run.memory, compile=compiled),
        )
        if any(True for _ in layout_findings(other)):
            continue
        try:
            option = judge(other, hardware, best.capacity)
        except RunError:
            continue
        name = f"{compute}, compiled blocks" if compiled else f"{compute}, blocks not compiled"
        found.append((option.seconds, Alternative(candidate=option, name=name, reason=_reason(option, best))))
    return tuple(why for _, why in sorted(found, key=lambda one: one[0]))


def _reason(option: Candidate, best: Candidate) -> str:
    longer = option.seconds / best.seconds - 1
    saved = "" if option.recompute == best.recompute else f", with {option.recompute} recomputation"
    if not option.fits:
        return f"needs {option.bytes / 2**30:.1f} GiB of {option.capacity / 2**30:.1f}"
    if abs(longer) <= _EQUAL:
        return f"as quick ({longer:+.1%}){saved}"
    said = "quicker" if longer < 0 else "slower"
    if longer < 0 and option.compute != best.compute:
        said += ", but in coarser numbers" if option.compute == "fp8" else ", and in finer numbers"
    elif longer < 0:
        said += ", but a search compiles nothing by itself" if option.compiled else ""
    elif option.compute == "fp8" and not option.compiled:
        said += ", as what is multiplied is rounded in passes of its own"
    return f"{said}; step {longer:+.0%}{saved}"
