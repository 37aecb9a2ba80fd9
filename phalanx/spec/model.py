"""The shape of a decoder as a plain value, with the counts that follow from it. Read by models, planning and checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from phalanx.spec.fields import within


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """Llama-3's stretching of rotary frequencies to longer contexts."""

    factor: float = field(metadata=within(1.0))
    """How many times longer the context becomes."""
    low_freq_factor: float = field(default=1.0, metadata=within(above=0.0))
    """Wavelengths longer than original_context / this are stretched by the full factor."""
    high_freq_factor: float = field(default=4.0, metadata=within(above=0.0))
    """Wavelengths shorter than original_context / this are left alone."""
    original_context: int = field(default=8192, metadata=within(1))
    """The context length of the first training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A dense decoder-only transformer: GPT-2/3, Llama 2/3 and Qwen3 are settings of it."""

    preset: str | None = None
    """Name of a known model, such as "llama3-8b"; any other key here overrides its sizes. `phalanx models` lists them."""
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
    def rows(self) -> int:
        """Rows of the embedding, known once the tokenizer is."""
        assert self.vocab is not None, "vocab is filled in when the run file is resolved"
        return self.vocab

    def parameters(self) -> int:
        """Number of trained values; equal to what the module holds (a test counts it on the meta device)."""
        embedding = self.rows * self.dim + (self.context * self.dim if self.positions == "learned" else 0)
        head = 0 if self.tied else self.rows * self.dim
        return embedding + head + self.layers * self._block_parameters() + self._norm_parameters()

    def flops_per_token(self, sequence: int) -> float:
        """Forward and backward of one token: 6 per weight that multiplies, plus 12·layers·width·sequence of attention.

        The head counts, the embedding look-up does not. Attention is counted in full, as if it were not causal: the
        convention of the PaLM paper that published MFU figures follow, so that ours can be laid beside them.
        """
        matrices = self.layers * self._block_matrices() + self.rows * self.dim
        attention = 12 * self.layers * self.heads * self.head * sequence
        return 6.0 * matrices + attention

    def _norm_parameters(self) -> int:
        return self.dim * (2 if self.norm == "layer" else 1)

    def _block_matrices(self) -> int:
        attention = self.dim * self.head * (2 * self.heads + 2 * self.kv)
        return attention + self.dim * self.hidden * (3 if self.activation == "swiglu" else 2)

    def _block_parameters(self) -> int:
        biases = 0
        if self.bias:
            biases = self.head * (self.heads + 2 * self.kv) + self.dim  # query, key, value; output
            biases += self.hidden * (2 if self.activation == "swiglu" else 1) + self.dim
        qk_norm = 2 * self.head if self.qk_norm else 0
        return self._block_matrices() + 2 * self._norm_parameters() + biases + qk_norm
