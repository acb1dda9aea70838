"""A dense decoder: one description that covers Llama, Qwen2 and Qwen3 checkpoints.

Owns the weights' layout, each as its backend wants it, under the names of the checkpoint (`checkpoint_tensors`); their
memory is given to it. Owns no KV cache and keeps no state between calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import Tensor

from ...kernels.ops import AttentionBatch, Backend, DenseLayer, Qkv, Weight
from .dense_config import DenseConfig

Empty: TypeAlias = Callable[..., Tensor]


def _new_layer(config: DenseConfig, backend: Backend, empty: Empty) -> DenseLayer:
    hidden, size = config.hidden_size, config.head_dim

    def matrix(rows: int, columns: int) -> Weight:
        return backend.new_weight(rows, columns, empty)

    q_size, kv_size = config.num_heads * size, config.num_kv_heads * size
    return DenseLayer(
        input_norm=empty(hidden),
        qkv=Qkv(
            matrix(q_size, hidden),
            matrix(kv_size, hidden),
            matrix(kv_size, hidden),
            (empty(q_size), empty(kv_size), empty(kv_size)) if config.qkv_bias else None,
            (empty(size), empty(size)) if config.qk_norm else None,
        ),
        o=matrix(hidden, q_size),
        post_norm=empty(hidden),
        gate=matrix(config.intermediate_size, hidden),
        up=matrix(config.intermediate_size, hidden),
        down=matrix(hidden, config.intermediate_size),
    )


def _checkpoint_tensors(layer: DenseLayer) -> dict[str, Weight]:
    """A layer's weights by their names in a checkpoint, without `model.layers.N`."""
    tensors: dict[str, Weight] = {
        "input_layernorm.weight": layer.input_norm,
        "self_attn.q_proj.weight": layer.qkv.q,
        "self_attn.k_proj.weight": layer.qkv.k,
        "self_attn.v_proj.weight": layer.qkv.v,
        "self_attn.o_proj.weight": layer.o,
        "post_attention_layernorm.weight": layer.post_norm,
        "mlp.gate_proj.weight": layer.gate,
        "mlp.up_proj.weight": layer.up,
        "mlp.down_proj.weight": layer.down,
    }
    if layer.qkv.biases is not None:
        names = (f"self_attn.{name}_proj.bias" for name in "qkv")
        tensors |= dict(zip(names, layer.qkv.biases, strict=True))
    if layer.qkv.head_norms is not None:
        names = (f"self_attn.{name}_norm.weight" for name in "qk")
        tensors |= dict(zip(names, layer.qkv.head_norms, strict=True))
    return tensors


class DenseModel:
    """The decoder's weights, uninitialized until a checkpoint is copied into them, and its forward pass.

    `empty(*shape)` makes the memory of each weight: uninitialized tensors of one dtype on one device. It is called in
    the same order for the same config and backend.
    """

    def __init__(self, config: DenseConfig, backend: Backend, empty: Empty) -> None:
        self.config, self.ops = config, backend
        embedding_shape = (config.vocab_size, config.hidden_size)
        self.embed = backend.new_weight(*embedding_shape, empty)
        self.layers = backend.new_layers([_new_layer(config, backend, empty) for _ in range(config.num_layers)])
        self.norm = empty(config.hidden_size)
        self.head = self.embed if config.tie_word_embeddings else backend.new_weight(*embedding_shape, empty)
        self.dtype, self.device = self.norm.dtype, self.norm.device
        self.inv_freq = config.inv_freq.to(self.device)

    def checkpoint_tensors(self) -> dict[str, Weight]:
        """Every tensor a checkpoint must have, by its Hugging Face name: where it is stored."""
        tensors: dict[str, Weight] = {"model.embed_tokens.weight": self.embed, "model.norm.weight": self.norm}
        if not self.config.tie_word_embeddings:
            tensors["lm_head.weight"] = self.head
        for i, layer in enumerate(self.layers):
            tensors |= {f"model.layers.{i}.{name}": tensor for name, tensor in _checkpoint_tensors(layer).items()}
        return tensors

    def tied_tensors(self) -> dict[str, str]:
        """Names a checkpoint may have beside `checkpoint_tensors`, for copies of them: of which."""
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.config.tie_word_embeddings else {}

    def ignored_tensors(self) -> frozenset[str]:
        """Names a checkpoint may have beside those, for constants that are computed here."""
        return frozenset(f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(len(self.layers)))

    @property
    def num_bytes(self) -> int:
        """The memory that the weights take."""
        tensors = self.checkpoint_tensors().values()
        return sum(tensor.nbytes for tensor in tensors)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        batch: AttentionBatch,
        kv_caches: Sequence[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Hidden states after the last norm, [M, hidden_size], for M tokens of the mixed batch.

        `token_ids`, `positions`, `slots`: int64 [M]. `kv_caches`: for each layer keys and values
        [blocks, block_size, kv_heads, head_dim]; the KV of the M tokens is written to `slots` before it is attended to.
        """
        ops, config, eps = self.ops, self.config, self.config.rms_norm_eps
        rotation = ops.rotation(positions, self.inv_freq, config.rope_scale)
        x = ops.embedding(token_ids, self.embed)
        x = ops.layers(x, self.layers, eps, rotation, kv_caches, slots, batch, config.head_dim**-0.5)
        return ops.rmsnorm(x, self.norm, eps)
