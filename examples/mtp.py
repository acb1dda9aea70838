"""Train a tiny Qwen3.5 with a module for multi-token prediction (MTP), and draft with it: `python examples/mtp.py`.

The model learns the documentation of this repository byte by byte. The module then learns to guess the byte after the
next one, from the frozen model's hidden states. At the end, the example generates the same samples in three ways:
without drafts, with drafts from repeated text, and with drafts from the module. The example checks that all three ways
give the same bits. The whole example takes a few minutes on two cores.
"""

import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm, Qwen3_5TextRotaryEmbedding

from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.request import GenerateRequest, SampleOutput, SamplingParams

LENGTH, BATCH = 128, 16
MODEL_STEPS, MODULE_STEPS = 400, 400
PROMPTS, SAMPLES, NEW_TOKENS, PROMPT_LEN = 8, 2, 200, 64
CONFIG = Qwen3_5TextConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    max_position_embeddings=1024,
    bos_token_id=0,
    eos_token_id=0,
    tie_word_embeddings=True,
)


class Module(nn.Module):
    """The MTP module in torch, with the names of its weights in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        size, eps = CONFIG.hidden_size, CONFIG.rms_norm_eps
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(size, eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(size, eps)
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(CONFIG, CONFIG.num_hidden_layers - 1)])  # with attention
        self.norm = Qwen3_5RMSNorm(size, eps)
        self.rotary = Qwen3_5TextRotaryEmbedding(CONFIG)

    def forward(self, embedded: Tensor, before: Tensor) -> Tensor:
        """Return the hidden states of tokens. `before`: the hidden states of the tokens before these tokens."""
        x = self.fc(torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(before)), -1))
        places = torch.arange(x.shape[1])[None]
        mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)[None, None]
        x = self.layers[0](x, position_embeddings=self.rotary(x, places), attention_mask=mask, position_ids=places)
        return self.norm(x[0] if isinstance(x, tuple) else x)


def batches(text: np.ndarray, count: int) -> Tensor:
    """Return random pieces of the text: int64 [count, BATCH, LENGTH + 1]."""
    starts = np.random.default_rng(0).integers(0, len(text) - LENGTH - 1, (count, BATCH))
    return torch.from_numpy(text[starts[..., None] + np.arange(LENGTH + 1)].astype(np.int64))


def train(name: str, trained: nn.Module, text: np.ndarray, steps: int, loss_of) -> None:
    optimizer, started = torch.optim.AdamW(trained.parameters(), lr=2e-3), time.perf_counter()
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for step, tokens in enumerate(batches(text, steps), 1):
        loss = loss_of(tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            seconds = time.perf_counter() - started
            print(f"{name}: step {step} of {steps}, loss {loss.item():.2f}, {seconds:.0f} s", flush=True)


def model_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())


def module_loss(model: nn.Module, module: Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        hidden = model.model(tokens[:, :-1]).last_hidden_state
        embedded = model.model.embed_tokens(tokens[:, 1:-1])
    logits = model.lm_head(module(embedded, hidden[:, :-1]))
    return cross_entropy(logits.flatten(0, 1), tokens[:, 2:].flatten())


def save(model: nn.Module, module: Module, folder: Path) -> None:
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    added = {f"mtp.{name}": each.detach() for name, each in module.named_parameters()}
    save_file(tensors | added, folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"mtp_num_hidden_layers": 1}))


def generate(folder: Path, prompts: np.ndarray, speculative: str) -> tuple[list[SampleOutput], Engine]:
    """Return the samples of the prompts, and the engine that generated them. An engine with drafts drafts in every
    step.
    """
    engine = Engine(EngineConfig(model=str(folder), speculative=speculative, num_blocks=512), draft_always=True)
    params = SamplingParams(n=SAMPLES, temperature=1.0, max_tokens=NEW_TOKENS, ignore_eos=True, seed=1)
    samples = list[SampleOutput]()
    for number, prompt in enumerate(prompts):
        engine.add(GenerateRequest(str(number), prompt, params))
    while engine.has_unfinished:
        samples += [output for output in engine.step() if isinstance(output, SampleOutput)]
    return sorted(samples, key=lambda sample: (sample.request_id, sample.index)), engine


def compare(folder: Path, text: np.ndarray) -> None:
    starts = np.linspace(0, len(text) - PROMPT_LEN - 1, PROMPTS).astype(np.int64)
    prompts = text[starts[:, None] + np.arange(PROMPT_LEN)].astype(np.int32)
    plain, _ = generate(folder, prompts, "off")
    for speculative in ("ngram", "mtp"):
        samples, engine = generate(folder, prompts, speculative)
        for one, other in zip(plain, samples, strict=True):
            assert one.token_ids == other.token_ids and one.logprobs.tobytes() == other.logprobs.tobytes()
        total = sum(len(sample.token_ids) for sample in samples)
        speed = total / (total - sum(sample.num_accepted_tokens for sample in samples))
        [drafts] = engine.stats().drafts
        counts = zip(drafts.accepted, drafts.drafted, strict=True)
        shares = ", ".join(f"{right / tried:.2f}" for right, tried in counts if tried)
        print(f"{drafts.drafter}: {speed:.2f} tokens per step of a sample; accepted by position: {shares}")


def main(folder: Path) -> None:
    torch.manual_seed(0)
    docs = Path(__file__).resolve().parent.parent / "docs"
    text = np.frombuffer(b"".join(path.read_bytes() for path in sorted(docs.glob("*.md"))), np.uint8)
    known, unseen = text[: -len(text) // 10], text[-len(text) // 10 :]
    model, module = Qwen3_5ForCausalLM(CONFIG), Module()
    train("model", model, known, MODEL_STEPS, lambda tokens: model_loss(model, tokens))
    model.requires_grad_(False)
    train("module", module, known, MODULE_STEPS, lambda tokens: module_loss(model, module, tokens))
    save(model, module, folder)
    compare(folder, unseen)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
