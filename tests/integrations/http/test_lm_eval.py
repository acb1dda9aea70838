"""The command lm_eval with `local-completions`, for generated answers and for multiple choice, which needs `echo`."""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from http_fronts import Front
from transformers import AutoTokenizer

from trueroll.rollout import RolloutClient, SamplingParams

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
# A random model prefers short texts, so it answers the first two questions correctly.
ROWS: list[dict[str, Any]] = [
    dict(question="A fish lives in", choices=["water", "books and papers", "the wilderness"], label=0),
    dict(question="6 times 7 is", choices=["41 or 43", "42"], label=1),
    dict(question="Bread is made of", choices=["flour and water", "iron"], label=0),
    dict(question="The moon shines at", choices=["noon", "night and day"], label=1),
]


@pytest.fixture(scope="module")
def evaluated(front: Front, chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with lm_eval's results and samples of both tasks."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "choosing.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "choosing.yaml").write_text(CHOOSING.replace("FOLDER", str(folder)))
    (folder / "writing.yaml").write_text(WRITING.replace("FOLDER", str(folder)))
    settings = f"model={front.model},base_url={front.url}/v1/completions,tokenizer={chat_model},num_concurrent=3"
    command = [sys.executable, "-P", "-m", "lm_eval", "--model", "local-completions", "--model_args", settings]
    command += ["--tasks", "choosing,writing", "--include_path", str(folder)]
    command += ["--output_path", str(folder / "results"), "--log_samples"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(folder / "cache"))
        done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return folder / "results"


def samples_of(task: str, folder: Path) -> list[dict[str, Any]]:
    [file] = folder.rglob(f"samples_{task}_*.jsonl")
    return sorted(map(json.loads, file.read_text().splitlines()), key=lambda sample: sample["doc_id"])


def accuracy(task: str, metric: str, folder: Path) -> float:
    [file] = folder.rglob("results_*.json")
    return json.loads(file.read_text())["results"][task][f"{metric},none"]


def test_choices_have_the_clients_log_probs_and_the_most_probable_one_is_chosen(
    evaluated: Path, client: RolloutClient, chat_model: Path
) -> None:
    encode = AutoTokenizer.from_pretrained(chat_model).encode
    right = 0
    for row, sample in zip(ROWS, samples_of("choosing", evaluated), strict=True):
        num_before = len(encode(row["question"]))
        scores = client.score([encode(f"{row['question']} {choice}") for choice in row["choices"]], temperature=0)
        sums = [sum(score.logprobs.tolist()[num_before - 1 :]) for score in scores]
        assert [float(answer[0][0]) for answer in sample["resps"]] == sums
        right += sums.index(max(sums)) == row["label"]
        assert sample["acc"] == (sums.index(max(sums)) == row["label"])
    assert 0 < right < len(ROWS) and accuracy("choosing", "acc", evaluated) == right / len(ROWS)


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
    evaluated: Path, client: RolloutClient, chat_model: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    params = SamplingParams(temperature=0, max_tokens=24, stop=("1", "4", tokenizer.eos_token))
    groups = client.generate([tokenizer.encode(row["question"]) for row in ROWS], params)
    written = [sample["resps"][0][0] for sample in samples_of("writing", evaluated)]
    # A tiny model also generates words such as `<314>`.
    assert {group.samples[0].stop_reason for group in groups} & {"1", "4"}
    for text, group in zip(written, groups, strict=True):
        whole = tokenizer.decode(group.samples[0].token_ids, skip_special_tokens=True)
        assert text == whole.split("1")[0].split("4")[0]
