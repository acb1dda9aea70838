"""The vLLM report runs on a tiny model, with a fake vLLM that answers at once."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

from trueroll.engine.config import EngineConfig
from trueroll.engine.running.loading import load_model
from trueroll.rollout.tools.bench import Workload

REPORT = Path(__file__).parents[2] / "examples" / "benchmarks" / "vllm_report.py"
WORKLOADS = [Workload("group", 2, 0, 8, 2, 6, 1.0), Workload("single", 1, 0, 8, 1, 5, 0.0)]
STAND_IN = """
from types import SimpleNamespace

class SamplingParams(SimpleNamespace):
    pass

class LLM:
    def __init__(self, folder, dtype, max_model_len, enable_prefix_caching, skip_tokenizer_init):
        print("a line of vLLM's own")

    def reset_prefix_cache(self):
        pass

    def generate(self, prompts, params, use_tqdm):
        assert all(len(prompt["prompt_token_ids"]) == 8 for prompt in prompts)
        assert params.logprobs == 0 and params.ignore_eos and not params.detokenize
        sample = SimpleNamespace(token_ids=[1] * (params.max_tokens - LACKS))
        return [SimpleNamespace(outputs=[sample] * params.n) for _ in prompts]
"""


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("vllm_report", REPORT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "MEASURED", WORKLOADS)
    monkeypatch.setattr(module, "ROUNDS", 2)
    return module


def put_stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, lacks: int) -> None:
    (folder / "vllm.py").write_text(STAND_IN.replace("LACKS", str(lacks)))
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_the_table_has_a_row_for_each_workload(
    report: ModuleType,
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    put_stand_in(tmp_path, monkeypatch, lacks=0)
    report.report(sys.executable, str(tiny_llama), "float32")
    printed = capfd.readouterr()
    rows = [line.split("│")[1:-1] for line in printed.out.splitlines() if line.startswith("│")]
    assert [row[0].strip() for row in rows] == ["group", "single"]
    assert "a line of vLLM's own" in printed.err


def test_a_configuration_becomes_a_checkpoint_that_is_written_once(
    report: ModuleType, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = tmp_path / "configs"
    shutil.copytree(tiny_llama, configs / "small", ignore=shutil.ignore_patterns("*.safetensors"))
    monkeypatch.setattr(report, "find_config", lambda name: configs / name)
    monkeypatch.setattr(report, "CHECKPOINTS", tmp_path / "models")
    folder = Path(report.checkpoint("small"))
    written = (folder / "model.safetensors").stat()
    assert Path(report.checkpoint("small")) == folder and (folder / "model.safetensors").stat() == written
    assert report.checkpoint(str(tiny_llama)) == str(tiny_llama)
    assert load_model(EngineConfig(model=str(folder))).dtype_name == "bfloat16"


def test_a_sample_that_is_too_short_is_refused(
    report: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_stand_in(tmp_path, monkeypatch, lacks=1)
    with (
        report.vllm(sys.executable, "folder", "float32", 100) as run,
        pytest.raises(AssertionError, match="exited with 1"),
    ):
        run(WORKLOADS[0])


def test_the_second_run_of_each_round_counts_in_the_medians(report: ModuleType) -> None:
    seconds = {"trueroll": iter([9.0, 1.0, 9.0, 3.0] * 2), "vLLM": iter([0.1, 2.0, 0.1, 6.0] * 2)}
    table = report.compare({name: (lambda _, each=each: next(each)) for name, each in seconds.items()})
    columns = [[*column.cells] for column in table.columns]
    # 24 and 5 tokens: 24 and 8, and 12 and 4 tokens per second for `group`.
    assert [column[0] for column in columns] == ["group", "16 (8 to 24)", "8 (4 to 12)", "2.00"]
    assert columns[-1] == ["2.00", "2.00"]
