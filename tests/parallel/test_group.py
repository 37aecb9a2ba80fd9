"""Differentiable collectives in compiled code have the gradients that they have outside of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from ranks import run_ranks
from torch import Tensor

from phalanx.parallel.group import Group
from phalanx.parallel.mesh import Mesh
from phalanx.spec.layout import Layout

COLLECTIVES: dict[str, Callable[[Group, Tensor], Tensor]] = {
    "copy to region": lambda group, x: group.copy_to_region(x),
    "reduce from region": lambda group, x: group.reduce_from_region(x),
    "gather to region": lambda group, x: group.gather_to_region(x, 0),
    "gather columns": lambda group, x: group.gather_to_region(x, 1),
    "scatter from region": lambda group, x: group.scatter_from_region(x, 0),
    "split": lambda group, x: group.split(x, 1),
    "join": lambda group, x: group.join(x, 0),
}


def test_gradients_of_compiled_collectives() -> None:
    """torch 2.11 drops the gradient of a function whose result was written in place, unless it is told that the result is another tensor."""

    def differences(mesh: Mesh) -> dict[str, float]:
        group = mesh.group("tensor", use="tensor")
        found = {}
        for name, collective in COLLECTIVES.items():

            def weighted(x: Tensor, collective: Callable[[Group, Tensor], Tensor] = collective) -> Tensor:
                y = collective(group, 2 * x)
                return (y * torch.arange(1.0, y.numel() + 1).view(y.shape)).sum()

            gradients = []
            for function in (weighted, torch.compile(weighted, backend="aot_eager")):
                x = torch.arange(16.0).view(4, 4).add(mesh.rank).requires_grad_()
                with warnings.catch_warnings(action="ignore"):  # of torch's compiler, about itself
                    function(x).backward()
                assert x.grad is not None
                gradients.append(x.grad)
            plain, compiled = gradients
            assert plain.abs().min() > 0
            found[name] = (plain - compiled).abs().max().item()
        return found

    for found in run_ranks(differences, 2, layout=Layout(tensor=2)):
        assert found == dict.fromkeys(COLLECTIVES, 0.0)
