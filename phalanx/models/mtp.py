"""Multi-token prediction (DeepSeek-V3): small modules behind the last block, each predicting one token further ahead. They serve
training only. `models/decoder` holds them; training takes the targets of each from `mtp_targets`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.models.attention import Scope
from phalanx.models.layers import norm
from phalanx.spec.model import ModelSpec

IGNORED = -100


class MTPModule(nn.Module):
    """One depth: the state so far and the embedding of a token further ahead, joined and sent through one block.

    Embedding and output head are the model's own and stay outside.
    """

    def __init__(self, spec: ModelSpec, block: nn.Module):
        super().__init__()
        self.token_norm = norm(spec, spec.dim)
        self.state_norm = norm(spec, spec.dim)
        self.join = nn.Linear(2 * spec.dim, spec.dim, bias=False)
        self.block = block
        self.norm = norm(spec, spec.dim)

    def forward(
        self, state_BSD: Tensor, token_BSD: Tensor, scope: Scope, rotation: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """The next depth's state, which the depth after it goes on from, and the same normalised, for the head."""
        joined_BSD = self.join(torch.cat((self.token_norm(token_BSD), self.state_norm(state_BSD)), dim=-1))
        # From here on it is a residual stream, and keeps the precision of the one it came from.
        state_BSD = self.block(joined_BSD.to(state_BSD.dtype), scope, rotation)
        return state_BSD, self.norm(state_BSD)


def mtp_tokens(tokens_BS: Tensor, depth: int) -> Tensor:
    """The token `depth` places further on at each position. The last ones have none; any token will do, as no target is theirs."""
    return F.pad(tokens_BS[:, depth:], (0, min(depth, tokens_BS.shape[1])))


def mtp_targets(targets_BS: Tensor, documents_BS: Tensor | None, depth: int) -> Tensor:
    """What depth 1, 2, … is to predict: the target `depth` places further on, if that is in the window and the same document.

    A position near its document's end has read a token of the next one, but only positions behind it would see that, and
    none of them is in its document: leaving its own target out is enough.
    """
    shifted_BS = F.pad(targets_BS[:, depth:], (0, min(depth, targets_BS.shape[1])), value=IGNORED)
    if documents_BS is not None:
        later_BS = F.pad(documents_BS[:, depth:], (0, min(depth, documents_BS.shape[1])), value=-1)
        shifted_BS = shifted_BS.masked_fill(later_BS != documents_BS, IGNORED)
    return shifted_BS.masked_fill(shifted_BS < 0, IGNORED)
