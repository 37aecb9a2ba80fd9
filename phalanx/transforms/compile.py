"""Compiles each block with torch.compile. `parallel/apply` calls it after fp8 and before recomputation, offload and sharding, which
stay outside the compiled code. What a compiled block stores for its backward is the compiler's choice. It is told to store what selective
recomputation stores, the results of matrix products and attention, and those of collectives.

If torch cannot compile a part of a block, that part runs uncompiled and one line reports it; the run never fails because of it.
"""

from __future__ import annotations

import logging
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from phalanx.transforms.blocks import blocks, named, routes_tokens

_MAX_REASON = 300
"""Characters of torch's reason to report."""
_STORE_LESS = dict.fromkeys(
    ("ban_recompute_used_far_apart", "ban_recompute_long_fusible_chains", "ban_recompute_materialized_backward"), False
)
"""torch's reasons to store what it could recompute, such as normalized inputs: a third of a block's memory, for under a percent of its time."""


def apply(
    parts: Sequence[nn.Module],
    backend: str = "inductor",
    notice: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    *,
    selective: bool = False,
    together: int = 1,
) -> str:
    """Compile each block's forward at its first call; returns a description. `together`: blocks that follow each other and are compiled as
    one function, if nothing is attached to single ones: small blocks take longer to launch than to compute. `selective`: `transforms/recompute` recomputes the routing half of
    blocks selectively, or such blocks whole if they have no halves, and the compiler cannot see what happens there."""
    compiler = Compiler(backend, notice)
    whole, partly = [], []
    for name, block in blocks(parts, "memory.compile = true").items():
        for module in block.modules():
            for method in getattr(module, "recomputed", ()):
                again = partial(checkpoint, getattr(module, method), use_reentrant=False, preserve_rng_state=False)
                setattr(module, method, again)
        if not routes_tokens(block):
            if together == 1:  # otherwise `_join` compiles them
                block.forward = compiler.around(block.forward)
            whole.append(name)
        elif hasattr(block, "attention_half"):
            # Routing counts tokens and depends on values: recomputed for a backward, it would compile to something else.
            block.attention_half = compiler.around(block.attention_half)  # type: ignore[assignment, arg-type]
            partly.append(name)
        elif not selective and isinstance(attention := getattr(block, "attention", None), nn.Module):
            attention.forward = compiler.around(attention.forward)
            partly.append(name)
    if together > 1:
        for part in parts:
            _join(list(part.get_submodule("blocks").children()), together, compiler)
    for part in parts:
        part.forward = compiler.ready(part.forward)
    compiled = [named(whole)] if whole else []
    compiled += [f"the attention of {named(partly)}, which route tokens"] if partly else []
    return f"{' and '.join(compiled) or 'nothing'} compiled by torch.compile ({backend}), {'each separately' if together == 1 else f'{together} together'}"


class _Chain(nn.Module):
    """Blocks that follow each other. The model holds them, and knows nothing of this."""

    def __init__(self, blocks: Sequence[nn.Module]):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x_BSD: Any, *context: Any) -> Any:
        for block in self.blocks:
            x_BSD = type(block).forward(block, x_BSD, *context)  # its own forward is this chain's, or does nothing
        return x_BSD


def _join(blocks: Sequence[nn.Module], together: int, compiler: Compiler) -> None:
    """The first block of each chain computes all of it, the others return their input."""
    for first in range(0, len(blocks), together):
        chain = _Chain(blocks[first : first + together])
        head, *others = chain.blocks
        head.forward = compiler.around(chain.forward, otherwise=head.forward)
        for block in others:
            block.forward = _skipping(block.forward)


def _skipping(forward: Callable[..., Any]) -> Callable[..., Any]:
    def skip(x_BSD: Any, *context: Any) -> Any:
        return x_BSD if torch.is_grad_enabled() else forward(x_BSD, *context)

    return skip


class Compiler:
    """Compiles one rank's blocks; reports the first part that torch cannot compile."""

    def __init__(self, backend: str, notice: Callable[[str], None]):
        # Importing the compiler takes a second or two: only runs that compile pay for it.
        import torch._dynamo
        import torch._functorch.config

        self._notice, self._reported, self._is_ready = notice, False, False
        self._compile = torch._dynamo.lookup_backend(backend)
        self._backend = self._compile_or_return  # one object: blocks share a compilation only if they have the same backend
        self._settings = torch._dynamo.config, torch._functorch.config
        # torch logs suppressed errors here at length; `_shorten` turns them into one line.
        logging.getLogger("torch._dynamo.convert_frame").addFilter(self._shorten)

    def around(self, forward: Callable[..., Any], otherwise: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """The forward, compiled at its first call and whenever its shapes change. `otherwise`: what runs without gradients, if another."""
        compiled = torch.compile(forward, backend=self._backend, dynamic=False)
        without_gradients = otherwise or forward

        def attempt(*args: Any, **kwargs: Any) -> Any:
            # Without gradients this is evaluation or generation, whose shapes change from call to call.
            if not torch.is_grad_enabled():
                return without_gradients(*args, **kwargs)
            with nullcontext() if self._is_ready else self._compiling():
                return compiled(*args, **kwargs)

        return attempt

    def ready(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of a module with compiled blocks: it sets the compiler's settings once for all of them, which takes longer than it takes
        to launch a small block."""

        def with_settings(*args: Any, **kwargs: Any) -> Any:
            with self._compiling():
                return forward(*args, **kwargs)

        return with_settings

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        """A part that cannot be compiled runs uncompiled in its place. The backward is compiled along with the forward, so that this is known
        in time. Equal blocks share one compilation; the limit is for blocks that differ."""
        dynamo, functorch = self._settings
        outer, self._is_ready = self._is_ready, True
        try:
            with (
                warnings.catch_warnings(action="ignore"),  # warnings of compilers are for their authors
                dynamo.patch(suppress_errors=True, recompile_limit=1024),
                functorch.patch(force_non_lazy_backward_lowering=True, **_STORE_LESS),
            ):
                yield
        finally:
            self._is_ready = outer

    def _compile_or_return(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Returns what the backend cannot compile unchanged."""
        try:
            return self._compile(graph, inputs)
        except Exception as error:  # compilers call compilers, which may raise anything
            self._report(error)
            return graph.forward

    def _shorten(self, record: logging.LogRecord) -> bool:
        """Whether a line of torch's log is to be written: not what is reported here in one line."""
        if not record.getMessage().startswith("WON'T CONVERT"):
            return True
        self._report(record.exc_info[1] if record.exc_info else record.getMessage())
        return False

    def _report(self, reason: object) -> None:
        if not self._reported:
            self._reported = True
            words = textwrap.shorten(str(reason), _MAX_REASON, placeholder=" …")
            self._notice(f"memory.compile: torch cannot compile a part of a block, which runs uncompiled: {words}")
