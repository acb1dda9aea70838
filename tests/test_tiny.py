"""The tiny models can reveal an error. A model with flat or degenerate outputs would hide errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers


def _logits(folder: Path, token_ids: list[int]) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0]


def test_the_top_two_logits_lie_apart(any_model: Path) -> None:
    top = _logits(any_model, list(range(3, 67))).topk(2).values
    assert (top[:, 0] - top[:, 1]).median() > 0.1


def test_the_oldest_token_of_the_context_moves_the_logits(any_model: Path) -> None:
    context = list(range(3, 35))
    change = _logits(any_model, context)[-1] - _logits(any_model, [400, *context[1:]])[-1]
    assert change.abs().max() > 0.1


def test_greedy_text_does_not_settle_on_one_token(any_model: Path) -> None:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(any_model)
    prompt = torch.tensor([[5, 6, 7, 8]])
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=32, min_new_tokens=32, do_sample=False
    )
    assert len(set(out[0, 4:].tolist())) > 4


def test_the_tokenizer_decodes_what_it_encoded(any_model: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(any_model)
    text = "Grüße, 世界!"
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(token_ids) == len(text.encode())
    assert tokenizer.decode(token_ids) == text
