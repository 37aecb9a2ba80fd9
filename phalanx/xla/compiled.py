"""Compiles the functions of the XLA engine and says what the compiler made of them: seconds, operations and bytes of a device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
import torch

from phalanx.spec.run import Run
from phalanx.xla.forward import Arrays, Model, Tokens, summed_losses, without_state
from phalanx.xla.program_text import read_program
from phalanx.xla.train_step import StepInputs, StepResults, TrainArrays, make_step

_UNUSED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Options of XLA's compiler for CPUs, for a program that never runs. They change its machine code, but neither its products and messages nor its memory."""


_CACHE = "compiled"
_CACHE_BYTES = 8 << 30
"""Of compiled programs that are kept; the ones that were not used for longest go first."""
_HIT = "/jax/compilation_cache/cache_hits"
"""What JAX reports when it reads a program from the cache."""


def use_cache(run: Run) -> None:
    """Compiled programs are kept in a folder of `data.cache`, which runs share, so that none compiles what another has compiled."""
    jax.config.update("jax_compilation_cache_dir", str(Path(run.data.cache).expanduser() / _CACHE))
    jax.config.update("jax_compilation_cache_max_size", _CACHE_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)


@contextmanager
def _cache_hits() -> Iterator[list[str]]:
    """The programs that are read from the cache inside."""
    hits: list[str] = []

    def note(event: str, **more: Any) -> None:
        if event == _HIT:
            hits.append(event)

    jax.monitoring.register_event_listener(note)
    try:
        yield hits
    finally:
        jax.monitoring.unregister_event_listener(note)


@dataclass(frozen=True, slots=True)
class CompiledStep:
    """A compiled step, and what it costs each device."""

    run: Callable[[TrainArrays, Tokens, StepInputs], tuple[TrainArrays, StepResults]]
    text: str
    """Before the compiler divided it: every product with its number formats."""
    trace_seconds: float
    compile_seconds: float
    was_cached: bool
    """Whether another run, or an earlier start of this one, had compiled it."""
    flops: float
    """Of the matrix products of one device in a step."""
    argument_bytes: int
    result_bytes: int
    donated_bytes: int
    """Of the arguments, which the results take over."""
    temporary_bytes: int

    def compiled_text(self) -> str:
        """After the compiler divided it: the program of one device, with its messages."""
        compiled: Any = self.run
        text: str = compiled.as_text()
        return text


def compile_step(
    model: Model,
    run: Run,
    arguments: tuple[TrainArrays, Tokens, StepInputs],
    *,
    keep_gradients: bool = False,
    is_run: bool = True,
) -> CompiledStep:
    """The step, compiled for arguments of these shapes. `is_run`: with code that is fast; else only to look at."""
    started = time.perf_counter()
    with jax.set_mesh(model.mesh), _cache_hits() as hits:
        lowered = make_step(model, run, keep_gradients=keep_gradients).lower(*arguments)
        traced = time.perf_counter()
        compiled = lowered.compile(None if is_run else _UNUSED)
    ended = time.perf_counter()
    memory = compiled.memory_analysis()
    return CompiledStep(
        run=compiled,
        text=lowered.as_text(),
        trace_seconds=traced - started,
        compile_seconds=ended - traced,
        was_cached=bool(hits),
        flops=float(read_program(compiled.as_text(), model.mesh.size).flops),
        argument_bytes=memory.argument_size_in_bytes,
        result_bytes=memory.output_size_in_bytes,
        donated_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
    )


Measure = Callable[[Arrays, Arrays, Tokens], tuple[jax.Array, jax.Array]]
"""The sum of the losses and the number of targets of a batch of one micro-batch, without gradients, for parameters and buffers."""


def compile_measure(model: Model, arguments: tuple[Arrays, Arrays, Tokens]) -> Measure:
    """Compiled for arguments of these shapes."""
    measure: Measure = jax.jit(partial(_losses, model)).lower(*arguments).compile()
    return measure


def _losses(model: Model, params: Arrays, buffers: Arrays, batch: Tokens) -> tuple[jax.Array, jax.Array]:
    inputs = jax.tree.map(lambda array: array[0], batch)
    with torch.no_grad():
        loss, _ = summed_losses(model, params, {**buffers, **without_state(model)}, inputs)
    return loss, (inputs.targets >= 0).sum()
