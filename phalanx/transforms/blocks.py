"""The blocks of a model, to which the transforms of this room apply one by one: they replace `forward`, so that hooks stay outside and the
module and its parameters do not change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from phalanx.spec.errors import RunError


def blocks(parts: Sequence[nn.Module], setting: str) -> dict[str, nn.Module]:
    """Every block of this rank's parts by its name in the whole model, each once.

    They are the members of `block_list`, and the `block` of each module in `mtp`. `setting` is the setting that needs them, for the
    error about a model without blocks.
    """
    by_name: dict[str, nn.Module] = {}
    for part in parts:
        path, members = block_list(part)
        by_name |= {f"{path}.{name}": block for name, block in members.items()}
        for name, module in getattr(part, "mtp", nn.ModuleList()).named_children():
            by_name[f"mtp.{name}.block"] = module.get_submodule("block")
    if not by_name and all(block_list(part)[0] is None for part in parts):
        raise RunError(
            f"{setting} works block by block, but {type(parts[0]).__name__} holds no list of layers; put them in an "
            f"nn.ModuleList or nn.ModuleDict, or remove {setting.partition(' ')[0]}."
        )
    return by_name


def block_list(part: nn.Module) -> tuple[str | None, dict[str, nn.Module]]:
    """Path of the list of a part's blocks, and those that it holds, by their names in the list; (None, {}) if the model has no list.

    The list is `blocks`, or what the model's `layers_path` names. Stand-ins for blocks of other pipeline stages are not blocks.
    """
    path: Any = getattr(part, "layers_path", "blocks")
    if path is None or (path == "blocks" and not hasattr(part, "blocks")):
        return None, {}
    members = part.get_submodule(path).named_children()
    return path, {name: block for name, block in members if not getattr(block, "is_absent", False)}


def block_number(name: str, parts: Sequence[nn.Module]) -> int:
    """A block's index in the whole model, so that a choice of every N-th block does not depend on the layout. Blocks of `mtp` come last."""
    is_mtp = name.startswith("mtp.")
    number = name.split(".")[1] if is_mtp else name.rpartition(".")[2]
    layers: int = getattr(parts[0].spec, "layers", 0) if is_mtp else 0
    return int(number) + layers


def routes_tokens(block: nn.Module) -> bool:
    """Whether a block has experts, and counts the tokens of each."""
    return any(hasattr(module, "counting") for module in block.modules())


def named(names: Sequence[str]) -> str:
    """ "blocks.0 … blocks.15 (16)": up to two by name, more by the first and the last."""
    if len(names) <= 2:
        return " and ".join(names)
    return f"{names[0]} … {names[-1]} ({len(names)})"
