"""The module for multi-token prediction (MTP): guesses the token after the next one (DeepSeek-V3, arXiv 2412.19437).

The module has a layer with a KV cache of its own. Row q reads token q, which is known, and the decoder's hidden state
of token q - 1. From the token and the hidden state, row q guesses token q + 1. The guess becomes a drafted token, which
the decoder verifies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...kernels.contract import Backend, Memory, Pages, Rotation, Weight
from ...kernels.layer import layer_of
from ...kernels.specs import MTP_PREFIX, DecoderSpec, LayerSpec

MTP_LAYER = f"{MTP_PREFIX}layers.0"


class Mtp:
    """The weights and the forward pass of the MTP module. `layer`: the module's layer. `new`: allocates the weights, as
    in `make_layer`.

    The module uses the embeddings and the head of the decoder. `spec`: describes the decoder.
    """

    def __init__(self, spec: DecoderSpec, layer: LayerSpec, backend: Backend, new: Callable[..., Any]) -> None:
        self._ops, self._spec = backend, spec
        size = spec.hidden_size
        self._join: Weight = new(f"{MTP_PREFIX}fc.weight", size, 2 * size)
        self._embedding_norm: Tensor = new(f"{MTP_PREFIX}pre_fc_norm_embedding.weight", size)
        self._hidden_norm: Tensor = new(f"{MTP_PREFIX}pre_fc_norm_hidden.weight", size)
        self._layers = backend.new_layers([layer_of(spec, layer, MTP_LAYER, new)])
        self._norm: Tensor = new(f"{MTP_PREFIX}norm.weight", size)

    def forward(
        self, embedded: Tensor, hidden: Tensor, rotations: list[Rotation], memory: Memory, pages: Pages
    ) -> Tensor:
        """Return hidden states [M, hidden_size], from which the head computes the logits of the guesses.

        `embedded`: the embeddings of the tokens, [M, hidden_size]. `hidden`: for each token, the hidden state of the
        preceding token, after the decoder's last norm. For a guessed token, `hidden` is this method's output for the
        preceding token. `rotations`: as `Decoder.rotations` returns them.
        """
        ops, norm = self._ops, self._spec.norm
        parts = ops.rmsnorm(embedded, self._embedding_norm, norm), ops.rmsnorm(hidden, self._hidden_norm, norm)
        x = ops.linear(torch.cat(parts, 1), self._join)
        x = ops.layers(x, self._layers, rotations, [memory], [pages])
        return ops.rmsnorm(x, self._norm, norm)
