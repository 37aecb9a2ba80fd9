"""The training step of the XLA engine: one compiled function from the state and a global batch to the new state and what is reported. It computes what
`training/step` computes, in the same order of divisions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from phalanx.models.moe import MAX_STEP, MIN_RATE
from phalanx.spec.run import Run
from phalanx.training.step_totals import GOOD, NOT_FINITE, SPIKE
from phalanx.xla.device_mesh import SAMPLES, sharding
from phalanx.xla.forward import Arrays, Model, Tokens, summed_losses, without_state
from phalanx.xla.newton_schulz import orthogonalized, rate_factor


class TrainArrays(NamedTuple):
    """Everything that a step changes."""

    params: Arrays
    means: Arrays
    """AdamW's first moments, and the momentum of matrices that Muon updates."""
    squares: Arrays
    """AdamW's second moments."""
    buffers: Arrays
    """Persistent ones."""
    updates: jax.Array
    """Steps that were applied."""


class StepInputs(NamedTuple):
    """What changes from step to step besides the batch. As arguments, they need no new compilation."""

    learning_rate: jax.Array
    max_loss: jax.Array
    max_norm: jax.Array
    """A step above these limits is a spike."""


class StepResults(NamedTuple):
    """What a step reports."""

    loss: jax.Array
    tokens: jax.Array
    grad_norm: jax.Array
    verdict: jax.Array
    """GOOD, NOT_FINITE or SPIKE."""
    loads: Arrays
    """Tokens of each expert, by the name of the router."""
    gradients: Arrays
    """Before clipping; empty unless they were asked for."""


class Sums(NamedTuple):
    """What the micro-batches of a step add up to."""

    gradients: Arrays
    loss: jax.Array
    tokens: jax.Array
    loads: Arrays


@dataclass(frozen=True, slots=True)
class Shardings:
    """Where the arrays of the state and of a batch lie."""

    state: Any
    """A `TrainArrays` with a sharding in place of each array."""
    batch: NamedSharding
    """Of [micro-batch, sample, position]."""

    @staticmethod
    def of(model: Model) -> Shardings:
        def all_of(kind: str) -> Any:
            return {name: sharding(model.mesh, *getattr(placed, kind)) for name, placed in model.placements.items()}

        whole: Any = sharding(model.mesh)
        moments = all_of("moments")
        squares = {name: place for name, place in moments.items() if name not in model.by_muon}
        buffers = {name: whole for name in sorted(model.persistent)}
        state = TrainArrays(params=all_of("value"), means=moments, squares=squares, buffers=buffers, updates=whole)
        return Shardings(state, sharding(model.mesh, None, SAMPLES, "context"))


Step = Callable[[TrainArrays, Tokens, StepInputs], tuple[TrainArrays, StepResults]]


def make_step(model: Model, run: Run, *, keep_gradients: bool = False) -> Any:
    """The step as a function to compile, whose state is donated. `keep_gradients`: it also returns them, for a proof."""
    places = Shardings.of(model)
    function: Step = partial(_step, model, run, keep_gradients)
    whole: Any = sharding(model.mesh)  # every process reads the numbers
    results = StepResults(loss=whole, tokens=whole, grad_norm=whole, verdict=whole, loads=whole, gradients=None)  # type: ignore[arg-type]
    return jax.jit(function, donate_argnums=0, out_shardings=(places.state, results))


def _step(
    model: Model, run: Run, keep_gradients: bool, state: TrainArrays, batch: Tokens, inputs: StepInputs
) -> tuple[TrainArrays, StepResults]:
    sums = _accumulate(model, float(run.batch_tokens), state, batch)
    capacity = float(run.batch_tokens)
    # As `Stepper._norm_and_divisor`: the sum of gradients is divided by the capacity, the update corrects for masked tokens.
    tokens = jnp.maximum(sums.tokens, 1).astype(jnp.float32)
    norm = jnp.sqrt(sum(jnp.square(gradient).sum() for gradient in sums.gradients.values())) * (capacity / tokens)
    divisor = tokens / capacity * jnp.maximum(norm / run.train.clip, 1.0)
    loss = sums.loss / tokens
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    spike = (loss > inputs.max_loss) | (norm > inputs.max_norm)
    verdict = jnp.where(finite, jnp.where(spike, SPIKE, GOOD), NOT_FINITE)
    updated = _updated(model, run, state, sums, (inputs.learning_rate, divisor))
    chosen = jax.tree.map(lambda new, old: jnp.where(verdict == GOOD, new, old), updated, state)
    kept = sums.gradients if keep_gradients else {}
    return chosen, StepResults(loss, sums.tokens, norm, verdict, sums.loads, kept)


