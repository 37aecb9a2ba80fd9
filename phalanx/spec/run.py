"""A run as one frozen value: the run file with every default filled in. `spec/load` makes it; every room reads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from phalanx.spec.alerts import Alerts
from phalanx.spec.engine import Engine
from phalanx.spec.fields import CHANGEABLE, NO_EFFECT, SECRET, below, read_by, within
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec

TOKENIZER_VOCAB = {"byte": 257}
PORTS_PER_NODE = 3  # of its agent, its replica server, and the measurement of its links before the first step
"""Vocabulary size of each built-in tokenizer. The run file is resolved without the data room; a test compares the two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One source of text."""

    source: Literal["stdlib", "text", "jsonl", "parquet", "hf", "chat", "preferences", "tokens", "memory"] | None = field(
        default=None, metadata=CHANGEABLE
    )
    """The kind of text. "text": files, one document each; "jsonl", "parquet": one document per record; "hf": a Hugging Face dataset; "chat": conversations or instructions in JSONL (SFT); "preferences": pairs of a chosen and a rejected answer in JSONL (DPO); "tokens": files that `phalanx tokenize` wrote; "stdlib": Python's own source code, always available; "memory": `documents`. Default: inferred from the names in `paths` (.jsonl, .ndjson, .json; .parquet; a folder by its first file; otherwise "text"), or "stdlib" without paths."""
    paths: tuple[str, ...] = field(
        default=(), metadata=read_by("text", "jsonl", "parquet", "hf", "chat", "preferences", "tokens") | CHANGEABLE
    )
    """Files, folders, globs or URLs (s3://, gs://, https://, …); .gz and .zst are decompressed. Relative to the working directory. hf: the folder of a dataset, or its name on the Hugging Face hub, such as "org/name@revision"."""
    documents: tuple[str, ...] = field(default=(), metadata=read_by("memory", "preferences") | CHANGEABLE)
    """The documents themselves, for source = "memory"; for "preferences", chosen and rejected texts in turn, with the byte tokenizer. Meant for small tests."""
    split: str = field(default="train", metadata=read_by("hf") | CHANGEABLE)
    """hf: the split to read."""
    config: str | None = field(default=None, metadata=read_by("hf") | CHANGEABLE)
    """hf: the configuration of the dataset."""
    streaming: bool = field(default=False, metadata=read_by("hf") | CHANGEABLE)
    """hf: stream the dataset instead of downloading it first."""
    prompt_field: str = field(default="prompt", metadata=read_by("chat", "preferences") | CHANGEABLE)
    """chat: field of the question, in records without a list of messages; preferences: of what both answers follow, a text or a list of messages."""
    answer_field: str = field(default="response", metadata=read_by("chat") | CHANGEABLE)
    """chat: field of the answer, in records without a list of messages."""
    chosen_field: str = field(default="chosen", metadata=read_by("preferences") | CHANGEABLE)
    """preferences: field of the better answer, a text or a list of messages."""
    rejected_field: str = field(default="rejected", metadata=read_by("preferences") | CHANGEABLE)
    """preferences: field of the worse answer."""
    template: str | None = field(default=None, metadata=read_by("chat", "preferences") | CHANGEABLE)
    """chat, preferences: a Jinja file that turns messages into text, or "plain". Default: the tokenizer's own chat template."""
    epochs: float | None = field(default=None, metadata=within(above=0.0) | CHANGEABLE)
    """Maximum number of passes over this source. Default: as many as the run needs."""
    seed: int | None = field(default=None, metadata=within(0, 2**63 - 1) | CHANGEABLE)
    """Seed of this source's order. Default: train.seed."""
    # Last, because from here on the name means this key and no longer dataclasses.field.
    field: str | None = field(default=None, metadata=read_by("jsonl", "parquet", "hf", "chat") | CHANGEABLE)
    """Field of a JSON record, or column, that holds the text; dots reach into nested records: "meta.body". Default: "text"; "messages" for chat."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedSource(Source):
    """One source of a mixture: a table [data.mix.NAME]."""

    name: str = field(default="", metadata={"named_by_table": True})
    """Name of the source: the last part of the table's header."""
    weight: float | None = field(default=None, metadata=within(above=0.0) | CHANGEABLE)
    """Share of the samples, relative to the other weights. Default (for all sources): proportional to their number of tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Data(Source):
    """Where the text comes from and how it is cut into samples."""

    mix: tuple[MixedSource, ...] = ()
    """A mixture instead of one source: a table [data.mix.NAME] for each source."""
    tokenizer: str = "byte"
    """"byte": one token per byte and one for the end of a document, 257 in all; or a tokenizer.json, a folder that holds one, or a name of the Hugging Face hub, such as "gpt2" or "org/name@revision"."""
    end_token: str | None = None
    """The token that ends a document. Default: the tokenizer's end-of-sequence token."""
    packing: Literal["stream", "best-fit"] = "stream"
    """"stream": concatenate documents and cut them into windows; "best-fit": keep documents that fit a window whole, and pad the rest."""
    document_mask: bool = True
    """Attention stays within a document and positions restart with it. False: a window is one text."""
    eval_fraction: float = field(default=0.01, metadata=within(0.0, 0.5) | CHANGEABLE)
    """Fraction of each source's tokens held out for evaluation, at least one window; 0: none."""
    shuffle: bool = True
    """Visit the windows in a random order, a new one each epoch. False: in file order."""
    prefetch: int = field(default=2, metadata=within(1, 1024) | NO_EFFECT)
    """Steps whose batches are prepared in advance in the background."""
    max_bad_records: int = field(default=100, metadata=within(0) | NO_EFFECT)
    """Maximum number of unreadable records to skip per source; one more stops the run before it starts."""
    max_record_bytes: int = field(default=64 << 20, metadata=within(1, 1 << 31))
    """Maximum size of a record; a larger one is a bad record."""
    cache: str = field(default="~/.cache/phalanx", metadata=NO_EFFECT)
    """Folder for the token files of text that must be tokenized first, so that the next run starts at once."""
    processes: int | None = field(default=None, metadata=within(1, 4096) | NO_EFFECT)
    """Processes that tokenize. Default: one per core."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Train:
    """Batch size, length, duration and seed."""

    batch: int | None = field(default=None, metadata=within(1))
    """Sequences in one global batch. Set this or batch_tokens."""
    batch_tokens: int | None = field(default=None, metadata=within(1) | NO_EFFECT)
    """Tokens in one global batch, a multiple of sequence_length. Set this or batch."""
    sequence_length: int = field(default=1024, metadata=within(2))
    """Tokens per sequence."""
    steps: int | None = field(default=None, metadata=within(1) | NO_EFFECT)
    """Optimizer steps to train. Set this or tokens."""
    tokens: int | None = field(default=None, metadata=within(1) | NO_EFFECT)
    """Tokens to train on, rounded up to whole steps. Set this or steps."""
    micro_batch: int | None = field(default=None, metadata=within(1) | NO_EFFECT)
    """Sequences in one forward and backward of one rank; gradients accumulate over a step's micro-batches. Default: chosen for the machine."""
    seed: int = field(default=0, metadata=within(0, 2**63 - 1))
    """Seed of the initial weights and of the order of samples."""
    clip: float = field(default=1.0, metadata=within(above=0.0, infinite=True) | CHANGEABLE)
    """Maximum global norm of the gradient; inf: no clipping."""
    eval_every: int | None = field(default=None, metadata=within(1) | NO_EFFECT)
    """Evaluate every N steps. Default: only at the end."""
    eval_sequences: int = field(default=32, metadata=within(1) | NO_EFFECT)
    """Held-out sequences per evaluation."""
    sample_every: int | None = field(default=None, metadata=within(1) | NO_EFFECT)
    """Generate text every N steps and at the end, and print it. Does not change the training. Default: never."""
    sample_prompts: tuple[str, ...] = field(default=(), metadata=NO_EFFECT)
    """Texts to continue in samples; in a run on conversations, messages to answer. Default: one sample from the beginning of a document."""
    sample_tokens: int = field(default=64, metadata=within(1) | NO_EFFECT)
    """Maximum number of tokens of a sample."""
    sample_temperature: float = field(default=0.8, metadata=within(0.0) | NO_EFFECT)
    """Sampling temperature of samples; 0: always the most likely token."""
    objective: Literal["next-token", "dpo"] = "next-token"
    """What is minimized: "next-token": cross-entropy of every token that counts; "dpo": direct preference optimization on pairs of answers, against the model that training starts from."""


