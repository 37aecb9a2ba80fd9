"""A backward in two halves: first the gradient of a stage's input, which another rank waits for, later those of its weights.
`parallel/pipeline/executor` calls it for zero-bubble schedules, which fill their idle time with the second half.

A matrix product needs its weight for one half and its input for the other, so nothing is computed twice. Where the halves cannot be
separated, the first half computes both: norms, which are cheap; functions with a backward in Python, which computes everything at
once; weights that are used in several places.
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


WeightBackward = list[tuple[Node, list[tuple[Tensor | None, ...]], list[Tensor]]]
"""The second half: nodes to continue from, the gradients that arrived at them in the first half, and the weights to reach."""


def backward_input(output: GradientEdge, gradient: Tensor | None, input_: Tensor) -> WeightBackward:
    """Add to `input_.grad`, and to the gradients of those weights that cannot be deferred."""
    crossings, compiled = _crossings(output.node, input_)
    users = Counter(weight for _, weights in crossings for weight in weights)
    now: dict[Tensor, None] = {input_: None}
    rest: WeightBackward = []
    for node, weights in crossings:
        whole = compiled or isinstance(node, BackwardCFunction)
        later = [] if whole else [weight for weight in weights if users[weight] == 1 and weight.ndim > 1]
        if later:
            arrived: list[tuple[Tensor | None, ...]] = []
            node.register_prehook(arrived.append)
            rest.append((node, arrived, later))
        now.update((weight, None) for weight in weights if not any(weight is other for other in later))
    torch.autograd.backward([output], [gradient], retain_graph=bool(rest), inputs=tuple(now))
    return rest


def backward_weight(rest: WeightBackward) -> None:
    """Add to the gradients of the deferred weights."""
    # Blocks with recomputation repeat their forward once more for this half; as a group, not for each weight.
    with GraphExecGroup():
        while rest:
            node, arrived, weights = rest.pop()
            known = [(index, gradient) for index, gradient in enumerate(arrived[0] if arrived else ()) if gradient is not None]
            if known:
                edges = [GradientEdge(node, index) for index, _ in known]
                torch.autograd.backward(edges, [gradient for _, gradient in known], inputs=weights)


def _crossings(root: Node, input_: Tensor) -> tuple[list[tuple[Node, list[Tensor]]], bool]:
    """Nodes between output and input at which weights enter, with these weights, always in the same order; and whether compiled code
    is among the nodes, whose graph cannot be kept."""
    leads: dict[Node, bool] = {}
    below: dict[Node, dict[Tensor, None]] = {}
    crossings: list[tuple[Node, list[Tensor]]] = []
    compiled = False
    for node, following in _backwards(root):
        if isinstance(node, _Leaf):
            leads[node] = node.variable is input_
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
    """Every node of a graph with its successors in the backward, each after all of its successors."""
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
