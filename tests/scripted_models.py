"""Tiny models that prefer some tokens, and tokens that are whole tool calls. A random model writes no calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

_SHARED, _FOLLOWS = 20.0, 160.0


def give_texts(folder: Path, texts: Mapping[int, str]) -> None:
    """Give tokens other texts in the vocabulary. The old text of each token must be `<ID>`. `Ġ` stands for a space, and
    `Ċ` for a line break, as in all byte-level vocabularies.
    """
    words = (folder / "tokenizer.json").read_text()
    for token_id, text in texts.items():
        assert words.count(f'"<{token_id}>"') == 1
        words = words.replace(f'"<{token_id}>"', json.dumps(text, ensure_ascii=False))
    (folder / "tokenizer.json").write_text(words)


def prefer(folder: Path, token_ids: Sequence[int], logit: float, end: int | None = None) -> None:
    """Change the weights of a tiny model such that the logits of these tokens are about `logit`, and all other logits
    are near 0.

    `end`: a token with the logit `logit + 1` after one of `token_ids`, and 0 after other tokens, so that no answer is
    empty. All embeddings share a large element, so all hidden states share this element too. The embeddings of
    `token_ids` have a second large element. The head reads both elements.
    """
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][:, 0] = _SHARED
    if end is not None:
        weights["model.embed_tokens.weight"][[*token_ids], 1] = _FOLLOWS
    _save(folder, weights)
    decoder = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).model
    others = torch.tensor([i for i in range(3, 259) if i not in token_ids])
    groups = [others] if end is None else [others, torch.tensor(token_ids)]
    with torch.no_grad():
        states = torch.stack([decoder(group[:, None]).last_hidden_state.mean((0, 1)) for group in groups])
    rows = torch.linalg.pinv(states).T  # rows[i] gives the logit 1 to states[i], and 0 to the others
    head = weights["lm_head.weight"]
    head *= 0.25
    head[[*token_ids]] = (rows.sum(0) * logit).to(head.dtype)
    if end is not None:
        head[end] = (rows[1] * (logit + 1.0)).to(head.dtype)
    _save(folder, weights)


def _save(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
