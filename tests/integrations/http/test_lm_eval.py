"""The command lm_eval with `local-completions`: generated answers, multiple choice, which needs `echo`, and lm_eval's
own template for LongBench v2 with generated contexts.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from http_fronts import Front
from transformers import AutoTokenizer

from trueroll.rollout import RolloutClient, SamplingParams

LONG_CONTEXT = Path(__file__).parents[3] / "examples" / "benchmarks" / "long_context.py"
CHOOSING = """
task: choosing
dataset_path: json
dataset_kwargs: {data_files: {test: "FOLDER/choosing.jsonl"}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc}]
"""
WRITING = """
task: writing
dataset_path: json
dataset_kwargs: {data_files: {test: "FOLDER/choosing.jsonl"}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[label]}}"
generation_kwargs: {until: ["1", "4"], max_gen_toks: 24}
metric_list: [{metric: exact_match}]
"""
LONG = """
include: COMMON
dataset_path: json
dataset_kwargs: {data_files: {train: "FOLDER/long.jsonl"}}
"""
LONG_CHOOSING = f"task: long_choosing{LONG}"
LONG_WRITING = f"""task: long_writing{LONG}
output_type: generate_until
doc_to_choice: null
generation_kwargs: {{until: ["<|im_end|>"], max_gen_toks: 4}}
metric_list: [{{metric: exact_match}}]
"""
# A random model prefers short texts, so it answers the first two questions correctly.
ROWS: list[dict[str, Any]] = [
    dict(question="A fish lives in", choices=["water", "books and papers", "the wilderness"], label=0),
    dict(question="6 times 7 is", choices=["41 or 43", "42"], label=1),
    dict(question="Bread is made of", choices=["flour and water", "iron"], label=0),
    dict(question="The moon shines at", choices=["noon", "night and day"], label=1),
]


@pytest.fixture(scope="module")
def long_questions(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Six questions: three about one context, and three about another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(LONG_CONTEXT.parent)
        spec = importlib.util.spec_from_file_location("long_context", LONG_CONTEXT)
        assert spec is not None and spec.loader is not None
        script = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, "long_context", script)  # its dataclasses look up their annotations here
        spec.loader.exec_module(script)
    return [question for seed in range(2) for question in script.generate(600, 3, seed)]


@dataclass(frozen=True)
class Evaluated:
    """The folder with lm_eval's results and samples of all tasks, and the prompt tokens found in the cache."""

    folder: Path
    num_hit_tokens: float

    def samples(self, task: str) -> list[dict[str, Any]]:
        [file] = self.folder.rglob(f"samples_{task}_*.jsonl")
        return sorted(map(json.loads, file.read_text().splitlines()), key=lambda sample: sample["doc_id"])

    def accuracy(self, task: str, metric: str) -> float:
        [file] = self.folder.rglob("results_*.json")
        return json.loads(file.read_text())["results"][task][f"{metric},none"]


