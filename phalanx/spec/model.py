"""The shape of a decoder as a plain value, its parameter and FLOP counts, and the published models by name. Read by models,
planning, checks and `phalanx models`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from phalanx.spec.fields import within


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """Stretching of rotary frequencies to longer contexts: Llama 3's way, or YaRN as DeepSeek-V3 uses it."""

    factor: float = field(metadata=within(1.0))
    """How many times longer the context becomes."""
    kind: Literal["llama3", "yarn"] = "llama3"
    """"llama3": by wavelength; "yarn": by the number of turns inside the original context, with warmer attention."""
    low_freq_factor: float = field(default=1.0, metadata=within(above=0.0))
    """Wavelengths longer than original_context / this are stretched by the full factor."""
    high_freq_factor: float = field(default=4.0, metadata=within(above=0.0))
    """Wavelengths shorter than original_context / this are left alone."""
    original_context: int = field(default=8192, metadata=within(1))
    """The context length of the first training."""
    beta_fast: float = field(default=32.0, metadata=within(above=0.0))
    """yarn: frequencies that turn more often than this in the original context are left alone."""
    beta_slow: float = field(default=1.0, metadata=within(above=0.0))
    """yarn: frequencies that turn less often than this are stretched by the full factor."""
    mscale: float = field(default=1.0, metadata=within(0.0))
    """yarn: strength of the correction to the rotated part of queries and keys; together with mscale_all_dim."""
    mscale_all_dim: float = field(default=0.0, metadata=within(0.0))
    """yarn: strength of the correction to all attention scores; 0: none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mla:
    """Multi-head latent attention, as in DeepSeek-V2 and V3: keys and values come from one narrow vector per token."""

    kv_rank: int = field(metadata=within(1))
    """Width of the vector that keys and values are expanded from."""
    q_rank: int | None = field(default=None, metadata=within(1))
    """Width that queries are narrowed to first; left out: queries come straight from the residual stream."""
    nope_dim: int = field(default=128, metadata=within(1))
    """Width of a head's part that is not rotated."""
    rope_dim: int = field(default=64, metadata=within(2))
    """Width of a head's rotated part; its key is shared by all heads."""
    value_dim: int = field(default=128, metadata=within(1))
    """Width of a head's values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moe:
    """Mixture of experts in place of the feed-forward layer: each token is sent to a few of many."""

    experts: int = field(metadata=within(1))
    """Routed experts per layer."""
    active: int = field(metadata=within(1))
    """Routed experts that each token is sent to."""
    ffn: int = field(metadata=within(1))
    """Width of one expert."""
    shared: int = field(default=0, metadata=within(0))
    """Experts that every token goes through, besides the routed ones; held as one of so many times the width."""
    dense_layers: int = field(default=0, metadata=within(0))
    """The first so many blocks keep the ordinary feed-forward layer, of width model.ffn."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """How scores become weights: softmax over all experts (Mixtral, Qwen3), or a sigmoid of each (DeepSeek-V3)."""
    normalize: bool = True
    """Weights of a token's chosen experts are divided by their sum."""
    scale: float = field(default=1.0, metadata=within(above=0.0))
    """The routed experts' sum is multiplied by it."""
    groups: int = field(default=1, metadata=within(1))
    """Experts are split into so many groups of equal size …"""
    active_groups: int = field(default=1, metadata=within(1))
    """… and a token chooses among the experts of its so many best groups."""
    bias_rate: float = field(default=0.0, metadata=within(0.0))
    """Balancing without a loss: after each step the bias of an overloaded expert falls and that of another rises, by up to this; 0: no bias."""
    balance_loss: float = field(default=0.0, metadata=within(0.0))
    """Weight of the classic balancing loss, taken over each sequence; 0: none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A decoder-only transformer: GPT-2/3, Llama 2/3, Qwen3, Mixtral and DeepSeek-V3 are settings of it."""

    preset: str | None = None
    """Name of a known model, such as "llama3-8b"; any other key here overrides its sizes. `phalanx models` lists them."""
    from_: str | None = None
    """A folder of Hugging Face weights, or a run directory or checkpoint, whose model and weights training starts from."""
    module: str | None = None
    """Your own model instead of the built-in decoder: "package.module:Class"; docs/own-model.md says what it must offer."""
    options: tuple[tuple[str, str | int | float | bool], ...] = ()
    """Whatever your own module wants to read, as plain values."""
    dim: int = field(default=256, metadata=within(1))
    """Width of the residual stream."""
    layers: int = field(default=4, metadata=within(1))
    """Number of blocks."""
    heads: int = field(default=4, metadata=within(1))
    """Query heads per block."""
    kv_heads: int | None = field(default=None, metadata=within(1))
    """Key/value heads per block (grouped-query attention); left out: as many as query heads."""
    head_dim: int | None = field(default=None, metadata=within(1))
    """Width of one head; left out: dim / heads."""
    ffn: int | None = field(default=None, metadata=within(1))
    """Width of the feed-forward layer; left out: 4·dim for gelu, 8/3·dim rounded up to 64 for swiglu."""
    vocab: int | None = field(default=None, metadata=within(1))
    """Rows of the embedding; left out: what the tokenizer has."""
    norm: Literal["rms", "layer"] = "rms"
    """Normalisation before attention and feed-forward."""
    norm_eps: float = field(default=1e-5, metadata=within(above=0.0))
    """Added to the variance inside the norms."""
    activation: Literal["swiglu", "gelu"] = "swiglu"
    """Feed-forward kind: gated SiLU, or GELU (tanh approximation)."""
    positions: Literal["rope", "learned"] = "rope"
    """Rotary embedding in attention, or a learned vector per position."""
    context: int = field(default=8192, metadata=within(1))
    """Longest sequence the model is made for; the size of the table of learned positions."""
    rope_theta: float = field(default=10000.0, metadata=within(above=0.0))
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Stretching of the rotary frequencies, as in Llama 3.1 and later."""
    qk_norm: bool = False
    """RMS-normalise each query and key head, as Qwen3 does."""
    bias: bool = False
    """Biases on every linear layer, as in GPT-2."""
    tied: bool = False
    """Use the embedding as the output head too."""
    mla: Mla | None = None
    """Multi-head latent attention in place of grouped-query attention."""
    moe: Moe | None = None
    """Mixture of experts in place of the feed-forward layer."""
    mtp_depth: int = field(default=0, metadata=within(0, 8))
    """Multi-token prediction: so many further modules, each predicting one token more ahead; they serve training only."""
    mtp_loss_weight: float = field(default=0.3, metadata=within(0.0))
    """Weight of their mean loss in training."""
    init_std: float = field(default=0.02, metadata=within(0.0))
    """Standard deviation of the initial weights; those that write into the residual stream get it divided by sqrt(2·layers)."""

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
        return 4 * self.dim if self.activation == "gelu" else -(-8 * self.dim // 3 // 64) * 64

    @property
    def rotated(self) -> int:
        """Width of a head's part that rotary positions turn."""
        return self.head if self.mla is None else self.mla.rope_dim

    @property
    def dense_layers(self) -> int:
        """Blocks with an ordinary feed-forward layer: the first ones."""
        return self.layers if self.moe is None else min(self.moe.dense_layers, self.layers)

    def option(self, name: str, default: str | int | float | bool) -> Any:
        """A value of [model.options], for modules of your own."""
        return dict(self.options).get(name, default)

    @property
    def rows(self) -> int:
        """Rows of the embedding, known once the tokenizer is."""
        assert self.vocab is not None, "vocab is filled in when the run file is resolved"
        return self.vocab

    def parameters(self) -> int:
        """Number of trained values; equal to what the module holds (a test counts it on the meta device).

        Of a module of your own nothing is known here: counts are then those of a built-in decoder of these sizes.
        """
        return self._total(self.moe.experts if self.moe else 0)

    def active_parameters(self) -> int:
        """Those that work on one token: all but the routed experts it is not sent to. The embedding counts in full."""
        return self._total(self.moe.active if self.moe else 0)

    def flops_per_token(self, sequence: int) -> float:
        """Forward and backward of one token: 6 per weight that multiplies, plus 12·layers·width·sequence of attention.

        The head counts, the embedding look-up does not; of experts, those that a token is sent to. Attention is counted in
        full, as if it were not causal: the convention of the PaLM paper that published MFU figures follow, so that ours can
        be laid beside them. With latent attention the width is the mean of queries' and values', as keys and values expanded.
        """
        dense, sparse = self._blocks()
        matrices = (dense + sparse) * self._attention_matrices() + dense * self._dense_matrices()
        matrices += sparse * self._expert_matrices(self.moe.active if self.moe else 0)
        matrices += self.mtp_depth * 2 * self.dim**2 + (1 + self.mtp_depth) * self.rows * self.dim
        if self.mla is None:
            widths = 2 * self.heads * self.head
        else:
            widths = self.heads * (self.mla.nope_dim + self.mla.rope_dim + self.mla.value_dim)
        return 6.0 * matrices + 6 * (dense + sparse) * widths * sequence

    def _blocks(self) -> tuple[int, int]:
        """Blocks with an ordinary feed-forward layer and blocks with experts; those that predict ahead are like the last."""
        sparse = self.layers - self.dense_layers
        return (self.dense_layers, sparse + self.mtp_depth) if sparse else (self.dense_layers + self.mtp_depth, 0)

    def _total(self, experts: int) -> int:
        """Trained values when so many routed experts of each block are counted."""
        dense, sparse = self._blocks()
        embedding = self.rows * self.dim + (self.context * self.dim if self.positions == "learned" else 0)
        head = 0 if self.tied else self.rows * self.dim
        around = self._attention_parameters() + 2 * self._norm_parameters()
        feed_forward = self._dense_matrices()
        if self.bias:
            feed_forward += self.hidden * (2 if self.activation == "swiglu" else 1) + self.dim
        blocks = dense * (around + feed_forward) + sparse * (around + self._expert_matrices(experts))
        ahead = self.mtp_depth * (2 * self.dim**2 + 3 * self._norm_parameters())
        return embedding + head + blocks + self._norm_parameters() + ahead

    def _norm_parameters(self) -> int:
        return self.dim * (2 if self.norm == "layer" else 1)

    def _attention_parameters(self) -> int:
        if self.mla is not None:
            return self._attention_matrices() + self.mla.kv_rank + (self.mla.q_rank or 0)  # the inner norms
        biases = self.head * (self.heads + 2 * self.kv) + self.dim if self.bias else 0  # query, key, value; output
        return self._attention_matrices() + biases + (2 * self.head if self.qk_norm else 0)

    def _attention_matrices(self) -> int:
        mla = self.mla
        if mla is None:
            return self.dim * self.head * (2 * self.heads + 2 * self.kv)
        query = self.heads * (mla.nope_dim + mla.rope_dim)
        queries = self.dim * query if mla.q_rank is None else mla.q_rank * (self.dim + query)
        keys_values = self.dim * (mla.kv_rank + mla.rope_dim) + mla.kv_rank * self.heads * (mla.nope_dim + mla.value_dim)
        return queries + keys_values + self.heads * mla.value_dim * self.dim

    def _dense_matrices(self) -> int:
        return self.dim * self.hidden * (3 if self.activation == "swiglu" else 2)

    def _expert_matrices(self, experts: int) -> int:
        """So many routed experts, the shared ones and the router."""
        return self.dim * (3 * self.moe.ffn * (experts + self.moe.shared) + self.moe.experts) if self.moe else 0


