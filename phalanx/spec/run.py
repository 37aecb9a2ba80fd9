"""A run, as one frozen value: what the run file says, with every default filled in. `spec/load` makes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from phalanx.spec.fields import later, within
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec

TOKENIZER_VOCAB = {"byte": 257}
"""Tokens of each tokenizer: the run file is resolved without the data room, which is held to these numbers by a test."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where text comes from."""

    source: Literal["stdlib", "text", "jsonl", "parquet", "hf", "chat", "tokens", "memory"] | None = None
    """Kind of text: "text" files, a document each; "jsonl" or "parquet", a document per record; "hf": a Hugging Face dataset; "chat": conversations or instructions in JSONL; "tokens": what `phalanx tokenize` wrote; "stdlib": Python's own source code, always there; "memory": `documents`. Left out: told by the names in `paths` (.jsonl, .ndjson and .json; .parquet; a folder by its first file; "text" otherwise), or "stdlib" where there are none."""
    paths: tuple[str, ...] = ()
    """Files, folders, globs or URLs (s3://, gs://, https://, …); .gz and .zst are unpacked. Relative to the working directory."""
    documents: tuple[str, ...] = ()
    """The documents themselves, for source = "memory": small tests."""
    split: str = "train"
    """hf: which split."""
    config: str | None = None
    """hf: which configuration of the dataset."""
    streaming: bool = False
    """hf: read it as a stream instead of downloading it first."""
    prompt_field: str = "prompt"
    """chat: field of the question, in records that hold no list of messages."""
    answer_field: str = "response"
    """chat: field of the answer, likewise."""
    template: str | None = None
    """chat: a Jinja file that turns messages into text, or "plain"; left out: the tokenizer's own chat template."""
    epochs: float | None = field(default=None, metadata=within(above=0.0))
    """Most times this text is gone through; left out: as often as the run needs."""
    seed: int | None = field(default=None, metadata=within(0, 2**63 - 1))
    """Order of this text; left out: train.seed."""
    # Last, because from here on the name means this key and no longer dataclasses.field.
    field: str | None = None
    """Field of a JSON record, or column, that holds the text; left out: "text", and "messages" for chat. Dots reach inside: "meta.body"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedSource(Source):
    """One source of a mixture: a table [data.mix.NAME]."""

    name: str = field(default="", metadata={"named_by_table": True})
    """Its name: the last part of the table's header."""
    weight: float | None = field(default=None, metadata=within(above=0.0))
    """Its part of the samples, relative to the other weights; left out of all: by the number of tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Data(Source):
    """Where the text comes from and how it is cut into samples."""

    mix: tuple[MixedSource, ...] = ()
    """A mixture instead of one source: a table [data.mix.NAME] for each."""
    tokenizer: str = "byte"
    """"byte": one token per byte and one for the end of a document, 257 in all; or a tokenizer.json, or a folder that holds one."""
    end_token: str | None = None
    """The token that ends a document; left out: the tokenizer's own end of sequence."""
    packing: Literal["stream", "best-fit"] = "stream"
    """"stream": documents laid end to end and cut into windows; "best-fit": documents no longer than a window are kept whole, and padding fills what is left."""
    document_mask: bool = True
    """Attention stays inside a document and positions restart with it; false: the window is one text."""
    eval_fraction: float = field(default=0.01, metadata=within(0.0, 0.5))
    """Part of the tokens of each source held out for evaluation, at least one window; 0: none."""
    shuffle: bool = True
    """Visit the windows in an order drawn from the seed, another one each epoch; false: in file order."""
    prefetch: int = field(default=2, metadata=within(1, 1024))
    """Steps whose batches are prepared ahead in the background."""
    max_bad_records: int = field(default=100, metadata=within(0))
    """Records of one source that may be skipped because they cannot be read; one more stops the run before it starts."""
    max_record_bytes: int = field(default=64 << 20, metadata=within(1, 1 << 31))
    """Longest record that is read; a longer one is a bad record."""
    cache: str = "~/.cache/phalanx"
    """Where text that has to be tokenised first is kept as token files, so that the next run opens at once."""
    processes: int | None = field(default=None, metadata=within(1, 4096))
    """Processes that tokenise; left out: one per core."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Train:
    """How much is trained, in what portions."""

    batch: int | None = field(default=None, metadata=within(1))
    """Sequences in one global batch. Give this or batch_tokens."""
    batch_tokens: int | None = field(default=None, metadata=within(1))
    """Tokens in one global batch: a multiple of sequence_length."""
    sequence_length: int = field(default=1024, metadata=within(2))
    """Tokens of one sequence."""
    steps: int | None = field(default=None, metadata=within(1))
    """Optimizer steps to take. Give this or tokens."""
    tokens: int | None = field(default=None, metadata=within(1))
    """Tokens to train on, rounded up to whole steps."""
    micro_batch: int | None = field(default=None, metadata=within(1))
    """Sequences of one forward and backward on one rank; left out: chosen for the machine."""
    seed: int = field(default=0, metadata=within(0, 2**63 - 1))
    """Initial weights and the order of samples follow from it."""
    clip: float = field(default=1.0, metadata=within(above=0.0, infinite=True))
    """Largest global norm of the gradient; inf: never clipped."""
    eval_every: int | None = field(default=None, metadata=within(1))
    """Evaluate every so many steps; left out: at the end only."""
    eval_sequences: int = field(default=32, metadata=within(1))
    """Held-out sequences one evaluation reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """How gradients become steps."""

    name: Literal["adamw", "muon"] = "adamw"
    """"adamw"; or "muon" for the matrices of the blocks, with AdamW for the embedding, the head, norms and biases."""
    learning_rate: float = field(default=3e-4, metadata=within(above=0.0))
    """Largest learning rate, reached after the warm-up."""
    weight_decay: float = field(default=0.1, metadata=within(0.0))
    """Decoupled decay of matrices; norms and biases are never decayed."""
    beta1: float = field(default=0.9, metadata=within(0.0, 0.9999999))
    """AdamW: memory of the mean."""
    beta2: float = field(default=0.95, metadata=within(0.0, 0.9999999))
    """AdamW: memory of the square."""
    eps: float = field(default=1e-8, metadata=within(above=0.0))
    """AdamW: added to the root of the square."""
    momentum: float = field(default=0.95, metadata=within(0.0, 0.9999999))
    """Muon: memory of the gradient."""
    schedule: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    """Learning rate after the warm-up: cosine decay; warm-up, stable, decay; linear decay; constant."""
    warmup_steps: int = field(default=0, metadata=within(0))
    """Steps of linear growth from zero."""
    decay_steps: int | None = field(default=None, metadata=within(1))
    """wsd: steps of linear decay at the end; left out: a fifth of the run."""
    final_fraction: float = field(default=0.1, metadata=within(0.0, 1.0))
    """Learning rate at the end, as a part of the largest."""
    sync_every: int = field(default=1, metadata=within(1))
    """Steps that each replica (layout.data) takes by itself before replicas meet, as DiLoCo does over slow links; 1: they meet in every step."""
    outer_learning_rate: float = field(default=0.7, metadata=within(above=0.0))
    """sync_every > 1: step of the outer optimizer, which takes the replicas' mean movement for a gradient."""
    outer_momentum: float = field(default=0.9, metadata=within(0.0, 0.9999999))
    """sync_every > 1: its Nesterov momentum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Which numbers are used where. Weights and optimizer states are kept in fp32."""

    compute: Literal["fp32", "bf16", "fp16", "fp8"] | None = None
    """Forward and backward; left out: bf16 on GPUs, fp32 on CPUs. fp16 scales the loss; fp8 is for the matrices of the blocks, with bf16 around them."""
    fp8_scaling: Literal["tensor", "row"] = "tensor"
    """fp8: one scale for a whole tensor, or one for each row."""
    loss_scale: float = field(default=65536.0, metadata=within(above=0.0))
    """fp16: what the loss is multiplied by at first; halved after a step that overflows, doubled after many that do not."""
    reduce: Literal["fp32", "bf16"] = "fp32"
    """Gradients on the wire between replicas; bf16 halves the traffic."""
    optimizer: Literal["fp32", "bf16"] = "fp32"
    """Optimizer states: Adam's two moments and Muon's momentum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """What is traded for memory."""

    recompute: Literal["auto", "none", "full", "selective"] = "auto"
    """Activations computed again in the backward instead of kept: those of whole blocks, or all but the results of matrix products and attention. "auto": none, unless the plan finds that the run needs it or is quicker with it."""
    recompute_every: int = field(default=1, metadata=within(1))
    """Recompute every so manieth block only."""
    offload: Literal["auto", "none", "cpu", "nvme"] = "auto"
    """Where optimizer states and master weights live: on the device, in this machine's memory, or in files. "auto": on the device, unless the plan finds that they must leave it."""
    offload_path: str | None = None
    """nvme: a folder on a fast local disk; left out: offload/ in the run directory."""
    offload_buffer: int = field(default=256, metadata=within(1))
    """nvme: MiB of memory that each rank reads into ahead and writes back from."""
    activations: Literal["device", "cpu"] = "device"
    """Where activations wait for the backward."""
    loss_chunk: int | None = field(default=None, metadata=within(1))
    """Tokens whose logits exist at the same time; left out: all of a micro-batch. Large vocabularies save gigabytes with 1024."""
    compile: bool = False
    """Compile each block with torch.compile."""

    @property
    def recomputes(self) -> bool:
        """Whether anything is computed again; what no plan has settled is not."""
        return self.recompute not in ("auto", "none")

    @property
    def offloads(self) -> bool:
        """Whether anything leaves the device; likewise."""
        return self.offload not in ("auto", "none")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """The machines. Left out: this one, with all its GPUs, or its cores where it has none."""

    device: Literal["cpu", "cuda"] | None = None
    """Train on this kind of device; left out: GPUs where there are some."""
    cpu_ranks: int | None = field(default=None, metadata=within(1, 1024))
    """Ranks to start on CPU when [layout] does not say; left out: as many as there are cores and the batch divides."""
    threads: int | None = field(default=None, metadata=within(1, 4096))
    """CPU threads of each rank; left out: cores / ranks, at least one."""
    nodes: int = field(default=1, metadata=within(1, 1024))
    """Machines. With the local launcher they are groups of processes on this one, each with its own supervisor: a rehearsal of several."""
    bind: str = "127.0.0.1"
    """Address of the only interface that the run's processes listen on."""
    launcher: Literal["local", "ray", "slurm", "kubernetes"] = field(
        default="local", metadata=later("launching through Ray, Slurm or Kubernetes")
    )
    """Who starts the workers. torchrun needs no key: start `torchrun -m phalanx train …`."""
    name: str | None = None
    """A cluster to plan for instead of this machine: a name of the catalogue, which `phalanx clusters` lists, or a TOML file of one's own. The four keys below say it in parts, or change parts of it; `phalanx train` wants this machine to be that cluster."""
    gpu: str | None = None
    """Catalogue name of the GPU to plan for."""
    gpus: int | None = field(default=None, metadata=within(1, 10_000_000))
    """How many of them, all nodes together; left out: those of one node."""
    node: str | None = None
    """Catalogue name of the node that they sit in; left out: the GPU's usual one."""
    network: str | None = None
    """Catalogue name of the links between nodes; left out: the node's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """What is saved, when. A run also saves when it ends and when it is told to stop."""

    every: int | None = field(default=None, metadata=within(1))
    """Save every so many steps; left out: at the end, and on SIGTERM or SIGINT."""
    keep_last: int = field(default=2, metadata=within(1))
    """Newest checkpoints to keep; older ones are removed after a newer one is complete."""
    keep_every: int | None = field(default=None, metadata=within(1))
    """Keep also those of every so many steps, for good."""
    async_save: bool = True
    """Write behind training: a step waits only for a copy of the state in host memory. False: it waits until all is written."""
    url: str | None = None
    """Where checkpoints go, in place of the run directory: a folder, or any URL that fsspec knows, such as s3://bucket/folder."""
    local_first: bool = False
    """With `url`: save into the run directory, and upload from there in the background."""
    export_hf: bool = False
    """Export each checkpoint for transformers into hf/ of the run directory, in the background; it is kept only if its logits of a fixed prompt are the model's."""
    memory_every: int | None = field(default=None, metadata=within(1))
    """Copy the state into host memory, outside the workers, and to a neighbouring node where there are several, every so many steps. Left out: where nothing else replicates the state, after every step on CPUs, and on GPUs as often as training waits half a percent of its time for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resilience:
    """What happens when something goes wrong."""

    max_skipped: int = field(default=10, metadata=within(0))
    """Steps with a non-finite loss or gradient that may follow each other; one more stops the run. Each is skipped on all ranks."""
    timeout: float = field(default=600.0, metadata=within(above=0.0))
    """Seconds a rank waits for the others in one collective operation."""
    restarts: int = field(default=100, metadata=within(0))
    """Failures within 1,000 new steps that the run recovers from by itself; one more ends it, however long the run has been going. Steps done again are not new. 0: the first failure ends it. The same failure at the same step three times ends it too."""
    spares: int = field(default=0, metadata=within(0))
    """Nodes of `cluster.nodes` that are kept idle and step in for one that is lost."""
    shrink: bool = True
    """Go on with fewer ranks where no spare is left, on a new layout with the same batch; false: wait for the node to return."""
    continue_degraded: bool = False
    """Healthy replicas go on with the whole batch while a broken one is started again, instead of waiting for it."""
    heartbeat: float = field(default=2.5, metadata=within(above=0.0))
    """Seconds without a sign of life after which a node is taken for lost."""
    hang: float = field(default=5.0, metadata=within(above=0.0))
    """Least seconds without progress after which ranks are asked where they are; steps that usually take long raise it."""
    straggler: float = field(default=1.5, metadata=within(above=1.0))
    """A rank that works this many times as long as the others, step after step, is named."""
    check_every: int = field(default=25, metadata=within(0))
    """Compare what replicas hold every so many steps, before the step is applied; 0: never."""
    spike: float | None = field(default=None, metadata=within(above=0.0))
    """Skip a step whose loss or gradient norm lies more than so many of its usual deviations above the usual; left out: never."""
    rollback_after: int | None = field(default=None, metadata=within(1))
    """Bad steps in a row after which the run goes back to its last good state and leaves out the data since; left out: never."""
    preemption_notice: float = field(default=10.0, metadata=within(above=0.0))
    """Seconds from SIGTERM or SIGUSR1 until the machine is gone: the state is saved within them."""
    node_return: float | None = field(default=None, metadata=within(0.0))
    """Seconds after which a lost node of this machine is started again; left out: never. Elsewhere, whoever started it decides."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Watch:
    """Who is told. The run directory's events.jsonl always is."""

    log_every: int = field(default=1, metadata=within(1))
    """Print a line every so many steps where the output is not a terminal; every step is always recorded."""
    tensorboard: bool = False
    """Write TensorBoard files into the run directory (needs the extra `watch`)."""
    wandb: bool = False
    """Log to Weights & Biases (needs the extra `wandb`)."""
    wandb_project: str = "phalanx"
    """Project there."""
    page: bool = field(default=False, metadata=later("the live page"))
    """Serve a live page of the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Everything one run file says. Tables that are left out take their defaults."""

    model: ModelSpec = field(default_factory=ModelSpec)
    """The model: a preset, sizes, or a folder to start from."""
    data: Data = Data()
    """The text."""
    train: Train = Train()
    """Batch, length, duration, seed."""
    optimizer: Optimizer = Optimizer()
    """Optimizer and learning-rate schedule."""
    precision: Precision = Precision()
    """Number formats."""
    memory: Memory = Memory()
    """Recomputation, offload, compilation."""
    layout: Layout = field(default_factory=Layout)
    """Degrees of parallelism."""
    cluster: Cluster = Cluster()
    """Machines."""
    checkpoint: Checkpoint = Checkpoint()
    """Saving."""
    resilience: Resilience = Resilience()
    """Faults."""
    watch: Watch = Watch()
    """Display and logging."""

    @property
    def batch(self) -> int:
        """Sequences in one global batch."""
        if self.train.batch is not None:
            return self.train.batch
        assert self.train.batch_tokens is not None, "checked when the run file is loaded"
        return self.train.batch_tokens // self.train.sequence_length

    @property
    def batch_tokens(self) -> int:
        return self.batch * self.train.sequence_length

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        if self.train.steps is not None:
            return self.train.steps
        assert self.train.tokens is not None, "checked when the run file is loaded"
        return -(-self.train.tokens // self.batch_tokens)