@pytest.fixture(scope="module")
def evaluated(
    front: Front, chat_model: Path, long_questions: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Evaluated:
    from lm_eval import tasks

    folder = tmp_path_factory.mktemp("tasks")
    for name, rows in (("choosing", ROWS), ("long", long_questions)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = str(Path(tasks.__file__).parent / "longbench2" / "_longbench_common_yaml")
    for text in (CHOOSING, WRITING, LONG_CHOOSING, LONG_WRITING):
        name = text.split("task: ")[1].split("\n")[0]
        (folder / f"{name}.yaml").write_text(text.replace("FOLDER", str(folder)).replace("COMMON", common))
    settings = f"model={front.model},base_url={front.url}/v1/completions,tokenizer={chat_model},num_concurrent=3"
    command = [sys.executable, "-P", "-m", "lm_eval", "--model", "local-completions", "--model_args", settings]
    command += ["--tasks", "choosing,writing,long_choosing,long_writing", "--include_path", str(folder)]
    command += ["--output_path", str(folder / "results"), "--log_samples"]
    before = front.metric("trueroll_prefix_hit_tokens_total")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(folder / "cache"))
        done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return Evaluated(folder / "results", front.metric("trueroll_prefix_hit_tokens_total") - before)


def test_choices_have_the_clients_log_probs_and_the_most_probable_one_is_chosen(
    evaluated: Evaluated, client: RolloutClient, chat_model: Path
) -> None:
    encode = AutoTokenizer.from_pretrained(chat_model).encode
    right = 0
    for row, sample in zip(ROWS, evaluated.samples("choosing"), strict=True):
        num_before = len(encode(row["question"]))
        scores = client.score([encode(f"{row['question']} {choice}") for choice in row["choices"]], temperature=0)
        sums = [sum(score.logprobs.tolist()[num_before - 1 :]) for score in scores]
        assert [float(answer[0][0]) for answer in sample["resps"]] == sums
        right += sums.index(max(sums)) == row["label"]
        assert sample["acc"] == (sums.index(max(sums)) == row["label"])
    assert 0 < right < len(ROWS) and evaluated.accuracy("choosing", "acc") == right / len(ROWS)


def test_a_choice_is_greedy_if_the_model_would_generate_it(front: Front, client: RolloutClient) -> None:
    """Uses lm_eval's own parser of answers. Every choice of this test has one token."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    prompt = [5, 6, 7]
    [group] = client.generate([prompt], SamplingParams(temperature=0, max_tokens=1))
    written = group.samples[0].token_ids[0]
    fields = dict(model=front.model, temperature=0, max_tokens=1, logprobs=1, seed=1234, echo=True)
    outputs = front.post("/v1/completions", fields | {"prompt": [[*prompt, written], [*prompt, written + 1]]}).json()
    answers = LocalCompletionsAPI.parse_logprobs(outputs, ctxlens=[len(prompt)] * 2)
    assert [is_greedy for _, is_greedy in answers] == [True, False]


def test_generated_answers_equal_the_clients_up_to_the_stop_string(
    evaluated: Evaluated, client: RolloutClient, chat_model: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    params = SamplingParams(temperature=0, max_tokens=24, stop=("1", "4", tokenizer.eos_token))
    groups = client.generate([tokenizer.encode(row["question"]) for row in ROWS], params)
    written = [sample["resps"][0][0] for sample in evaluated.samples("writing")]
    # A tiny model also generates words such as `<314>`.
    assert {group.samples[0].stop_reason for group in groups} & {"1", "4"}
    for text, group in zip(written, groups, strict=True):
        whole = tokenizer.decode(group.samples[0].token_ids, skip_special_tokens=True)
        assert text == whole.split("1")[0].split("4")[0]


def test_hits_of_long_contexts_have_the_bits_of_misses(
    evaluated: Evaluated, long_questions: list[dict[str, Any]], front: Front, client: RolloutClient, chat_model: Path
) -> None:
    """lm_eval asked all questions with the prefix cache on. The client asks each again, with an empty cache."""
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    params = SamplingParams(temperature=0, max_tokens=4, stop=("<|im_end|>", tokenizer.eos_token))
    samples = evaluated.samples("long_writing")
    assert evaluated.num_hit_tokens > 4 * 600, "two of three questions found their context in the cache"
    assert len(samples) == len(long_questions) == 6
    for question, sample in zip(long_questions, samples, strict=True):
        [text] = [arguments["arg_0"] for arguments in sample["arguments"].values()]
        assert question["context"] in text and f"(D) {question['choice_D']}" in text
        client.invalidate_prefix_cache()
        prompt = tokenizer.encode(text)
        [group] = client.generate([prompt], params)
        assert group.samples[0].num_cached_tokens == 0 and len(prompt) > 600
        assert sample["resps"][0][0] == tokenizer.decode(group.samples[0].token_ids, skip_special_tokens=True)