_GPT = ModelSpec(vocab=50257, norm="layer", activation="gelu", positions="learned", bias=True, tied=True)
_LLAMA2 = ModelSpec(vocab=32000, context=4096)
_LLAMA3 = ModelSpec(vocab=128256, kv_heads=8, rope_theta=500000.0)
_QWEN3 = ModelSpec(
    vocab=151936, kv_heads=8, head_dim=128, qk_norm=True, rope_theta=1e6, norm_eps=1e-6, context=40960
)  # head_dim is not dim / heads: 0.6b, 4b and 32b have wider attention than residual stream

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
    "qwen3-0.6b": replace(_QWEN3, dim=1024, layers=28, heads=16, ffn=3072, tied=True),
    "qwen3-1.7b": replace(_QWEN3, dim=2048, layers=28, heads=16, ffn=6144, tied=True),
    "qwen3-4b": replace(_QWEN3, dim=2560, layers=36, heads=32, ffn=9728, tied=True),
    "qwen3-8b": replace(_QWEN3, dim=4096, layers=36, heads=32, ffn=12288),
    "qwen3-14b": replace(_QWEN3, dim=5120, layers=40, heads=40, ffn=17408),
    "qwen3-32b": replace(_QWEN3, dim=5120, layers=64, heads=64, ffn=25600),
    "qwen3-30b-a3b": replace(
        _QWEN3, dim=2048, layers=48, heads=32, kv_heads=4, ffn=6144, moe=Moe(experts=128, active=8, ffn=768, balance_loss=0.001)
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
