"""Counts the parameters of a run's model and tries its forward pass. Started by `launch/model_check`, because only torch can build a model.

    python -m phalanx.worker.measure_process < RUN.toml

It prints a JSON object on the last line: the fields of `Size`, without those of a trace; or problems, a list of sentences. A custom
module is also built as rank 0 of the run's layout, without memory, so that what cannot be cut is found before any rank starts.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from math import gcd
from pathlib import Path
from typing import Any

import torch
from torch import nn

from phalanx.models import hf_module
from phalanx.models.attention_use import context_problem, plain_attention
from phalanx.models.custom import axes_of, written_axes
from phalanx.models.hf_initial import UNKNOWN
from phalanx.models.init import build
from phalanx.spec import hf_config
from phalanx.spec.adapted_layers import is_target
from phalanx.spec.cut_plan import ParamCut, Segment, dim_names, roles, segments
from phalanx.spec.errors import RunError, refuse, toml
from phalanx.spec.layout import Layout
from phalanx.spec.load import loads
from phalanx.spec.origin import origin_folder
from phalanx.spec.plan import Size
from phalanx.spec.run import Lora, Run
from phalanx.tracing.refusals import surroundings
from phalanx.training.hf_weights import open_weights
from phalanx.transforms import lora
from phalanx.transforms.blocks import block_list, blocks
from phalanx.worker.forward_trial import try_forward


def main() -> None:
    print_size(lambda: measure(loads(sys.stdin.read())))


def print_size(ask: Callable[[], Size]) -> None:
    """Prints the size that a process was asked for, or the problems in its way with the user's line that caused them."""
    try:
        shown: dict[str, Any] = asdict(ask())
    except RunError as error:
        shown = {"problems": [problem.rstrip(".") + _place(error.__cause__) for problem in error.problems]}
    print("\n" + json.dumps(shown), flush=True)


def measure(run: Run) -> Size:
    """Check the run's model and count its parameters."""
    model = build(run.model)
    trained = _adapters(run, model)
    if run.model.from_ is not None and hf_config.is_folder(folder := origin_folder(run.model.from_)):
        open_weights(folder, run.model)  # every tensor in the right shape, by the headers
    if not run.model.is_builtin:
        check_documents(run, model)
        try_cuts(run, model)
        try_forward(run, model)
    parameters = sum(p.numel() for p in model.parameters())
    looked_up = {id(m.weight): m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    multiplied = sum(p.numel() for p in model.parameters() if p.ndim >= 2 and id(p) not in looked_up)
    heads = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == run.model.rows]
    if not any("weight" in head._parameters for head in heads):
        # Tied embeddings: the token embedding also computes the logits.
        multiplied += sum(w.numel() for w in looked_up.values() if w.shape[0] == run.model.rows)
    unused = hf_module.unused(model) if run.model.config is not None else 0
    multiplied -= unused
    return Size(
        parameters=parameters,
        active=parameters - unused,
        flops_per_token=6.0 * multiplied if trained is None else 4.0 * multiplied + 6.0 * trained,
        trained=trained,
        width=max((w.shape[1] for w in looked_up.values()), default=run.model.dim),
        blocks=len(block_list(model)[1]),
    )


def check_documents(run: Run, model: nn.Module) -> None:
    """Raise RunError if a model of transformers cannot do what [data] asks for, or cannot start without weights."""
    if run.model.config is None:
        return
    if run.data.document_mask and (reason := hf_module.one_document(model)) is not None:
        raise RunError(
            f"data.document_mask = true, but {run.model.custom_key} cannot keep the documents of a sequence apart: {reason}. Set "
            "data.document_mask = false."
        )
    unknown = [name for name, rule in hf_module.initial(model).items() if rule == UNKNOWN]
    if unknown and run.model.from_ is None:
        raise RunError(
            f"{run.model.custom_key}: the initial values of {unknown[0]} are neither a constant nor random numbers, and no rule of `models/init` makes "
            "them: start from weights (model.from)."
        )


