"""Where a model's blocks are: what makes one device cheaper is done block by block. Used by the other files of this room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from phalanx.spec.errors import RunError


def blocks(parts: Sequence[nn.Module], asked: str) -> dict[str, nn.Module]:
    """Every block of this rank's parts by its name in the whole model, each once.

    They are the children of `blocks`, and the `block` of each module in `mtp`. `asked` is the setting that needs them, for
    the words in which a model without any is refused.
    """
    found: dict[str, nn.Module] = {}
    for part in parts:
        for name, block in getattr(part, "blocks", nn.ModuleList()).named_children():
            found[f"blocks.{name}"] = block
        for name, module in getattr(part, "mtp", nn.ModuleList()).named_children():
            found[f"mtp.{name}.block"] = module.get_submodule("block")
    if not found and not any(hasattr(part, "blocks") for part in parts):
        raise RunError(
            [
                f"{asked} works block by block, but {type(parts[0]).__name__} has no attribute blocks; keep its layers in an "
                f"nn.ModuleList or nn.ModuleDict of that name, or leave {asked.partition(' ')[0]} out."
            ]
        )
    return found


def wrap(block: nn.Module, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put something around a block's forward. Hooks stay outside, the module and its parameters stay what they are."""
    block.forward = around(block.forward)


def named(names: Sequence[str]) -> str:
    """ "blocks.0 … blocks.15 (16)": a few by name, many by the first and the last."""
    if len(names) <= 2:
        return " and ".join(names)
    return f"{names[0]} … {names[-1]} ({len(names)})"
