"""A backward in two halves: first the gradient of a stage's input, which another rank waits for, later those of its weights.
`parallel/pipeline/executor` calls it for schedules that fill their waiting with the second half.

A matrix product needs its weight for the one half and its input for the other, so nothing is computed twice. Where halves do
not come apart (norms, which are cheap; functions with a backward in Python, which computes everything at once; weights used
in several places) the first half does both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node
from torch.utils.checkpoint import GraphExecGroup

_Leaf = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


class _Capture:
    """Takes what comes to a node, for the second half."""

    __slots__ = ("gradients",)

    def __init__(self) -> None:
        self.gradients: tuple[Tensor | None, ...] = ()

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        self.gradients = gradients


Rest = list[tuple[Node, _Capture, list[Tensor]]]
"""The second half: where to go on from, with what, to which weights."""


def backward_input(output: GradientEdge, gradient: Tensor | None, given: Tensor) -> Rest:
    """Add to `given.grad`, and to the gradients of those weights that are as well done now."""
    crossings, compiled = _crossings(output.node, given)
    users = Counter(weight for _, weights in crossings for weight in weights)
    now: dict[Tensor, None] = {given: None}
    rest: Rest = []
    for node, weights in crossings:
        whole = compiled or isinstance(node, BackwardCFunction)
        later = [] if whole else [weight for weight in weights if users[weight] == 1 and weight.ndim > 1]
        if later:
            capture = _Capture()
            node.register_prehook(capture)
            rest.append((node, capture, later))
        now.update((weight, None) for weight in weights if not any(weight is other for other in later))
    torch.autograd.backward([output], [gradient], retain_graph=bool(rest), inputs=tuple(now))
    return rest


def backward_weight(rest: Rest) -> None:
    """Add to the gradients of the other weights."""
    # Blocks that recompute their forward do so once more for this half, and together: not for each weight.
    with GraphExecGroup():
        while rest:
            node, capture, weights = rest.pop()
            given = [(GradientEdge(node, i), gradient) for i, gradient in enumerate(capture.gradients) if gradient is not None]
            if given:
                edges, gradients = zip(*given, strict=True)
                torch.autograd.backward(edges, gradients, inputs=weights)


def _crossings(root: Node, given: Tensor) -> tuple[list[tuple[Node, list[Tensor]]], bool]:
    """Nodes between output and input that weights come in at, with these weights, always in the same order; and whether
    compiled code is among the nodes, which does not let its graph be kept."""
    leads: dict[Node, bool] = {}
    below: dict[Node, dict[Tensor, None]] = {}
    crossings: list[tuple[Node, list[Tensor]]] = []
    compiled = False
    for node, following in _backwards(root):
        if isinstance(node, _Leaf):
            leads[node] = node.variable is given
            below[node] = {} if leads[node] else {node.variable: None}
            continue
        compiled = compiled or type(node).__name__.startswith("CompiledFunction")
        leads[node] = any(leads[other] for other in following)
        weights = {weight: None for other in following if not leads[other] for weight in below[other]}
        below[node] = {} if leads[node] else weights
        if leads[node] and weights:
            crossings.append((node, list(weights)))
    return crossings, compiled


def _backwards(root: Node) -> Iterator[tuple[Node, list[Node]]]:
    """Every node of a graph with those that follow it in the backward, each behind all of these."""
    following: dict[Node, list[Node]] = {}
    stack: list[tuple[Node, bool]] = [(root, False)]
    while stack:
        node, done = stack.pop()
        if done:
            yield node, following[node]
        elif node not in following:
            following[node] = [other for other, _ in node.next_functions if other is not None]
            stack.append((node, True))
            stack += [(other, False) for other in following[node] if other not in following]