def try_cuts(run: Run, model: nn.Module) -> None:
    """Raise RunError if the run's layout cannot cut the model, or a setting needs blocks that it does not have."""
    memory = run.memory
    for setting, is_set in (
        ('precision.compute = "fp8"', run.precision.compute == "fp8"),
        ("memory.compile = true", memory.compile),
        (f'memory.recompute = "{memory.recompute}"', memory.recomputes),
        ('memory.activations = "cpu"', memory.activations == "cpu"),
    ):
        if is_set:
            blocks([model], setting)
    layout = run.layout if run.layout.data is not None else fewest_replicas(run.layout)
    if run.model.module is not None and layout.ranks > 1:
        refuse([f"{run.model.custom_key}: {problem}" for problem in surroundings(model)])
    if layout.context > 1 or (layout.sequence and run.model.module is not None):
        _check_positions(run, model)
    if layout.context > 1 and run.data.document_mask and run.model.module is not None:
        raise RunError(
            f"layout.context = {layout.context} cannot be combined with a custom model.module while data.document_mask = true: its attention is "
            "shared only if it attends to all earlier positions. Set data.document_mask = false, or layout.context = 1."
        )
    if layout.context > 1 and (problem := context_problem(model)) is not None:
        raise RunError(
            f"layout.context = {layout.context} cannot divide the sequences of {type(model).__name__}: {problem}. Set layout.context = 1."
        )
    if layout.expert > 1 and not getattr(model, "expert_layers", ()):
        raise RunError(
            f"layout.expert = {layout.expert} divides experts, but {type(model).__name__} has none behind the experts interface of transformers: set "
            "layout.expert = 1."
        )
    if replace(layout, data=1).ranks > 1 or layout.expert > 1:
        from phalanx.training.build import dry_build  # seconds of imports that other runs need not wait for

        with dry_build(run, layout, 0):
            pass
    if layout.tensor > 1 and run.model.module is not None and written_axes(run.model.module) is not None:
        _check_axes(run, model)


def fewest_replicas(layout: Layout) -> Layout:
    """The layout with no more replicas than its experts need ranks."""
    experts, ranks = layout.expert * layout.expert_tensor, layout.shard * layout.context * layout.tensor
    return replace(layout, data=experts // gcd(experts, ranks))


def _check_positions(run: Run, model: nn.Module) -> None:
    """Raise RunError if the layout gives ranks parts of sequences, and positions meet outside of attention. A model that cannot be traced is not
    refused for that: whether its attention can be shared is another question."""
    from phalanx.tracing.position_proof import positions_meet

    try:
        with plain_attention(model):
            mixed = positions_meet(model).mixed
    except RunError:
        mixed = None
    key = f"layout.context = {run.layout.context}" if run.layout.context > 1 else "layout.sequence = true"
    if mixed is not None:
        raise RunError(
            f"{key} divides the sequences of {type(model).__name__}, but positions meet outside of attention: {mixed}. Remove "
            f"{key.partition(' ')[0]}."
        )


def _check_axes(run: Run, model: nn.Module) -> None:
    """Raise RunError if the table AXES of a custom module divides a parameter in another way than the module reads it."""
    from phalanx.tracing.applied_axes import wrong_cuts
    from phalanx.training.build import dry_build

    with dry_build(replace(run, lora=Lora()), Layout(data=1, tensor=run.layout.tensor), 0) as state:
        shards = {owned.name: owned.shard for owned in state.sharded.owned if "tensor" in owned.shard.split}
    cuts, table = {}, axes_of(model)
    for name, shard in shards.items():
        whole, own = shard.slice.whole, shard.slice.shape
        dim = next(dim for dim, size in enumerate(own) if size != whole[dim])
        named = dim_names(name, table)[dim]
        sizes = segments(named) or (whole[dim],)
        cuts[name] = ParamCut(dim, tuple(Segment(role, size) for role, size in zip(roles(named), sizes, strict=True)))
    refuse([f"{run.model.custom_key}: {problem}" for problem in wrong_cuts(model, run.layout.tensor, cuts)])


def _adapters(run: Run, model: nn.Module) -> int | None:
    """Parameters of the LoRA adapters of a model; None without LoRA. Raises RunError if one of its targets is no layer of the model."""
    if run.lora.rank is None:
        return None
    known, targets = lora.layers(model, axes_of(model)), run.lora.targets or ("blocks.*",)
    problems = [
        f"lora.targets: {toml(target)} is no linear layer of the model; its layers are {', '.join(list(known)[:8]) or 'none'}"
        for target in targets
        if not any(is_target(name, (target,)) for name in known)
    ]
    refuse(problems)
    adapters = lora.apply([copy := build(run.model)], run.lora, axes_of(copy))
    return sum(parameter.numel() for name, parameter in copy.named_parameters() if name in adapters.names)


def _place(error: BaseException | None) -> str:
    """The file and line of the user's code that raised an error."""
    libraries = (str(Path(file).parent) for module in (torch, importlib) if (file := module.__file__))
    passed = (str(Path(__file__).parents[1]), *libraries)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__ if error else None)
        if not frame.filename.startswith(("<", *passed))
    ]
    return f"; it came from {frames[-1].filename}, line {frames[-1].lineno}." if frames else "."


if __name__ == "__main__":
    main()
