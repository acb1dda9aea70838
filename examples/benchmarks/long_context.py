"""Answer questions about long contexts, and compare samples after prefix cache hits with samples after misses, bit by
bit.

`python examples/benchmarks/long_context.py [MODEL]`. Each context is filler text with facts at random places. Questions
about a context are multiple-choice, in the format of LongBench v2: they have the fields `context`, `question`,
`choice_A` to `choice_D` and `answer`. Other fields are ignored. Questions also have the field `choices` of lm-eval's
tasks for LongBench v2. *Needle* questions ask for one fact. *Multi-hop* questions need a chain of three facts.
`--write` writes the questions as JSON lines; `--read` reads such a file, for example one with LongBench v2's own
questions, in place of generating them.

Every question is answered twice: once with the prefix cache, which all questions about a context except the first one
hit, and once with an empty cache. The report shows the accuracy, the hit rate, and the times. Exits with 1 if any bit
differs. Without MODEL, the model is tiny and has random weights, so the accuracy means nothing.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from laws_engine import write_model
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.request import GenerateRequest, SampleOutput, SamplingParams
from trueroll.engine.running.loading import load_dummy
from trueroll.rollout import resolve_model

LETTERS = "ABCD"
NAMES = ("Ada", "Bo", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hal", "Ida", "Jo", "Kit", "Lea", "Max", "Nia", "Ole", "Pia")
PLACES = ("Bergen", "Cusco", "Dakar", "Hobart", "Kyoto", "Lima", "Oslo", "Perth", "Quito", "Riga", "Sofia", "Tunis")
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
MOST_FILE_BYTES = 2**30
HOPS = 3


def generate(num_chars: int, num_questions: int, seed: int) -> list[dict[str, Any]]:
    """Return questions about one context of about `num_chars` characters."""
    rng = random.Random(seed)
    facts, asked = list[str](), list[dict[str, Any]]()
    names = [f"{name}-{rng.randrange(1000)}" for name in rng.sample(NAMES, len(NAMES))]
    for i in range(num_questions):
        place = rng.choice(PLACES)
        chain = [names.pop() for _ in range(HOPS if i % 2 else 1)]
        facts.append(f"{chain[-1]} lives in {place}. ")
        facts += [f"{a} lives where {b} lives. " for a, b in zip(chain, chain[1:], strict=False)]
        others = rng.sample([each for each in PLACES if each != place], 3)
        choices = sorted([place, *others], key=lambda _: rng.random())
        asked.append(
            dict(
                sub_domain="multi-hop" if i % 2 else "needle",
                question=f"Where does {chain[0]} live?",
                answer=LETTERS[choices.index(place)],
                choices=choices,
                **{f"choice_{letter}": choice for letter, choice in zip(LETTERS, choices, strict=True)},
            )
        )
    pieces = [FILLER] * max(1, (num_chars - sum(map(len, facts))) // len(FILLER))
    for fact in facts:
        pieces.insert(rng.randrange(len(pieces) + 1), fact)
    context = "".join(pieces)
    return [dict(_id=f"{seed}-{i}", context=context, **each) for i, each in enumerate(asked)]


def read(file: Path) -> list[dict[str, str]]:
    """Return the questions in a file of JSON lines, or of one JSON list as LongBench v2 has."""
    if (size := file.stat().st_size) > MOST_FILE_BYTES:
        raise typer.BadParameter(f"{file} has {size} bytes (limit {MOST_FILE_BYTES})")
    text = file.read_text()
    found = json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in text.splitlines()]
    needed = {"context", "question", "answer", *(f"choice_{letter}" for letter in LETTERS)}
    for i, each in enumerate(found):
        if missing := needed - each.keys():
            raise typer.BadParameter(f"{file}: question {i} lacks the field {min(missing)}")
    return found


def text_of(question: dict[str, str]) -> str:
    choices = "".join(f"({letter}) {question[f'choice_{letter}']}\n" for letter in LETTERS)
    return f"\n\nQuestion: {question['question']}\n{choices}The answer is ("


@dataclass
class Answered:
    """The answer to a question, and the time that it took."""

    sample: SampleOutput
    num_prompt_tokens: int
    seconds: float

    def has_bits_of(self, other: Answered) -> bool:
        one, two = self.sample, other.sample
        assert one.logprobs is not None and two.logprobs is not None
        return one.token_ids == two.token_ids and one.logprobs.tobytes() == two.logprobs.tobytes()


class Reader:
    """Answers questions with an engine. Answers include log-probs."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, max_new: int) -> None:
        self._engine, self._tokenizer, self._max_new = engine, tokenizer, max_new
        self._count = 0

    def answer(self, question: dict[str, str], is_cached: bool) -> Answered:
        """Answer a question. If `is_cached` is False, first empty the prefix cache."""
        if not is_cached:
            self._engine.invalidate_prefix_cache()
        parts = question["context"], text_of(question)
        tokens = np.array([token for part in parts for token in self._tokenizer.encode(part).ids], np.int32)
        params = SamplingParams(temperature=0.0, max_tokens=self._max_new, seed=0, ignore_eos=True)
        self._count += 1
        self._engine.add(GenerateRequest(str(self._count), tokens, params))
        start, found = time.monotonic(), list[Any]()
        while self._engine.has_unfinished:
            found += self._engine.step()
        [sample] = found
        return Answered(sample, len(tokens), time.monotonic() - start)

    def letter(self, answered: Answered) -> str:
        return self._tokenizer.decode(answered.sample.token_ids).strip()[:1].upper()


