"""The blocks of a model, to which the transforms of this room apply one by one: they replace `forward`, so that hooks stay outside and the
module and its parameters do not change."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from phalanx.spec.errors import RunError


def blocks(parts: Sequence[nn.Module], setting: str) -> dict[str, nn.Module]:
    """Every block of this rank's parts by its name in the whole model, each once.

    They are the children of `blocks`, and the `block` of each module in `mtp`. `setting` is the setting that needs them, for the
    error about a model without blocks.
    """
    by_name: dict[str, nn.Module] = {}
    for part in parts:
        for name, block in getattr(part, "blocks", nn.ModuleList()).named_children():
            by_name[f"blocks.{name}"] = block
        for name, module in getattr(part, "mtp", nn.ModuleList()).named_children():
            by_name[f"mtp.{name}.block"] = module.get_submodule("block")
    if not by_name and not any(hasattr(part, "blocks") for part in parts):
        raise RunError(
            f"{setting} works block by block, but {type(parts[0]).__name__} has no attribute blocks; put its layers in an "
            f"nn.ModuleList or nn.ModuleDict of that name, or remove {setting.partition(' ')[0]}."
        )
    return by_name


def block_number(name: str, parts: Sequence[nn.Module]) -> int:
    """A block's index in the whole model, so that a choice of every N-th block does not depend on the layout. Blocks of `mtp` come last."""
    kind, number, *_ = name.split(".")
    layers: int = getattr(parts[0].spec, "layers", 0) if kind == "mtp" else 0
    return int(number) + layers


def routes_tokens(block: nn.Module) -> bool:
    """Whether a block has experts, and counts the tokens of each."""
    return any(hasattr(module, "counting") for module in block.modules())


def named(names: Sequence[str]) -> str:
    """ "blocks.0 … blocks.15 (16)": up to two by name, more by the first and the last."""
    if len(names) <= 2:
        return " and ".join(names)
    return f"{names[0]} … {names[-1]} ({len(names)})"