class OptimizerTraits(NamedTuple):
    """What the checks and the planner need to know about an optimizer. `optim/NAME.py` implements it."""

    moments: int
    """States of each parameter."""
    no_offload: str | None = None
    """Why its states cannot be offloaded; None if they can."""
    newton_schulz: bool = False
    """Whether it has Newton–Schulz iterations, in the format of `precision.newton_schulz`."""


OPTIMIZERS = {
    "adamw": OptimizerTraits(moments=2),
    "muon": OptimizerTraits(moments=1, no_offload="whose iterations run on the device", newton_schulz=True),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """Optimizer and learning-rate schedule."""

    name: Literal["adamw", "muon"] = "adamw"
    """"adamw"; or "muon" for the matrices of the blocks, with AdamW for embedding, head, norms and biases."""
    learning_rate: float = field(default=3e-4, metadata=within(above=0.0) | CHANGEABLE)
    """Peak learning rate, reached after the warm-up."""
    weight_decay: float = field(default=0.1, metadata=within(0.0) | CHANGEABLE)
    """Decoupled weight decay of matrices; norms and biases are never decayed."""
    beta1: float = field(default=0.9, metadata=within(0.0, 0.9999999) | CHANGEABLE)
    """AdamW: decay rate of the first moment."""
    beta2: float = field(default=0.95, metadata=within(0.0, 0.9999999) | CHANGEABLE)
    """AdamW: decay rate of the second moment."""
    eps: float = field(default=1e-8, metadata=within(above=0.0) | CHANGEABLE)
    """AdamW: added to the denominator for numerical stability."""
    momentum: float = field(default=0.95, metadata=within(0.0, 0.9999999) | CHANGEABLE)
    """Muon: momentum factor."""
    schedule: Literal["cosine", "wsd", "linear", "constant"] = field(default="cosine", metadata=CHANGEABLE)
    """Learning rate after the warm-up: cosine decay; warm-up, stable, decay (wsd); linear decay; constant."""
    warmup_steps: int = field(default=0, metadata=within(0) | CHANGEABLE)
    """Steps of linear warm-up from zero."""
    decay_steps: int | None = field(default=None, metadata=within(1) | CHANGEABLE)
    """wsd: steps of linear decay at the end. Default: a fifth of the run."""
    final_fraction: float = field(default=0.1, metadata=within(0.0, 1.0) | CHANGEABLE)
    """Final learning rate as a fraction of the peak."""
    sync_every: int = field(default=1, metadata=within(1))
    """DiLoCo / local SGD: replicas (layout.data) train independently and synchronize every N steps; 1: every step."""
    outer_learning_rate: float = field(default=0.7, metadata=within(above=0.0) | CHANGEABLE)
    """sync_every > 1: learning rate of the outer optimizer, whose gradient is the replicas' mean change since the last synchronization."""
    outer_momentum: float = field(default=0.9, metadata=within(0.0, 0.9999999) | CHANGEABLE)
    """sync_every > 1: Nesterov momentum of the outer optimizer."""

    @property
    def traits(self) -> OptimizerTraits:
        return OPTIMIZERS[self.name]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora:
    """LoRA: only low-rank adapters of linear layers are trained; the weights that training starts from stay as they are. Without `rank`, all weights are trained."""

    rank: int | None = field(default=None, metadata=within(1))
    """Rank of the adapters: an adapter adds alpha / rank · B·A to its matrix, where A has `rank` rows and B has `rank` columns. Default: no adapters."""
    alpha: float | None = field(default=None, metadata=within(above=0.0))
    """Scale of the adapters. Default: twice the rank."""
    targets: tuple[str, ...] = ()
    """Layers that get an adapter, by name or by the end of their name, such as ["query", "value", "mlp.down"]; * stands for anything. Default: every linear layer of the blocks. Routed experts get adapters only by name, such as "experts.gate"."""
    base: Literal["int8", "nf4"] | None = None
    """Format in which the frozen matrices of the blocks are stored (QLoRA): "int8", a byte per parameter and a scale per row; "nf4", 4-bit NormalFloat with a scale per 64 elements. Default: that of precision.compute."""
    dropout: float = field(default=0.0, metadata=within(0.0, 0.9999))
    """Probability with which an element of an adapter's input is zeroed in training; the others are scaled up."""

    @property
    def scale(self) -> float:
        """The factor of B·A."""
        assert self.rank is not None, "without a rank there are no adapters"
        return 2.0 if self.alpha is None else self.alpha / self.rank


@dataclass(frozen=True, kw_only=True, slots=True)
class Dpo:
    """Direct preference optimization, `train.objective = "dpo"`: the reference is the model that training starts from."""

    beta: float = field(default=0.1, metadata=within(above=0.0))
    """How much a departure from the reference costs: the smaller, the farther the model may go."""
    label_smoothing: float = field(default=0.0, metadata=within(0.0, 0.4999999))
    """Probability that the two answers of a pair are confused (conservative DPO)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Number formats. The weights that the optimizer updates are always fp32."""

    compute: Literal["fp32", "bf16", "fp16", "fp8"] | None = None
    """Format of forward and backward. fp16 scales the loss; fp8 applies to the matrices of the blocks, with bf16 around them. Default: bf16 on GPUs, fp32 on CPUs."""
    fp8_scaling: Literal["tensor", "row"] = "tensor"
    """fp8: one scale per tensor, or one per row."""
    bf16_first: int = field(default=0, metadata=within(0))
    """fp8: blocks at the beginning of the model that compute in bf16."""
    bf16_last: int = field(default=0, metadata=within(0))
    """fp8: blocks at the end of the model that compute in bf16."""
    fp8_experts: bool = False
    """fp8: routed experts multiply in it, too, with a scale per row; otherwise they are in bf16."""
    fp8_gather: bool = False
    """fp8 with one scale per tensor: ZeRO-3 gathers the weights that are multiplied in fp8 in it, half the bytes, with the same result."""
    loss_scale: float = field(default=65536.0, metadata=within(above=0.0))
    """fp16: initial loss scale; halved after a step that overflows, doubled after many that do not."""
    reduce: Literal["fp32", "bf16"] = "fp32"
    """Format of gradients in communication between replicas; bf16 halves the traffic."""
    optimizer: Literal["fp32", "bf16"] = "fp32"
    """Format of the optimizer states: Adam's moments and Muon's momentum."""
    newton_schulz: Literal["bf16", "fp32"] = "bf16"
    """Muon: format of the Newton–Schulz iterations, and of the matrices that ranks exchange for them. bf16 is the usual one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Techniques that trade time for memory."""

    recompute: Literal["auto", "none", "full", "selective"] = "auto"
    """Activation checkpointing: recompute activations in the backward instead of storing them. "full": of whole blocks; "selective": all but the results of matrix products and attention, which costs little time. "auto": none, unless the plan finds that the run needs it or is faster with it."""
    recompute_every: int = field(default=1, metadata=within(1))
    """Recompute only every N-th block."""
    offload: Literal["auto", "none", "cpu", "nvme"] = "auto"
    """Where optimizer states and master weights are stored: on the device, in host memory, or in files on NVMe. "auto": on the device, unless the plan finds that they do not fit."""
    offload_path: str | None = None
    """nvme: a folder on a fast local disk. Default: offload/ in the run directory."""
    offload_buffer: int = field(default=256, metadata=within(1))
    """nvme: MiB of host memory per rank for reading ahead and writing back."""
    activations: Literal["device", "cpu"] = "device"
    """Where activations wait for the backward; "cpu" offloads them to host memory."""
    loss_chunk: int | None = field(default=None, metadata=within(0))
    """Tokens whose logits exist at the same time; with a large vocabulary, 1024 saves gigabytes. 0: all tokens of a micro-batch. Default: on GPUs as many as have logits of 2 GiB, on CPUs all."""
    bucket_size: int | None = field(default=None, metadata=within(1, 1 << 20))
    """MiB of gradients that ranks exchange in one message (DDP, ZeRO-1 and 2; ZeRO-3 exchanges blocks). Small buckets are sent earlier in the backward, large ones need fewer messages. Default: 64 on CPUs; on GPUs 32, and 25 after a first one of 1 for replicas in fp32."""
    compile: bool | None = None
    """Compile each block with torch.compile, which makes it faster and saves memory. Default: on GPUs, for built-in models, but not with tensor parallelism or a schedule that splits backwards."""
    cuda_graphs: bool | None = None
    """Record forward and backward of a micro-batch as CUDA graphs in the third step and replay them, so that the GPU does not wait for the host to launch small kernels. A step must be one micro-batch per rank. Default: for a built-in dense model on one GPU whose blocks are compiled and small."""

    @property
    def recomputes(self) -> bool:
        """Whether activations are recomputed; "auto" counts as no until a plan resolves it."""
        return self.recompute not in ("auto", "none")

    @property
    def offloads(self) -> bool:
        """Whether optimizer states leave the device; "auto" counts as no until a plan resolves it."""
        return self.offload not in ("auto", "none")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kubernetes:
    """The pods of `launcher = "kubernetes"`, one per node."""

    image: str | None = None
    """Container image with Phalanx, the same version as the command's. Required."""
    kind: Literal["job", "jobset", "rayjob"] = "job"
    """What runs the pods: an Indexed Job, a JobSet (jobset.x-k8s.io), or KubeRay's RayJob (ray.io)."""
    namespace: str | None = None
    """Default: the one of the kubeconfig context."""
    context: str | None = None
    """Context of the kubeconfig. Default: the current one."""
    resources: tuple[str, ...] = ()
    """Limits of each pod, such as ["nvidia.com/gpu=8", "cpu=64", "memory=1000Gi"]."""
    volume: str | None = None
    """PersistentVolumeClaim (ReadWriteMany) that holds the run directory. Default: none; then `checkpoint.url` is required."""
    mount: str = "/run/phalanx/shared"
    """Path of `volume` in the pods."""
    secret: str | None = None
    """Secret whose entries become environment variables of the pods, such as AWS_ACCESS_KEY_ID."""
    service_account: str | None = None
    """Service account of the pods. Default: one is created with the rights that they need."""
    node_selector: tuple[str, ...] = ()
    """Labels that hosts must have, such as ["pool=h100"]."""
    pod: str | None = None
    """YAML file with more fields of the pods' spec, such as tolerations or priorityClassName, merged into it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """The machines. Default: this machine, with all its GPUs, or its cores if it has none."""

    device: Literal["cpu", "cuda"] | None = None
    """Kind of device to train on. Default: GPUs if there are any."""
    cpu_ranks: int | None = field(default=None, metadata=within(1, 1024))
    """Ranks to start on CPU if [layout] does not set their number. Default: the largest number up to that of the cores that divides the batch."""
    threads: int | None = field(default=None, metadata=within(1, 4096))
    """CPU threads per rank. Default: cores / ranks, at least one."""
    nodes: int = field(default=1, metadata=within(1, 65_536))
    """Number of machines. With the local launcher they are groups of processes on this machine, each with its own agent."""
    bind: str = "127.0.0.1"
    """Where the run's processes listen: an address of this machine, or the name of a network interface, such as "ib0", that every host has. Nothing listens on other interfaces. Default: loopback with the local launcher, else the address by which a host was reached."""
    ports: str | None = None
    """Ports that agents and replica servers listen on, such as "40000-40100", for hosts behind a firewall; three for each node. gloo and NCCL take theirs from the host's net.ipv4.ip_local_port_range."""
    min_speed: float = field(default=0.5, metadata=within(0.0, 1.0))
    """Part of the usual speed of links and devices that each host must reach in the check before the first step. A slower host is left out, or the run refused. 0: any speed will do."""
    launcher: Literal["local", "ssh", "ray", "slurm", "kubernetes"] = "local"
    """What starts the workers. torchrun needs no key: start `torchrun -m phalanx train …`."""
    hosts: str | None = None
    """launcher = "ssh": a file with one host per line, on all of which the run trains."""
    ray_address: str = "auto"
    """launcher = "ray": address of the Ray cluster. Default: the one of this machine, or of the job in which the command runs."""
    slurm: tuple[str, ...] = ()
    """launcher = "slurm": options of sbatch, such as ["--partition=gpu", "--gpus-per-node=8", "--time=12:00:00"]."""
    setup: tuple[str, ...] = ()
    """launcher = "slurm": shell commands to run on every host before Phalanx, such as ["module load cuda"]."""
    ssh: str = "ssh"
    """launcher = "ssh": the command that connects to a host, with options of yours such as `ssh -F my-config`."""
    name: str | None = None
    """A cluster to plan for instead of this machine: a catalogue name, which `phalanx clusters` lists, or a TOML file of your own, for which `phalanx clusters show NAME --toml` prints a template. The six keys below describe or change parts of it. `phalanx train` requires this machine to be that cluster."""
    gpu: str | None = None
    """The GPU to plan for: a catalogue name or a TOML file."""
    gpus: int | None = field(default=None, metadata=within(1, 10_000_000))
    """Number of GPUs, over all nodes. Default: those of `nodes` nodes."""
    node: str | None = None
    """The node type: a catalogue name or a TOML file. Default: the usual one for the GPU."""
    gpus_per_node: int | None = field(default=None, metadata=within(1, 4096))
    """GPUs of each node. Default: those of the node type."""
    network: str | None = None
    """One network port between nodes: a catalogue name or a TOML file. Default: the usual one for the node."""
    nics: int | None = field(default=None, metadata=within(1, 1024))
    """Network ports of each node. Default: those of the node type."""
    kubernetes: Kubernetes = field(default_factory=Kubernetes)
    """launcher = "kubernetes": the pods."""

    @property
    def port_range(self) -> range | None:
        """The ports of `ports`; None: any. ValueError if it is not a range."""
        if self.ports is None:
            return None
        low, high = map(int, self.ports.split("-"))
        return range(low, high + 1)


PARTS = ("gpu", "gpus", "node", "gpus_per_node", "network", "nics")
"""Keys of [cluster] that describe machines to plan for, besides `name`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """When and where checkpoints are saved. A run also saves when it ends and when it is asked to stop."""

    save: bool = True
    """False: save no checkpoint, not even at the end or on SIGTERM. Such a run cannot be resumed, and needs no disk space; failures are recovered from memory. The keys that say when, where and how to save have no effect then."""
    every: int | None = field(default=None, metadata=within(1) | below("save = false saves none"))
    """Save every N steps. Default: only at the end, and on SIGTERM or SIGINT."""
    keep_last: int = field(default=2, metadata=within(1) | below("save = false saves none"))
    """Number of newest checkpoints to keep; older ones are removed after a newer one is complete."""
    keep_every: int | None = field(default=None, metadata=within(1))
    """Keep the checkpoint of every N-th step permanently."""
    async_save: bool = True
    """Write in the background: a step waits only until the state is copied to host memory. False: it waits until everything is written."""
    url: str | None = None
    """Where checkpoints are stored instead of the run directory: a folder, or any URL that fsspec supports, such as s3://bucket/folder."""
    local_first: bool = False
    """With `url`: save into the run directory first and upload in the background."""
    export_hf: bool = False
    """Export each checkpoint for transformers into hf/ of the run directory, in the background. An export is kept only if its logits for a fixed prompt equal the model's."""
    memory_copies: int = field(default=1, metadata=within(1, 16))
    """Other nodes that keep each in-memory copy. With N, the newest state survives the loss of N nodes at once."""
    memory_every: int | None = field(default=None, metadata=within(1))
    """Copy the state into host memory, outside the workers and on a neighboring node if there are several, every N steps. Default: if nothing else replicates the state, every step on CPUs; on GPUs after one of the first steps, then less and less often, until copies take half a percent of the training time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resilience:
    """Fault tolerance."""

    max_skipped: int = field(default=10, metadata=within(0))
    """Maximum number of consecutive steps with a non-finite loss or gradient; one more stops the run. All ranks skip such a step."""
    timeout: float = field(default=600.0, metadata=within(above=0.0))
    """Seconds a rank waits for the others in one collective."""
    restarts: int = field(default=100, metadata=within(0))
    """Failures per 1,000 new steps that the run recovers from; one more ends it. Repeated steps do not count as new. 0: the first failure ends the run. The same failure at the same step three times also ends it."""
    spares: int = field(default=0, metadata=within(0))
    """Nodes of `cluster.nodes` that stay idle and replace a lost node."""
    shrink: bool = True
    """Continue with fewer ranks if no spare is left, on a new layout with the same batch. False: wait for the node to return."""
    continue_degraded: bool = False
    """Healthy replicas continue with the whole batch while a failed replica restarts, instead of waiting for it."""
    heartbeat: float = field(default=2.5, metadata=within(above=0.0))
    """Seconds without a heartbeat after which a node counts as lost."""
    hang: float = field(default=5.0, metadata=within(above=0.0))
    """Minimum seconds without progress after which ranks are inspected for a hang; long steps raise it."""
    straggler: float = field(default=1.5, metadata=within(above=1.0))
    """Report a rank that computes this many times longer than the others, step after step."""
    check_every: int = field(default=25, metadata=within(0))
    """Compare the replicas' states every N steps, before the step is applied; 0: never."""
    spike: float | None = field(default=None, metadata=within(above=0.0))
    """Skip a step whose loss or gradient norm exceeds its recent mean by more than N standard deviations. Default: never."""
    rollback_after: int | None = field(default=None, metadata=within(1))
    """Consecutive bad steps after which the run returns to its last good state and skips the data since. Default: never."""
    preemption_notice: float = field(default=10.0, metadata=within(above=0.0))
    """Seconds between SIGTERM or SIGUSR1 and the loss of the machine; the state is saved within them."""
    node_return: float | None = field(default=None, metadata=within(0.0))
    """Seconds after which a lost node of this machine is restarted. Default: never. On other machines, their own scheduler decides."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Watch:
    """Logging, besides events.jsonl in the run directory."""

    log_every: int = field(default=1, metadata=within(1))
    """Print a line every N steps if the output is not a terminal; every step is recorded in any case."""
    tensorboard: bool = False
    """Write TensorBoard files into the run directory (needs the extra `watch`)."""
    wandb: bool = False
    """Log to Weights & Biases (needs the extra `wandb`)."""
    wandb_project: str = "phalanx"
    """Project in Weights & Biases."""
    page: bool = False
    """Serve a live page of the run while it goes on, at a port of this machine; `phalanx watch` shows it at any time."""
    timeline: bool = False
    """Record what each rank does and when, for `phalanx trace`: phases of a step, forward and backward, every collective."""
    timeline_steps: int = field(default=1000, metadata=within(1))
    """Steps of the timeline that are kept for each rank; older ones are removed."""
    mlflow: bool = False
    """Log to MLflow (needs the extra `mlflow`): settings, curves and tags. A resumed run continues its MLflow run."""
    mlflow_uri: str | None = None
    """Tracking server or store of MLflow, such as "http://host:5000". Default: MLFLOW_TRACKING_URI, or MLflow's own default."""
    mlflow_experiment: str = "phalanx"
    """Experiment in MLflow."""
    otlp: str | None = None
    """Send OpenTelemetry spans of the run to this address by OTLP over HTTP, such as "http://host:4318" (needs the extra `otel`). Headers: OTEL_EXPORTER_OTLP_HEADERS."""
    metrics_port: int | None = field(default=None, metadata=within(1, 65535))
    """Serve figures of the run for Prometheus at this port, under /metrics, while it goes on. Default: `phalanx watch` alone serves them."""
    metrics_host: str = "127.0.0.1"
    """Address that metrics_port listens at. Others than loopback demand metrics_token."""
    metrics_token: str | None = field(default=None, metadata=SECRET)
    """Token that a request for metrics must carry as `Authorization: Bearer`. "env:NAME" reads it from an environment variable. It is a secret: no file or message of the run shows it."""
    alerts: Alerts = field(default_factory=Alerts)
    """Alerts by webhook."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A program to run on every rank instead of Phalanx's own training. `phalanx launch` writes this table; of the others, only [cluster] and [resilience] are used then."""

    program: tuple[str, ...] | None = None
    """The program and its arguments, such as ["python", "train.py"]."""
    ranks_per_node: int | None = field(default=None, metadata=within(1, 1024))
    """Ranks on each node. Default: one per GPU, or one if there is none."""
    min_nodes: int | None = field(default=None, metadata=within(1, 1024))
    """The fewest nodes to continue with when others are lost and no spare is left. Default: all of them; the program waits for a lost node."""
    hang: float | None = field(default=None, metadata=within(above=0.0))
    """Seconds for which a rank may leave the file $PHALANX_PROGRESS untouched before it counts as hung. Default: no limit."""
    environment: tuple[str, ...] | None = None
    """Variables of the program's environment, such as ["NCCL_DEBUG=INFO"]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Everything that one run file says. Absent tables take their defaults."""

    model: ModelSpec = field(default_factory=ModelSpec)
    data: Data = Data()
    train: Train = Train()
    optimizer: Optimizer = Optimizer()
    lora: Lora = Lora()
    dpo: Dpo = Dpo()
    precision: Precision = Precision()
    memory: Memory = Memory()
    layout: Layout = field(default_factory=Layout)
    engine: Engine = field(default_factory=Engine)
    cluster: Cluster = Cluster()
    checkpoint: Checkpoint = Checkpoint()
    resilience: Resilience = Resilience()
    watch: Watch = Watch()
    command: Command = Command()

    @property
    def fp8_blocks(self) -> range | None:
        """Numbers of the blocks that compute in fp8, if the run does; blocks of multi-token prediction follow those of the model. None: all."""
        first, last = self.precision.bf16_first, self.precision.bf16_last
        if not first and not last:
            return None
        layers = self.model.layers
        return range(first, layers - last if last else layers + self.model.mtp_depth)

    @property
    def resumable(self) -> bool:
        """Whether the run can be resumed after a stop: it saves checkpoints, or is a program that saves what it likes."""
        return self.checkpoint.save or self.command.program is not None

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
