"""The repeated layers of any module: the list that holds most of its parameters. What works layer by layer (pipeline stages, recomputation,
compilation, fp8) finds them there."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def layers_path(model: nn.Module) -> str | None:
    """Path of the list of layers, such as "blocks", "model.layers" or "transformer.h"; None if the module has none.

    An attribute `blocks` counts first. Else it is the outermost list of modules with most parameters in it.
    """
    if isinstance(getattr(model, "blocks", None), _LISTS):
        return "blocks"
    sizes = {path: sum(parameter.numel() for parameter in layers.parameters()) for path, layers in _outermost(model, "")}
    path = max(sizes, key=sizes.__getitem__, default=None)
    return path if path is not None and sizes[path] else None


def _outermost(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Lists of modules that are not inside another one."""
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        if isinstance(child, _LISTS):
            yield inner, child
        else:
            yield from _outermost(child, inner)
