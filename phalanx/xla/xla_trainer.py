"""The trainer of the XLA engine: one process for all devices of a layout, or for some of them. Its loop, events and checkpoints are those of
`training/trainer`; a step is one compiled function, which all processes call together."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import torch

from phalanx import accelerator
from phalanx.checkpointing.hf_folder import ReferenceLogits
from phalanx.checkpointing.state_tensor import StateTensor
from phalanx.data.dataset import Dataset
from phalanx.data.samples import Samples
from phalanx.events.heartbeat import Heartbeat
from phalanx.events.records import Evaluated, Event, ModelPlaced, Sampled, Step, StepCompiled, StepSkipped, WeightsLoaded
from phalanx.parallel.expert import Loads
from phalanx.parallel.mesh import Mesh
from phalanx.spec.errors import RunError, toml
from phalanx.spec.hub import missing_message
from phalanx.spec.origin import origin_folder
from phalanx.spec.plan import Place, Plan
from phalanx.spec.run import Run
from phalanx.training import initial_weights
from phalanx.training.evaluate import metrics
from phalanx.training.expert_loads import RecentLoads
from phalanx.training.hooks import StepHook
from phalanx.training.run_loop import RunLoop
from phalanx.training.run_progress import step_record
from phalanx.training.step_totals import PAUSE, STOP, Outcome
from phalanx.transforms.precision import LossScale
from phalanx.xla.compiled import CompiledStep, Measure, compile_measure, compile_step
from phalanx.xla.device_mesh import own_devices, platform_of, sharding
from phalanx.xla.device_state import DeviceBoxes, initial_state, named_arrays, with_arrays
from phalanx.xla.forward import Model, traced_model
from phalanx.xla.global_feed import GlobalBatch, GlobalFeed
from phalanx.xla.train_step import Shardings, StepInputs, StepResults, TrainArrays

_HOST = torch.device("cpu")


class _CompileReport(StepHook):
    """Reports the compilation of the first step."""

    def __init__(self) -> None:
        self.step: CompiledStep | None = None

    def take_events(self) -> list[Event]:
        step, self.step = self.step, None
        if step is None:
            return []
        seconds = step.trace_seconds + step.compile_seconds
        record = StepCompiled(
            seconds=seconds,
            flops=step.flops,
            arguments=step.argument_bytes,
            donated=step.donated_bytes,
            temporary=step.temporary_bytes,
            was_cached=step.was_cached,
        )
        return [record]


class XlaTrainer(RunLoop):
    """Trains a run on all devices that JAX sees, as `training/trainer.Trainer` does on those of all ranks. Every process holds and feeds its own."""

    # Set by `build`.
    model: Model
    feed: GlobalFeed
    state: TrainArrays
    shardings: Shardings
    recent_loads: RecentLoads

    def __init__(
        self,
        run: Run,
        plan: Plan,
        checkpoints: Path,
        dataset: Dataset | None = None,
        heartbeat: Heartbeat | None = None,
        processes: Mesh | None = None,
    ):
        """`processes`: all of the run, if there are several (`xla/join_processes.join`)."""
        super().__init__(run, plan, processes or Mesh(Place(), _HOST), checkpoints, dataset, heartbeat)
        self.keeps_gradients = False
        """Whether steps return their gradients, for a proof. Set before the first step."""
        self.results: StepResults | None = None
        """Of the last step, on the devices."""
        self.in_program = False
        """The devices compute a step, together with those of the other processes."""
        self._step: CompiledStep | None = None
        self._measure: Measure | None = None
        self._report = _CompileReport()
        self._scale = LossScale()
        self._boxes: DeviceBoxes | None = None

    # Build and restore.

    def build(self) -> None:
        """Traces the model and draws its initial values on the devices. Nothing is compiled before the first step."""
        self.hooks.on_phase("building")
        self.model = traced_model(self.run, self.plan)
        if (platform := platform_of(self.model.mesh)) != self.plan.device:
            raise RunError(
                f'The plan is for device "{self.plan.device}", but JAX sees only "{platform}": install jax with the plugin of the device, '
                f'or set cluster.device = "{platform}".'
            )
        self.feed = GlobalFeed(self.run, self.plan, self.data, self.model.mesh)
        self.shardings = Shardings.of(self.model)
        self.state = initial_state(self.model, self.run)
        sizes = {name: router.moe.experts for name, router in self.model.routers.items()}
        self._loads = {name: torch.zeros(size, dtype=torch.float64) for name, size in sizes.items()}
        self.recent_loads = RecentLoads(Loads(sizes, self._loads), self.run.steps, _HOST)
        self.hooks.add(self.checkpointer, self.recent_loads, self._report)
        self.is_built = True

    def tensors(self) -> list[dict[str, StateTensor]]:
        """The live state on each device, by name."""
        self._boxes = DeviceBoxes(named_arrays(self.state))
        return self._boxes.by_device()

    def _load_weights(self, *, resumed: bool = False) -> list[Event]:
        source = self.run.model.from_
        if source is None or self.has_weights or resumed:
            return []
        if (why := missing_message(source)) is not None:
            raise RunError(f"model.from = {toml(source)}: {why}")
        started = time.perf_counter()
        boxes = DeviceBoxes({f"model/{name}": array for name, array in (self.state.params | self.state.buffers).items()})
        shapes = {name: tuple(tensor.shape) for name, tensor in self.model.module.state_dict().items()}
        for device in boxes.by_device():
            part = {name.partition("/")[2]: held for name, held in device.items()}
            read = {name: StateTensor(held.values(), held.slice) for name, held in part.items()}
            initial_weights.load(read, shapes, origin_folder(source), self.run.model)
            for name, held in part.items():
                held.tensor.write(read[name].values())  # type: ignore[union-attr]  # every one is a DeviceBox
        self.state = with_arrays(self.state, boxes.assembled())
        self.has_weights = True
        return [WeightsLoaded(path=source, seconds=time.perf_counter() - started)]

    def _on_restored(self) -> None:
        assert self._boxes is not None, "`tensors` was called to restore"
        self.state = with_arrays(self.state, self._boxes.assembled())
        self._boxes = None
        self.hooks.on_state_replaced()

    def _drop_batches(self) -> None:
        self.feed.close()

    def reference_logits(self) -> ReferenceLogits:
        raise RunError('checkpoint.export_hf is not exported by engine.name = "xla": use `phalanx export`.')

    # Step and evaluate.

    def _take_step(self, number: int) -> Step | StepSkipped | None:
        started = time.perf_counter()
        rate = self.rate_of(self.progress.step)
        self.hooks.before_batch(number)
        batch = self.feed.next(self.progress.samples)
        request, digest = self._agreed(batch)
        if request:
            self.feed.close()
            self.stop_signal.agree(request)
            return None
        self.hooks.on_phase("computing")
        outcome = self._outcome(self._computed(batch, rate, number), digest, number)
        self.progress.take(outcome, self.run, self._scale)
        self.hooks.on_step_taken(self.progress.step, outcome)
        seconds = time.perf_counter() - started
        self.last_record = step_record(self.progress, outcome, rate, seconds=seconds, run=self.run, plan=self.plan)
        return self.last_record

    def _agreed(self, batch: GlobalBatch | None = None) -> tuple[int, int]:
        """What the processes were asked, and the digest of the whole batch. All of them call it together, before the same step."""
        request = self.stop_signal.requested()
        sums = torch.zeros(3, dtype=torch.float64)  # exact, as digests are small
        sums[0] = batch.digest if batch is not None and batch.block.counts else 0
        if request:
            sums[request] = 1
        digest, pauses, stops = self.mesh.all_reduce(sums).tolist()
        return STOP if stops else PAUSE if pauses else 0, int(digest)

    def _computed(self, batch: GlobalBatch, rate: float, number: int) -> StepResults:
        limits = self.progress.limits(self.run.resilience.spike)
        inputs = StepInputs(*map(self._on_all_devices, (rate, limits.loss, limits.norm)))
        tokens = batch.on(self.shardings.batch)
        if self._step is None:
            self.hooks.on_phase("compiling")
            self._step = compile_step(self.model, self.run, (self.state, tokens, inputs), keep_gradients=self.keeps_gradients)
            self._report.step = self._step
            self._meet()
            self.hooks.on_phase("computing")
        self.checkpointer.release()
        self._boxes = None  # what was read of the arrays on the host goes with them
        self.hooks.before_program(number)
        self.in_program = True
        self.state, self.results = self._step.run(self.state, tokens, inputs)
        return self.results

    def _meet(self) -> None:
        """Wait until all processes have compiled: devices wait only seconds for those of others in their first message."""
        self.mesh.barrier()

    def _on_all_devices(self, value: float) -> jax.Array:
        number = np.asarray(value, np.float32)
        return jax.make_array_from_callback((), sharding(self.model.mesh), number.__getitem__)

    def _outcome(self, results: StepResults, digest: int, number: int) -> Outcome:
        loss, tokens, norm, verdict = (value.item() for value in jax.device_get(results[:4]))
        self.in_program = False
        for name, counts in results.loads.items():
            self._loads[name].copy_(torch.from_numpy(np.array(counts)))
        self.recent_loads.add(self._loads)
        fullest = self.recent_loads.fullest(number)
        return Outcome(
            loss=loss,
            tokens=tokens,
            digest=f"{digest:x}",
            grad_norm=norm,
            verdict=verdict,
            stopped=0,
            memory=accelerator.of(_HOST).max_memory_allocated(),
            expert_load=fullest[0].item() if fullest else None,
            weight=float(tokens),
        )

    @property
    def compiled(self) -> CompiledStep:
        """The compiled step; there is one after the first step."""
        assert self._step is not None
        return self._step

    def evaluate(self) -> Evaluated | None:
        """Mean loss of the first held-out sequences of each source. None: nothing is held out, or a stop was asked for."""
        self.hooks.before_evaluate(self.progress.step)
        sources = self.data.eval
        if not sources:
            return None
        started = time.perf_counter()
        rows = {}
        for name, samples in sources.items():
            row = self._loss_and_tokens(samples)
            if row is None:
                return None
            rows[name] = row
        overall = metrics(*map(sum, zip(*rows.values(), strict=True)), is_text=True)
        evaluated = Evaluated(
            step=self.progress.step,
            loss=overall["loss"],
            tokens=int(overall["tokens"]),
            seconds=time.perf_counter() - started,
            perplexity=overall["perplexity"],
            sources={name: metrics(*row, is_text=True) for name, row in rows.items()},
        )
        self._tell(evaluated)
        return evaluated

    def _loss_and_tokens(self, samples: Samples) -> tuple[float, float] | None:
        """Sums of loss and target tokens of one source; None if a stop was asked for."""
        count = min(self.run.train.eval_sequences, samples.count)
        size = self.plan.micro_batch * self.plan.layout.replicas
        loss = tokens = 0.0
        for first in range(0, count, size):
            if request := self._agreed()[0]:
                self.stop_signal.agree(request)
                return None
            batch = self.feed.held_out(samples, first, min(first + size, count)).on(self.shardings.batch)
            arguments = (self.state.params, self.state.buffers, batch)
            if self._measure is None:
                self.hooks.on_phase("compiling")
                self._measure = compile_measure(self.model, arguments)
                self._meet()
            self.hooks.on_phase("evaluating")
            measured = jax.device_get(self._measure(*arguments))
            loss, tokens = loss + float(measured[0]), tokens + float(measured[1])
        return loss, tokens

    def sample(self) -> Iterator[Sampled]:
        return iter(())  # `spec/check_engine` refuses train.sample_every

    def _on_train(self, ahead: bool) -> None:
        """The next batch is read ahead, but nothing is computed ahead."""

    # What it reports of itself.

    def placement(self) -> ModelPlaced:
        first = own_devices(self.model.mesh)[0]

        def held(arrays: dict[str, jax.Array]) -> int:
            return sum(s.data.nbytes for a in arrays.values() for s in a.addressable_shards if s.device == first)

        axes = ", ".join(f"{axis} {size}" for axis, size in self.model.mesh.shape.items() if size > 1)
        divided = [name for name, array in self.state.params.items() if not array.sharding.is_fully_replicated]
        applied = {
            "mesh": f"{self.model.mesh.size} devices of kind {first.platform}" + (f": {axes}" if axes else ""),
            "parameters": f"{len(divided)} of {len(self.state.params)} are divided",
        }
        moments = held(self.state.means) + held(self.state.squares)
        return ModelPlaced(
            rank=self.mesh.rank, applied=applied, parameters=held(self.state.params), gradients=0, optimizer=moments
        )

    def close(self) -> None:
        """Ends threads and closes files."""
        if self.is_built:
            self.feed.close()
        self.checkpointer.close()
