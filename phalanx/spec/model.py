"""The shape of a decoder as a plain value, its parameter and FLOP counts, and the published models by name. Read by models,
planning, checks and `phalanx models`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from phalanx.spec.fields import NO_EFFECT, NOT_A_KEY, TRAINING_ONLY, within
from phalanx.spec.plan import Size


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """Scaling of the rotary frequencies to longer contexts: as in Llama 3, YaRN as in DeepSeek-V3, or all alike as in Gemma 3."""

    factor: float = field(metadata=within(1.0))
    """Factor by which the context grows."""
    kind: Literal["llama3", "yarn", "linear"] = "llama3"
    """"llama3": by wavelength; "linear": all by the factor; "yarn": by the number of rotations within the original context, with an attention temperature."""
    low_freq_factor: float = field(default=1.0, metadata=within(above=0.0))
    """Wavelengths longer than original_context / this are scaled by the full factor."""
    high_freq_factor: float = field(default=4.0, metadata=within(above=0.0))
    """Wavelengths shorter than original_context / this are not scaled."""
    original_context: int = field(default=8192, metadata=within(1))
    """Context length of the original training."""
    beta_fast: float = field(default=32.0, metadata=within(above=0.0))
    """yarn: frequencies with more rotations than this in the original context are not scaled."""
    beta_slow: float = field(default=1.0, metadata=within(above=0.0))
    """yarn: frequencies with fewer rotations than this are scaled by the full factor."""
    mscale: float = field(default=1.0, metadata=within(0.0))
    """yarn: temperature of the rotated part of queries and keys; used together with mscale_all_dim."""
    mscale_all_dim: float = field(default=0.0, metadata=within(0.0))
    """yarn: temperature of all attention scores; 0: none."""

    def temperature(self, strength: float = 1.0) -> float:
        """yarn: the correction of attention scores for the longer context."""
        return 1.0 if self.factor <= 1 else 0.1 * strength * math.log(self.factor) + 1.0

    @property
    def rotation_size(self) -> float:
        """yarn: the factor of cosines and sines; the rest of the correction is in the attention scale."""
        partly = self.mscale and self.mscale_all_dim
        return self.temperature(self.mscale) / self.temperature(self.mscale_all_dim) if partly else self.temperature()


@dataclass(frozen=True, kw_only=True, slots=True)
class Mla:
    """Multi-head latent attention, as in DeepSeek-V2 and V3: keys and values are expanded from one narrow vector per token."""

    kv_rank: int = field(metadata=within(1))
    """Width of the latent vector of keys and values."""
    q_rank: int | None = field(default=None, metadata=within(1))
    """Width of the latent vector of queries. Default: queries are projected directly from the residual stream."""
    nope_dim: int = field(default=128, metadata=within(1))
    """Width of the part of a head that is not rotated."""
    rope_dim: int = field(default=64, metadata=within(2))
    """Width of the rotated part of a head; all heads share its key."""
    value_dim: int = field(default=128, metadata=within(1))
    """Width of a head's values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moe:
    """Mixture of experts in place of the feed-forward layer: a router sends each token to a few experts."""

    experts: int = field(metadata=within(1))
    """Routed experts per layer."""
    active: int = field(metadata=within(1))
    """Routed experts per token (top-k)."""
    ffn: int = field(metadata=within(1))
    """Width of one expert."""
    shared: int = field(default=0, metadata=within(0))
    """Shared experts, which process every token besides the routed ones; stored as one expert of N times the width."""
    dense_layers: int = field(default=0, metadata=within(0))
    """The first N blocks keep the ordinary feed-forward layer, of width model.ffn."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """How scores become weights: softmax over all experts (Mixtral, Qwen3), or a sigmoid of each (DeepSeek-V3)."""
    normalize: bool = True
    """Divide the weights of a token's chosen experts by their sum."""
    scale: float = field(default=1.0, metadata=within(above=0.0))
    """Factor of the routed experts' sum."""
    groups: int = field(default=1, metadata=within(1))
    """Groups of equal size that the experts are divided into."""
    active_groups: int = field(default=1, metadata=within(1))
    """A token chooses only among the experts of its N best groups."""
    bias_rate: float = field(default=0.0, metadata=within(0.0) | TRAINING_ONLY)
    """Balancing without a loss: after each step the bias of an overloaded expert decreases and that of an underloaded one increases, by up to this; 0: no bias."""
    balance_loss: float = field(default=0.0, metadata=within(0.0) | TRAINING_ONLY)
    """Weight of the load-balancing loss, computed over each sequence; 0: none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A decoder-only transformer. GPT-2/3, Llama 2/3, Mistral, Qwen2/3, Gemma 2/3, Phi-3/4, Mixtral and DeepSeek-V3 are settings of it."""

    preset: str | None = field(default=None, metadata=NO_EFFECT | TRAINING_ONLY)  # the sizes are compared themselves
    """Name of a known model, such as "llama3-8b"; any other key here overrides its sizes. `phalanx models` lists the names."""
    from_: str | None = field(default=None, metadata=TRAINING_ONLY)
    """A folder of Hugging Face weights, a model of the Hugging Face hub such as "Qwen/Qwen3-0.6B" or "org/name@revision", a run directory or a checkpoint, whose model and weights training starts from."""
    module: str | None = None
    """A custom model instead of the built-in decoder: "package.module:Class"; docs/own-model.md describes its interface."""
    config: str | None = None
    """Any causal language model of transformers instead of the built-in decoder: a config.json, a folder that holds one, or a model of the Hugging Face hub. The run directory has its text. model.from sets it where the built-in decoder does not compute the folder's model; docs/any-model.md says what is possible."""
    options: tuple[tuple[str, str | int | float | bool], ...] = ()
    """Plain values for a custom module to read."""
    dim: int = field(default=256, metadata=within(1))
    """Width of the residual stream."""
    layers: int = field(default=4, metadata=within(1))
    """Number of blocks."""
    heads: int = field(default=4, metadata=within(1))
    """Query heads per block."""
    kv_heads: int | None = field(default=None, metadata=within(1))
    """Key/value heads per block (grouped-query attention). Default: as many as query heads."""
    head_dim: int | None = field(default=None, metadata=within(1))
    """Width of one head. Default: dim / heads."""
    ffn: int | None = field(default=None, metadata=within(1))
    """Width of the feed-forward layer. Default: 4·dim for gelu, 8/3·dim rounded up to a multiple of 64 for swiglu and geglu."""
    vocab: int | None = field(default=None, metadata=within(1))
    """Rows of the embedding. Default: the preset's, unless data.tokenizer names a tokenizer of more tokens or of less than half as many, whose size is then rounded up to a multiple of 64; without a preset, the vocabulary size of the tokenizer."""
    norm: Literal["rms", "layer"] = "rms"
    """Kind of the norms of attention and feed-forward."""
    norm_place: Literal["before", "both"] = "before"
    """Where they are: before attention and feed-forward, or also after them, before the residual addition, as in Gemma 2 and 3."""
    norm_zero_centered: bool = False
    """Norms multiply by 1 + weight, as in Gemma: weight decay and initial values keep them near 1."""
    norm_eps: float = field(default=1e-5, metadata=within(above=0.0))
    """Added to the variance in the norms."""
    activation: Literal["swiglu", "geglu", "gelu"] = "swiglu"
    """Feed-forward kind: gated SiLU, gated GELU as in Gemma, or GELU without a gate (both in the tanh approximation)."""
    positions: Literal["rope", "learned"] = "rope"
    """Rotary embedding in attention, or a learned vector per position."""
    context: int = field(default=8192, metadata=within(1))
    """Maximum sequence length; the size of the table of learned positions."""
    rope_theta: float = field(default=10000.0, metadata=within(above=0.0))
    """Base of the rotary frequencies."""
    rope_fraction: float = field(default=1.0, metadata=within(above=0.0))
    """Part of a head's channels that rotary positions rotate, the first ones; 1: all of them."""
    rope_local_theta: float | None = field(default=None, metadata=within(above=0.0))
    """Base of the rotary frequencies in blocks with a window, which are not scaled, as in Gemma 3. Default: as in the other blocks."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies, as in Llama 3.1 and later."""
    window: int | None = field(default=None, metadata=within(1))
    """Sliding-window attention: a position attends to itself and the N - 1 before it. Default: to all before it."""
    window_from: int = field(default=0, metadata=within(0))
    """The first N blocks attend without the window, as in Qwen2."""
    global_every: int | None = field(default=None, metadata=within(2))
    """Every N-th block attends without the window: 2 as in Gemma 2, 6 as in Gemma 3. Default: none."""
    qk_norm: bool = False
    """RMS-normalize each query and key head, as Qwen3 does."""
    query_scalar: int | None = field(default=None, metadata=within(1))
    """Attention scores are divided by the square root of this. Default: the width of a head."""
    attention_cap: float | None = field(default=None, metadata=within(above=0.0))
    """Soft cap of attention scores, cap·tanh(score / cap), as in Gemma 2. No fused kernel computes it: the scores are in memory."""
    logit_cap: float | None = field(default=None, metadata=within(above=0.0))
    """Soft cap of the logits, as in Gemma 2."""
    scale_embedding: bool = False
    """Multiply embeddings by the square root of dim, as in Gemma."""
    bias: bool = False
    """Biases in every linear layer, as in GPT-2."""
    qkv_bias: bool = False
    """Biases of queries, keys and values alone, as in Qwen2."""
    tied: bool = False
    """Use the embedding as the output head."""
    mla: Mla | None = None
    """Multi-head latent attention in place of grouped-query attention."""
    moe: Moe | None = None
    """Mixture of experts in place of the feed-forward layer."""
    mtp_depth: int = field(default=0, metadata=within(0, 8) | TRAINING_ONLY)
    """Multi-token prediction: number of extra modules, each of which predicts one token further ahead; used in training only."""
    mtp_loss_weight: float = field(default=0.3, metadata=within(0.0) | TRAINING_ONLY)
    """Weight of the mean multi-token prediction loss."""
    init_std: float = field(default=0.02, metadata=within(0.0) | TRAINING_ONLY)
    """Standard deviation of the initial weights; divided by sqrt(2·layers) for weights that write into the residual stream."""
    export_as: Literal["phi3"] | None = field(default=None, metadata=NO_EFFECT | TRAINING_ONLY)
    """Hugging Face family that exports are written as, where several compute the same: "phi3" has query, key and value in one matrix, gate and up in another. Default: chosen by the settings."""
    vocab_undecided: bool = field(default=False, compare=False, metadata=NOT_A_KEY)
    """The rows are the preset's although the default tokenizer has far fewer tokens, and nobody has confirmed them."""
    measured: Size | None = field(default=None, compare=False, metadata=NOT_A_KEY)
    """The size of a custom module, counted from the module itself; None: not counted yet."""

    @property
    def is_builtin(self) -> bool:
        """Whether it is the built-in decoder, whose blocks, names and sizes are known; otherwise a custom module or a model of transformers."""
        return self.module is None and self.config is None

    @property
    def custom_key(self) -> str:
        """The key that names another model than the built-in decoder, for messages."""
        if self.module is not None:
            return f'model.module = "{self.module}"'
        kind = re.search(r'"model_type": ?"([^"]*)"', self.config or "")
        return f"model.config ({kind[1]})" if kind else "model.config"

    @property
    def kv(self) -> int:
        return self.kv_heads or self.heads

    @property
    def head(self) -> int:
        return self.head_dim or self.dim // self.heads

    @property
    def hidden(self) -> int:
        if self.ffn is not None:
            return self.ffn
        return 4 * self.dim if not self.gated else -(-8 * self.dim // 3 // 64) * 64

    @property
    def computed_defaults(self) -> dict[str, int]:
        """The values of the keys whose default follows from other sizes."""
        return {"model.kv_heads": self.kv, "model.head_dim": self.head, "model.ffn": self.hidden}

    @property
    def rotated(self) -> int:
        """Width of the rotated part of a head."""
        return int(self.head * self.rope_fraction) if self.mla is None else self.mla.rope_dim

    @property
    def gated(self) -> bool:
        """Whether the feed-forward layer has a gate: three matrices instead of two."""
        return self.activation != "gelu"

    @property
    def norms(self) -> int:
        """Norms of the residual stream in a block."""
        return 4 if self.norm_place == "both" else 2

    @property
    def variations(self) -> dict[str, str | int | float]:
        """The settings of single families that this model has, with their values; a Llama has none."""
        defaults = {key.name: key.default for key in fields(self)}
        return {key: getattr(self, key) for key in _VARIATIONS if getattr(self, key) != defaults[key]}

    def window_of(self, layer: int) -> int | None:
        """The window of a block's attention; None: it has none."""
        everywhere = self.global_every is not None and (layer + 1) % self.global_every == 0
        return None if everywhere or layer < self.window_from else self.window

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each block, and of those that multi-token prediction adds."""
        blocks = [self.window_of(layer) for layer in range(self.layers)]
        return (*blocks, *(blocks[-1:] * self.mtp_depth))

    def attended(self, sequence: int) -> float:
        """Positions that attention counts for, in the mean of all blocks: twice what a causal kernel computes, so that a block without a window
        counts the whole sequence."""
        keys = [min(window or sequence, sequence) for window in self.windows]
        return sum(number * (2 - number / sequence) for number in keys) / len(keys) if sequence else 0.0

    @property
    def dense_layers(self) -> int:
        """Blocks with an ordinary feed-forward layer: the first ones."""
        return self.layers if self.moe is None else min(self.moe.dense_layers, self.layers)

    def option(self, name: str, default: str | int | float | bool) -> Any:
        """A value of [model.options], for custom modules."""
        return dict(self.options).get(name, default)

    @property
    def rows(self) -> int:
        """Rows of the embedding; known once the run file is resolved."""
        assert self.vocab is not None, "vocab is filled in when the run file is resolved"
        return self.vocab

    def parameters(self) -> int:
        """Number of parameters, equal to the module's own count (a test compares them on the meta device).

        For a custom module that was not measured this is the count of a built-in decoder of these sizes.
        """
        if self.measured is not None:
            return self.measured.parameters
        return self._total(self.moe.experts if self.moe else 0)

    def active_parameters(self) -> int:
        """Parameters that one token uses: all but the routed experts it is not sent to. The embedding counts in full."""
        if self.measured is not None:
            return self.measured.active
        return self._total(self.moe.active if self.moe else 0)

    @property
    def whole_sequences(self) -> tuple[str, str] | None:
        """The key because of which a rank needs whole sequences, and the reason. Context parallelism is refused, by the checks and by
        the planner; None: it is possible."""
        return ("mtp_depth", "predicts tokens across the boundaries") if self.mtp_depth else None

    def flops_per_token(self, sequence: int, *, causal: bool = False) -> float:
        """FLOPs of the forward and backward of one token: 6 per weight of a matrix, plus 12·layers·width·sequence for attention.

        The head counts, the embedding look-up does not; of the experts, those that a token is sent to count. Attention counts in
        full, as if it were not causal: the convention of the PaLM paper, so that MFU compares with published figures. `causal` counts
        half of it, what a causal kernel computes. A block with a window counts what is in its windows. With latent attention the width is the mean of the widths of queries and values. Of a custom
        module that was measured, 6 per weight of its own matrices.
        """
        if self.measured is not None:
            return self.measured.flops_per_token
        dense, sparse = self._blocks()
        matrices = (dense + sparse) * self.attention_matrices() + dense * self._dense_matrices()
        matrices += sparse * self._expert_matrices(self.moe.active if self.moe else 0)
        matrices += self.mtp_depth * 2 * self.dim**2 + (1 + self.mtp_depth) * self.rows * self.dim
        if self.mla is None:
            widths = 2 * self.heads * self.head
        else:
            widths = self.heads * (self.mla.nope_dim + self.mla.rope_dim + self.mla.value_dim)
        attention = 6 * (dense + sparse) * widths * (sequence if self.window is None else self.attended(sequence))
        return 6.0 * matrices + (attention / 2 if causal else attention)

    def _blocks(self) -> tuple[int, int]:
        """(Blocks with an ordinary feed-forward layer, blocks with experts); multi-token prediction adds blocks like the last one."""
        sparse = self.layers - self.dense_layers
        return (self.dense_layers, sparse + self.mtp_depth) if sparse else (self.dense_layers + self.mtp_depth, 0)

    def _total(self, experts: int) -> int:
        """Number of parameters, with this many routed experts counted per block."""
        dense, sparse = self._blocks()
        embedding = self.rows * self.dim + (self.context * self.dim if self.positions == "learned" else 0)
        head = 0 if self.tied else self.rows * self.dim
        around = self._attention_parameters() + self.norms * self._norm_parameters()
        feed_forward = self._dense_matrices()
        if self.bias:
            feed_forward += self.hidden * (2 if self.gated else 1) + self.dim
        blocks = dense * (around + feed_forward) + sparse * (around + self._expert_matrices(experts))
        mtp = self.mtp_depth * (2 * self.dim**2 + 3 * self._norm_parameters())
        return embedding + head + blocks + self._norm_parameters() + mtp

    def _norm_parameters(self) -> int:
        return self.dim * (2 if self.norm == "layer" else 1)

    def _attention_parameters(self) -> int:
        if self.mla is not None:
            return self.attention_matrices() + self.mla.kv_rank + (self.mla.q_rank or 0)  # the inner norms
        biases = self.head * (self.heads + 2 * self.kv) if self.bias or self.qkv_bias else 0
        biases += self.dim if self.bias else 0  # of the output
        return self.attention_matrices() + biases + (2 * self.head if self.qk_norm else 0)

    def attention_matrices(self) -> int:
        """Parameters of the matrices of one block's attention."""
        mla = self.mla
        if mla is None:
            return self.dim * self.head * (2 * self.heads + 2 * self.kv)
        query = self.heads * (mla.nope_dim + mla.rope_dim)
        queries = self.dim * query if mla.q_rank is None else mla.q_rank * (self.dim + query)
        keys_values = self.dim * (mla.kv_rank + mla.rope_dim) + mla.kv_rank * self.heads * (mla.nope_dim + mla.value_dim)
        return queries + keys_values + self.heads * mla.value_dim * self.dim

    def _dense_matrices(self) -> int:
        return self.dim * self.hidden * (3 if self.gated else 2)

    def _expert_matrices(self, experts: int) -> int:
        """Weights of this many routed experts, of the shared experts and of the router."""
        return self.dim * (3 * self.moe.ffn * (experts + self.moe.shared) + self.moe.experts) if self.moe else 0


_VARIATIONS = (
    "window", "qkv_bias", "norm_place", "norm_zero_centered", "rope_local_theta", "query_scalar", "attention_cap", "logit_cap",
    "scale_embedding", "rope_fraction",
)  # fmt: skip
_GPT = ModelSpec(vocab=50257, norm="layer", activation="gelu", positions="learned", bias=True, tied=True)
_LLAMA2 = ModelSpec(vocab=32000, context=4096)
_LLAMA3 = ModelSpec(vocab=128256, kv_heads=8, rope_theta=500000.0)
_QWEN2 = ModelSpec(vocab=151936, qkv_bias=True, rope_theta=1e6, norm_eps=1e-6, context=131072)
_QWEN3 = ModelSpec(
    vocab=151936, kv_heads=8, head_dim=128, qk_norm=True, rope_theta=1e6, norm_eps=1e-6, context=40960
)  # head_dim is not dim / heads: 0.6b, 4b and 32b have wider attention than residual stream
_PHI3 = ModelSpec(vocab=32064, context=4096, export_as="phi3")
_GEMMA = ModelSpec(
    head_dim=256, norm_place="both", norm_zero_centered=True, activation="geglu", scale_embedding=True, tied=True, norm_eps=1e-6
)
_GEMMA2 = replace(_GEMMA, vocab=256000, window=4096, global_every=2, attention_cap=50.0, logit_cap=30.0)
_GEMMA3 = replace(
    _GEMMA, vocab=262144, context=32768, window=512, global_every=6, qk_norm=True, rope_theta=1e6, rope_local_theta=1e4
)
_GEMMA3_LONG = replace(
    _GEMMA3, vocab=262208, context=131072, window=1024, rope_scaling=RopeScaling(kind="linear", factor=8.0)
)  # the decoders of models that also read images

# fmt: off
_MODELS = {
    "gpt2-124m": replace(_GPT, dim=768, layers=12, heads=12, context=1024),
    "gpt3-175b": replace(_GPT, dim=12288, layers=96, heads=96, context=2048),
    "mt-nlg-530b": replace(_GPT, dim=20480, layers=105, heads=128, context=2048, vocab=51200),
    "llama2-7b": replace(_LLAMA2, dim=4096, layers=32, heads=32, ffn=11008),
    "llama2-13b": replace(_LLAMA2, dim=5120, layers=40, heads=40, ffn=13824),
    "llama2-70b": replace(_LLAMA2, dim=8192, layers=80, heads=64, kv_heads=8, ffn=28672),
    "llama3-8b": replace(_LLAMA3, dim=4096, layers=32, heads=32, ffn=14336),
    "llama3-70b": replace(_LLAMA3, dim=8192, layers=80, heads=64, ffn=28672),
    "llama3-405b": replace(
        _LLAMA3, dim=16384, layers=126, heads=128, ffn=53248, context=131072, rope_scaling=RopeScaling(factor=8.0)
    ),
    "llama3.2-1b": replace(
        _LLAMA3, dim=2048, layers=16, heads=32, ffn=8192, tied=True, context=131072, rope_scaling=RopeScaling(factor=32.0)
    ),
    "qwen2.5-0.5b": replace(_QWEN2, dim=896, layers=24, heads=14, kv_heads=2, ffn=4864, tied=True, context=32768),
    "qwen2.5-1.5b": replace(_QWEN2, dim=1536, layers=28, heads=12, kv_heads=2, ffn=8960, tied=True),
    "qwen2.5-3b": replace(_QWEN2, dim=2048, layers=36, heads=16, kv_heads=2, ffn=11008, tied=True, context=32768),
    "qwen2.5-7b": replace(_QWEN2, dim=3584, layers=28, heads=28, kv_heads=4, ffn=18944, vocab=152064),
    "qwen2.5-14b": replace(_QWEN2, dim=5120, layers=48, heads=40, kv_heads=8, ffn=13824, vocab=152064),
    "qwen2.5-32b": replace(_QWEN2, dim=5120, layers=64, heads=40, kv_heads=8, ffn=27648, vocab=152064),
    "qwen2.5-72b": replace(_QWEN2, dim=8192, layers=80, heads=64, kv_heads=8, ffn=29568, vocab=152064),
    "mistral-7b": ModelSpec(
        vocab=32000, dim=4096, layers=32, heads=32, kv_heads=8, ffn=14336, context=32768, window=4096
    ),
    "phi3-mini": replace(_PHI3, dim=3072, layers=32, heads=32, ffn=8192, window=2047),
    "phi3-medium": replace(_PHI3, dim=5120, layers=40, heads=40, kv_heads=10, ffn=17920, window=2047),
    "phi4": replace(
        _PHI3, dim=5120, layers=40, heads=40, kv_heads=10, ffn=17920, vocab=100352, context=16384, rope_theta=250000.0
    ),
    "qwen3-0.6b": replace(_QWEN3, dim=1024, layers=28, heads=16, ffn=3072, tied=True),
    "qwen3-1.7b": replace(_QWEN3, dim=2048, layers=28, heads=16, ffn=6144, tied=True),
    "qwen3-4b": replace(_QWEN3, dim=2560, layers=36, heads=32, ffn=9728, tied=True),
    "qwen3-8b": replace(_QWEN3, dim=4096, layers=36, heads=32, ffn=12288),
    "qwen3-14b": replace(_QWEN3, dim=5120, layers=40, heads=40, ffn=17408),
    "qwen3-32b": replace(_QWEN3, dim=5120, layers=64, heads=64, ffn=25600),
    "qwen3-30b-a3b": replace(
        _QWEN3, dim=2048, layers=48, heads=32, kv_heads=4, ffn=6144, moe=Moe(experts=128, active=8, ffn=768, balance_loss=0.001)
    ),
    "gemma2-2b": replace(_GEMMA2, dim=2304, layers=26, heads=8, kv_heads=4, ffn=9216),
    "gemma2-9b": replace(_GEMMA2, dim=3584, layers=42, heads=16, kv_heads=8, ffn=14336),
    "gemma2-27b": replace(_GEMMA2, dim=4608, layers=46, heads=32, kv_heads=16, head_dim=128, ffn=36864, query_scalar=144),
    "gemma3-270m": replace(_GEMMA3, dim=640, layers=18, heads=4, kv_heads=1, ffn=2048),
    "gemma3-1b": replace(_GEMMA3, dim=1152, layers=26, heads=4, kv_heads=1, ffn=6912),
    "gemma3-4b": replace(_GEMMA3_LONG, dim=2560, layers=34, heads=8, kv_heads=4, ffn=10240),
    "gemma3-12b": replace(_GEMMA3_LONG, dim=3840, layers=48, heads=16, kv_heads=8, ffn=15360),
    "gemma3-27b": replace(
        _GEMMA3_LONG, dim=5376, layers=62, heads=32, kv_heads=16, head_dim=128, ffn=21504, query_scalar=168
    ),
    "mixtral-8x7b": ModelSpec(
        vocab=32000, dim=4096, layers=32, heads=32, kv_heads=8, ffn=14336, rope_theta=1e6, context=32768,
        moe=Moe(experts=8, active=2, ffn=14336, balance_loss=0.02),
    ),
    "deepseek-v3": ModelSpec(
        vocab=129280, dim=7168, layers=61, heads=128, ffn=18432, norm_eps=1e-6, context=163840,
        rope_scaling=RopeScaling(kind="yarn", factor=40.0, original_context=4096, mscale=1.0, mscale_all_dim=1.0),
        mla=Mla(kv_rank=512, q_rank=1536, nope_dim=128, rope_dim=64, value_dim=128),
        moe=Moe(
            experts=256, active=8, ffn=2048, shared=1, dense_layers=3, router="sigmoid", scale=2.5,
            groups=8, active_groups=4, bias_rate=0.001, balance_loss=0.0001,
        ),
    ),
    # The sizes of PaLM; its blocks run attention and feed-forward in parallel, these one after the other.
    "palm-540b": ModelSpec(
        vocab=256000, dim=18432, layers=118, heads=48, kv_heads=1, head_dim=256, ffn=73728, tied=True, context=2048
    ),
    # For tests on a laptop's CPU; without a vocabulary size, so that they take the tokenizer's.
    "tiny-dense": ModelSpec(dim=64, layers=2, heads=4, kv_heads=2, context=1024),
    "tiny-window": ModelSpec(dim=64, layers=4, heads=4, kv_heads=2, context=1024, window=16, global_every=3),
    "tiny-gemma2": replace(
        _GEMMA2, vocab=None, dim=64, layers=4, heads=4, kv_heads=2, head_dim=24, ffn=96, context=1024, window=16, query_scalar=20,
        attention_cap=2.0, logit_cap=3.0,
    ),
    "tiny-gemma3": replace(
        _GEMMA3, vocab=None, dim=64, layers=4, heads=4, kv_heads=2, head_dim=24, ffn=96, context=1024, window=16, global_every=3,
        rope_scaling=RopeScaling(kind="linear", factor=8.0),
    ),
    "tiny-moe": ModelSpec(
        dim=64, layers=2, heads=4, kv_heads=2, context=1024, moe=Moe(experts=8, active=2, ffn=64, bias_rate=0.01)
    ),
    "tiny-mla": ModelSpec(
        dim=64, layers=3, heads=4, ffn=192, context=1024,
        mla=Mla(kv_rank=32, q_rank=48, nope_dim=16, rope_dim=8, value_dim=16),
        moe=Moe(
            experts=8, active=2, ffn=32, shared=1, dense_layers=1, router="sigmoid", scale=2.5,
            groups=4, active_groups=2, bias_rate=0.01, balance_loss=0.0001,
        ),
    ),
}
# fmt: on

PRESETS = {name: replace(model, preset=name) for name, model in _MODELS.items()}
"""Published models as settings of one decoder, each carrying its own name; a test compares the published parameter counts."""
