"""The conversion of SmolLM2-135M-Instruct from a GGUF file to the Hugging Face format. Owns nothing."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer

# The parts of tensor names: in GGUF files, and in transformers.
_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "blk": "layers",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(source: Path, folder: Path) -> None:
    """Convert the GGUF file `source` to a bfloat16 model in `folder`, with its tokenizer and chat template."""
    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name, trust_remote_code=False)
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    tensors = _read_tensors(source, config.num_attention_heads, config.num_key_value_heads)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, trust_remote_code=False)
    tokenizer.save_pretrained(folder)


def _read_tensors(source: Path, num_heads: int, num_kv_heads: int) -> dict[str, torch.Tensor]:
    """Return the tensors in bfloat16, by their names in transformers.

    The GGUF loader of transformers is not used: it may leave weights packed, depending on its version and on other
    installed packages.
    """
    from gguf import GGUFReader, dequantize

    tensors = {}
    for tensor in GGUFReader(source).tensors:
        values = torch.tensor(dequantize(tensor.data, tensor.tensor_type)).to(torch.bfloat16)
        if "attn_q" in tensor.name:
            values = _part_pairs(values, num_heads)
        elif "attn_k" in tensor.name:
            values = _part_pairs(values, num_kv_heads)
        tensors[".".join(["model", *(_NAMES.get(part, part) for part in tensor.name.split("."))])] = values
    return tensors


def _part_pairs(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder rows from GGUF's order to transformers' order.

    Two rows that are rotated together lie side by side in a GGUF file, and half a head apart in transformers.
    """
    return rows.view(num_heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
