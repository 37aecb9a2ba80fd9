"""The hooks by which modules are given, and return, all positions or a rank's own ones, as a `SequencePlan` says. `parallel/inferred_tensor`
installs them with collectives, the proof of a plan with operations that only have the right shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from phalanx.spec.cut_plan import SequencePlan

_LIBRARY = torch.library.Library("phalanx_positions", "DEF")
_LIBRARY.define("own_positions(Tensor x, int parts) -> Tensor")
_LIBRARY.define("all_positions(Tensor x, int parts) -> Tensor")
_LIBRARY.impl("own_positions", lambda x, parts: x[:, : x.shape[1] // parts].clone(), "CompositeExplicitAutograd")
_LIBRARY.impl("all_positions", lambda x, parts: torch.cat([x] * parts, 1), "CompositeExplicitAutograd")
STAND_INS = ("own_positions", "all_positions")
"""Operations of a trace in place of collectives."""

Move = Callable[[nn.Module, Tensor], Tensor]
"""Of what a module is given or returns."""


@dataclass(frozen=True, eq=False, slots=True)
class Moves:
    gather: Move
    join: Move
    share: Move


@dataclass(frozen=True, eq=False)
class MoveArguments:
    """Before a module."""

    moves: Mapping[int | str, Move]

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        own = list(args)
        for argument, move in self.moves.items():
            if isinstance(argument, str):
                if argument in kwargs:
                    kwargs = kwargs | {argument: _moved(module, move, kwargs[argument])}
            elif argument < len(own):
                own[argument] = _moved(module, move, own[argument])
        return tuple(own), kwargs


@dataclass(frozen=True, eq=False)
class MoveResult:
    """After a module."""

    move: Move
    index: int | None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
        if self.index is None:
            return self.move(module, result)
        return (*result[: self.index], self.move(module, result[self.index]), *result[self.index + 1 :])


def install_stand_ins(modules: Mapping[str, nn.Module], plan: SequencePlan, parts: int) -> None:
    """Hooks that show the shapes of a rank with one of so many parts of the positions, sums included."""

    def own(module: nn.Module, x: Tensor) -> Tensor:
        positions: Tensor = torch.ops.phalanx_positions.own_positions(x, parts)
        return positions

    def every(module: nn.Module, x: Tensor) -> Tensor:
        positions: Tensor = torch.ops.phalanx_positions.all_positions(x, parts)
        return positions

    for name in plan.scattered:
        modules[name].register_forward_hook(MoveResult(own, None))
    install(modules, plan, Moves(gather=every, join=every, share=own))


def install(modules: Mapping[str, nn.Module], plan: SequencePlan, moves: Moves) -> None:
    """On those of the modules that the plan names. Sums that go to own positions are not its business."""
    found: dict[str, dict[int | str, Move]] = {}
    for arguments, move in ((plan.shared, moves.share), (plan.gathered, moves.gather), (plan.joined, moves.join)):
        for each in arguments:
            found.setdefault(each.module, {})[each.argument] = move
    for name, by_argument in found.items():
        if name in modules:
            modules[name].register_forward_pre_hook(MoveArguments(by_argument), with_kwargs=True)
    for result in plan.returned:
        if result.module in modules:
            modules[result.module].register_forward_hook(MoveResult(moves.share, result.index))


def _moved(module: nn.Module, move: Move, value: Any) -> Any:
    return pytree.tree_map(lambda x: move(module, x) if isinstance(x, Tensor) and x.is_floating_point() else x, value)
