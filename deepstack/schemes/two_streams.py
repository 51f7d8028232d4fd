"""Schemes of two streams, both (batch, seq, d_model), which every layer changes."""

import torch
from torch import Tensor

from deepstack.schemes.scheme import Scheme, Stream


class TwoStreams(Scheme, registered=False):
    """A scheme whose stream is a tuple of two tensors; z_l is both, one after the other."""

    def token_state(self, stream: Stream) -> Tensor:
        return torch.cat(tuple(stream), dim=-1)

    def set_token_state(self, stream: Stream, state: Tensor) -> Stream:
        return state.chunk(2, dim=-1)
