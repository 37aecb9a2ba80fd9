"""Blocks compiled by torch.compile, each by itself. `parallel/apply` calls it after fp8 and before recomputation, offload and
sharding, which stay outside of what is compiled.

Where torch refuses a piece of a block, it is said in one line and the piece runs uncompiled: never an error at the first step.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from phalanx.transforms.blocks import blocks, named, wrap

_REASON = 300
"""Letters of torch's reason that are worth reading."""


def say(message: str) -> None:
    """One line where whoever started the run looks for problems."""
    print(message, file=sys.stderr, flush=True)


def apply(parts: Sequence[nn.Module], backend: str = "inductor", notice: Callable[[str], None] = say) -> str:
    """Compile each block's forward at its first call; says which."""
    compiler = Compiler(backend, notice)
    whole, partly = [], []
    for name, block in blocks(parts, "memory.compile = true").items():
        if not any(hasattr(module, "counting") for module in block.modules()):
            wrap(block, compiler.around)
            whole.append(name)
        elif isinstance(attention := getattr(block, "attention", None), nn.Module):
            # Routing counts, and sends rows by what it finds in them: repeated for a backward, it would compile to something else.
            wrap(attention, compiler.around)
            partly.append(name)
    said = [f"{named(whole)}"] if whole else []
    said += [f"the attention of {named(partly)}, which route tokens"] if partly else []
    return f"{' and '.join(said) or 'nothing'} compiled by torch.compile ({backend}), each by itself"


class Compiler:
    """Compiles one rank's blocks; says once if torch refuses something."""

    def __init__(self, backend: str, notice: Callable[[str], None]):
        # Loading the compiler takes a second or two: only runs that compile wait for it.
        import torch._dynamo
        import torch._functorch.config

        self._notice = notice
        self._backend = self._forgiving(torch._dynamo.lookup_backend(backend))
        self._settings = torch._dynamo.config, torch._functorch.config
        self.refused: str | None = None
        """torch's first reason not to compile something; it runs as it was."""
        # Where errors are suppressed torch writes them here, as pages; whoever trains is to read a line.
        logging.getLogger("torch._dynamo.convert_frame").addFilter(self._heard)

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        compiled = torch.compile(forward, backend=self._backend, dynamic=False)
        dynamo, functorch = self._settings

        def attempt(*args: Any, **kwargs: Any) -> Any:
            # Without gradients it is evaluation or generation, whose shapes change from call to call.
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            # A piece that is refused runs as it is, in its place among the others. So that this is known in time, the backward is
            # compiled along with the forward. Blocks alike share one compilation; the limit is for those that are not.
            with (
                warnings.catch_warnings(action="ignore"),  # what compilers remark on at work is for their authors
                dynamo.patch(suppress_errors=True, recompile_limit=1024),
                functorch.patch(force_non_lazy_backward_lowering=True),
            ):
                return compiled(*args, **kwargs)

        return attempt

    def _forgiving(self, backend: Callable[..., Any]) -> Callable[..., Any]:
        """A backend that hands back, uncompiled, what it cannot compile."""

        def attempt(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            try:
                return backend(graph, inputs)
            except Exception as error:  # compilers call compilers: anything may come out of them
                self._say(error)
                return graph.forward

        return attempt

    def _heard(self, record: logging.LogRecord) -> bool:
        """Whether a line of torch's log is to be written: not what is said here in shorter words."""
        if not record.getMessage().startswith("WON'T CONVERT"):
            return True
        self._say(record.exc_info[1] if record.exc_info else record.getMessage())
        return False

    def _say(self, reason: object) -> None:
        if self.refused is None:
            words = " ".join(str(reason).split())
            self.refused = words if len(words) < _REASON else f"{words[:_REASON]} …"
            self._notice(f"memory.compile: torch refuses a piece of a block, which runs uncompiled: {self.refused}")
