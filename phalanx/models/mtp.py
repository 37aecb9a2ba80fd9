"""Multi-token prediction (DeepSeek-V3): modules after the last block, each of which predicts one token further ahead. Used in training
only. `models/decoder` holds them; `training/loss` takes their targets from `mtp_targets`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.models.attention import Scope
from phalanx.models.layers import norm
from phalanx.spec.model import ModelSpec

IGNORED = -100


class MTPModule(nn.Module):
    """One depth: joins the previous state with the embedding of a token further ahead and applies one block.

    Embedding and output head are shared with the model.
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
        """The state for the next depth, and the same state normalized, for the head."""
        joined_BSD = self.join(torch.cat((self.token_norm(token_BSD), self.state_norm(state_BSD)), dim=-1))
        # From here on it is a residual stream, in the precision of the previous one.
        state_BSD = self.block(joined_BSD.to(state_BSD.dtype), scope, rotation)
        return state_BSD, self.norm(state_BSD)


def mtp_tokens(tokens_BS: Tensor, depth: int) -> Tensor:
    """The token `depth` positions ahead of each position. The last positions have none and no target, so that any token will do."""
    return F.pad(tokens_BS[:, depth:], (0, min(depth, tokens_BS.shape[1])))


def mtp_targets(targets_BS: Tensor, documents_BS: Tensor | None, depth: int) -> Tensor:
    """The targets of depth 1, 2, …: the target `depth` positions ahead, if it is in the window and in the same document.

    A position near the end of its document reads a token of the next document. Only later positions could attend to it, and none
    of them is in the same document, so that dropping the position's own target is enough.
    """
    shifted_BS = F.pad(targets_BS[:, depth:], (0, min(depth, targets_BS.shape[1])), value=IGNORED)
    if documents_BS is not None:
        later_BS = F.pad(documents_BS[:, depth:], (0, min(depth, documents_BS.shape[1])), value=-1)
        shifted_BS = shifted_BS.masked_fill(later_BS != documents_BS, IGNORED)
    return shifted_BS.masked_fill(shifted_BS < 0, IGNORED)
