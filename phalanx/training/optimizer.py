"""AdamW, or Muon for the matrices with AdamW for the rest, behind one step that can be refused. Driven by `training/step`.

The arithmetic is torch.optim's own. Added here: which parameter goes where, states that exist from the start and are
known by parameter name, and clipping, normalising and skipping folded into the step, so that gradients are read once.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from phalanx.spec.run import Optimizer as OptimizerSpec

_LAYERS = ("blocks.", "ahead.")  # not the embedding and not the head, which are matrices too


class Optimizer:
    """The optimizer of one rank's parameters."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], spec: OptimizerSpec):
        self._named = list(named)
        # Experts are stacked in three dimensions, of which Muon knows nothing: they go to AdamW with the rest.
        by_muon = {name for name, p in self._named if spec.name == "muon" and p.ndim == 2 and name.startswith(_LAYERS)}
        decayed = [p for name, p in self._named if name not in by_muon and p.ndim >= 2]
        plain = [p for name, p in self._named if name not in by_muon and p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": spec.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=spec.learning_rate,
            betas=(spec.beta1, spec.beta2),
            eps=spec.eps,
            fused=True,
        )
        self._muon: torch.optim.Muon | None = None
        if by_muon:
            self._muon = torch.optim.Muon(
                [p for name, p in self._named if name in by_muon],
                lr=spec.learning_rate,
                weight_decay=spec.weight_decay,
                momentum=spec.momentum,
                adjust_lr_fn="match_rms_adamw",  # one learning rate serves both
            )
        self._prime()

    def step(self, learning_rate: float, divisor: Tensor, bad: Tensor) -> None:
        """Step with every gradient divided by `divisor`; if `bad` is 1, change nothing at all.

        Both are fp32 scalars on the device: AdamW's fused kernel divides and refuses by itself, without asking the host.
        """
        for group in self._groups():
            group["lr"] = learning_rate
        self._adamw.grad_scale, self._adamw.found_inf = divisor, bad  # type: ignore[attr-defined]
        self._adamw.step()
        if self._muon is not None and not bad.item():
            for group in self._muon.param_groups:
                torch._foreach_div_([p.grad for p in group["params"]], divisor)
            self._muon.step()

    def state(self) -> dict[str, Tensor]:
        """Every state tensor by "parameter name/state name". They are the live ones: writing into them restores."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._named:
            for key, value in self._owner(parameter).state[parameter].items():
                tensors[f"{name}/{key}"] = value
        return tensors

    def _groups(self) -> list[dict]:
        return self._adamw.param_groups + (self._muon.param_groups if self._muon else [])

    def _owner(self, parameter: nn.Parameter) -> torch.optim.Optimizer:
        return self._muon if self._muon is not None and parameter in self._muon.state else self._adamw

    def _prime(self) -> None:
        """Create the states that torch would create at the first step, so that a checkpoint always finds them."""
        for group in self._adamw.param_groups:
            for p in group["params"]:
                step = torch.zeros((), dtype=torch.float32, device=p.device)
                self._adamw.state[p] = {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        for group in self._muon.param_groups if self._muon else []:
            for p in group["params"]:
                self._muon.state[p] = {"momentum_buffer": torch.zeros_like(p)}  # type: ignore[union-attr]