def _accumulate(model: Model, capacity: float, state: TrainArrays, batch: Tokens) -> Sums:
    """Gradients of the global batch, divided by its capacity in tokens, as fp32 sums over the micro-batches."""
    places = {name: sharding(model.mesh, *placed.gradient) for name, placed in model.placements.items()}
    counters = {f"{name}.counts": name for name in model.routers}
    fresh = without_state(model)

    def scaled_loss(params: Arrays, micro_batch: Tokens) -> tuple[jax.Array, tuple[jax.Array, Arrays]]:
        loss, after = summed_losses(model, params, {**state.buffers, **fresh}, micro_batch)
        return loss / capacity, (loss, {name: after[counter] for counter, name in counters.items()})

    def add(sums: Sums, micro_batch: Tokens) -> tuple[Sums, None]:
        (_, (loss, loads)), gradients = jax.value_and_grad(scaled_loss, has_aux=True)(state.params, micro_batch)
        total = {
            name: jax.lax.with_sharding_constraint(sums.gradients[name] + gradient.astype(jnp.float32), places[name])
            for name, gradient in gradients.items()
        }
        tokens = sums.tokens + (micro_batch.targets >= 0).sum(dtype=jnp.int32)
        return Sums(total, sums.loss + loss, tokens, {name: sums.loads[name] + loads[name] for name in loads}), None

    nothing = Sums(
        {name: jnp.zeros(shape, jnp.float32) for name, shape in model.shapes.items()},
        jnp.zeros((), jnp.float32),
        jnp.zeros((), jnp.int32),
        {name: jnp.zeros(model.buffers[counter].shape, jnp.int32) for counter, name in counters.items()},
    )
    if len(batch.tokens) == 1:  # without a loop, which would hold all gradients twice
        return add(nothing, jax.tree.map(lambda array: array[0], batch))[0]
    return jax.lax.scan(add, nothing, batch)[0]


def _updated(model: Model, run: Run, state: TrainArrays, sums: Sums, scales: tuple[jax.Array, jax.Array]) -> TrainArrays:
    """The state after the optimizer. `scales`: the learning rate, and what every gradient is divided by."""
    (rate, divisor), spec = scales, run.optimizer
    updates = state.updates + 1
    first, second = (1 - beta**updates for beta in (spec.beta1, spec.beta2))
    params, means, squares = {}, {}, {}
    for name, value in state.params.items():
        gradient = sums.gradients[name] / divisor
        if name in model.by_muon:
            momentum = state.means[name].astype(jnp.float32)
            momentum += (1 - spec.momentum) * (gradient - momentum)
            direction = gradient + spec.momentum * (momentum - gradient)  # Nesterov's
            iterated = orthogonalized(direction.astype(jnp.bfloat16 if run.precision.newton_schulz == "bf16" else jnp.float32))
            decayed = value * (1 - rate * spec.weight_decay)
            params[name] = decayed - rate * rate_factor(model.shapes[name]) * iterated.astype(jnp.float32)
            means[name] = momentum.astype(state.means[name].dtype)
            continue
        mean = spec.beta1 * state.means[name].astype(jnp.float32) + (1 - spec.beta1) * gradient
        square = spec.beta2 * state.squares[name].astype(jnp.float32) + (1 - spec.beta2) * jnp.square(gradient)
        decay = spec.weight_decay if len(model.shapes[name]) >= 2 else 0.0  # matrices decay, norms and biases do not
        step = rate / first * mean / (jnp.sqrt(square) / jnp.sqrt(second) + spec.eps)
        params[name] = value * (1 - rate * decay) - step
        means[name], squares[name] = mean.astype(state.means[name].dtype), square.astype(state.squares[name].dtype)
    buffers = dict(state.buffers)
    for name, router in model.routers.items():
        if (bias := f"{name}.bias") in buffers:
            buffers[bias] = rebalanced(buffers[bias], sums.loads[name], router.moe.bias_rate)
    return TrainArrays(params, means, squares, buffers, updates)


def rebalanced(bias_E: jax.Array, counts_E: jax.Array, rate: float) -> jax.Array:
    """`models.moe.Router.rebalance`: lowers the bias of experts with more tokens than the mean, and raises that of the others."""
    counts = counts_E.astype(jnp.float32)
    shortfall_E = (counts.mean() - counts) / jnp.maximum(counts.mean(), 1)
    step = jnp.clip(MAX_STEP * bias_E.std(), MIN_RATE * rate, rate)
    return bias_E + step * jnp.clip(shortfall_E, -1, 1)