@contextmanager
def open_reader(model: str | None, num_tokens: int, max_new: int, threads: int) -> Iterator[Reader]:
    settings: dict[str, Any] = dict(num_blocks=num_tokens // 16 + 256, max_num_seqs=4, num_threads=threads)
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(Path(folder)) if model is None else Path(resolve_model(model))
        config = EngineConfig(model=str(path), **settings)
        engine = Engine(config, load_dummy(config) if model is None else None)
        yield Reader(engine, Tokenizer.from_file(str(path / "tokenizer.json")), max_new)
        engine.close()


def report(questions: list[dict[str, str]], reader: Reader, console: Console) -> bool:
    """Answer all questions twice and print a table. Return whether all bits are equal."""
    warm = [reader.answer(question, is_cached=i > 0) for i, question in enumerate(questions)]
    cold = [reader.answer(question, is_cached=False) for question in questions]
    kinds = dict.fromkeys(question.get("sub_domain", "all") for question in questions)
    table = Table("questions", "count", "right", "tokens of a prompt", "hit rate", "s with a hit", "s without", "equal")
    for kind in kinds:
        own = [i for i, question in enumerate(questions) if question.get("sub_domain", "all") == kind]
        right = sum(reader.letter(warm[i]) == questions[i]["answer"] for i in own)
        equal = sum(warm[i].has_bits_of(cold[i]) for i in own)
        tokens = sum(warm[i].num_prompt_tokens for i in own)
        hits = sum(warm[i].sample.num_cached_tokens for i in own)
        found = [i for i in own if warm[i].sample.num_cached_tokens]
        times = [sum(each[i].seconds for i in found) / max(1, len(found)) for each in (warm, cold)]
        cells = f"{tokens // len(own):,}", f"{hits / tokens:.1%}", *(f"{each:.2f}" for each in times)
        table.add_row(kind, str(len(own)), str(right), *cells, f"{equal} of {len(own)}")
    console.print(table)
    return all(a.has_bits_of(b) for a, b in zip(warm, cold, strict=True))


def main(
    model: Annotated[str | None, typer.Argument(help="A model; a tiny random one by default.")] = None,
    tokens: Annotated[int, typer.Option(min=1000, help="Approximate number of tokens of a context.")] = 131_072,
    questions: Annotated[int, typer.Option(min=1, max=8, help="Questions about each context.")] = 4,
    contexts: Annotated[int, typer.Option(min=1, help="Number of contexts.")] = 1,
    max_new: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 8,
    chars: Annotated[float, typer.Option(min=0.1, help="Characters of a token.")] = 1.0,
    threads: Annotated[int, typer.Option(min=1)] = 1,
    write: Annotated[Path | None, typer.Option(help="Write the questions as JSON lines.")] = None,
    read_from: Annotated[Path | None, typer.Option("--read", help="Read the questions from this file.")] = None,
) -> None:
    """Answer questions about long contexts, with and without the prefix cache."""
    if read_from is not None:
        asked = read(read_from)
    else:
        asked = [each for i in range(contexts) for each in generate(int(tokens * chars), questions, i)]
    if write is not None:
        write.write_text("".join(json.dumps(each) + "\n" for each in asked))
    longest = max(len(each["context"]) for each in asked)
    room = max(int(longest / chars * 1.05), tokens) + 2048
    with open_reader(model, room, max_new, threads) as reader:
        is_equal = report(asked, reader, Console(width=120))
    if not is_equal:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
