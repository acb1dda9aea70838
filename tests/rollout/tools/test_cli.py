"""The command line from the user's side: help, one line for each error, exit codes, a worker run from a shell."""

from __future__ import annotations

import io
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from matrix import thinned
from rich.console import Console
from typer.testing import CliRunner

from trueroll.engine.config import EngineConfig
from trueroll.engine.request import SampleOutput
from trueroll.errors import ConfigError, ModelError
from trueroll.rollout.config import WorkerConfig, check_address
from trueroll.rollout.http.config import HttpConfig
from trueroll.rollout.text import TextModel
from trueroll.rollout.tools import bench, cli, demo, verify
from trueroll.rollout.tools.options import parse_bytes

PROGRAM = (sys.executable, "-P", "-c", "from trueroll.rollout.tools.cli import main; main()")
CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


def trueroll(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROGRAM, *arguments], capture_output=True, text=True, timeout=120)


def commands() -> dict[str, Any]:
    return typer.main.get_command(cli.app).commands  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture(scope="module")
def address(tiny_llama: Path) -> Iterator[str]:
    """Address of a worker that `trueroll serve` runs for the tiny llama. The worker must exit cleanly on SIGTERM."""
    options = ("--num-threads", "1", "--num-blocks", "64", "--dtype", "float32")
    process = subprocess.Popen([*PROGRAM, "serve", str(tiny_llama), *options], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready address=ipc://")
        assert f"model={tiny_llama}" in line and "backend=cpu (" in line and "dtype=float32" in line
        assert "blocks=64x16" in line
        yield line.split("address=")[1].split()[0]
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=60)
        assert (process.returncode, rest) == (0, "")
    finally:
        process.kill()
        process.wait()


def test_help_loads_neither_torch_nor_transformers() -> None:
    heavy = {"torch", "transformers", "zmq", "starlette", "h11"}
    code = f"import sys, trueroll.rollout.tools.cli; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout == "[]\n", result.stderr


def test_help_names_every_command() -> None:
    result = trueroll("--help")
    assert result.returncode == 0
    assert sorted(commands()) == [
        "audit",
        "bench",
        "demo",
        "fleet",
        "generate",
        "http",
        "plan",
        "serve",
        "top",
        "verify",
    ]
    assert all(name in result.stdout for name in commands())


@pytest.mark.parametrize(
    "name", ["audit", "bench", "demo", "fleet", "generate", "http", "plan", "serve", "top", "verify"]
)
def test_every_command_and_option_explains_itself(name: str) -> None:
    command = commands()[name]
    assert command.help
    assert [parameter.name for parameter in command.params if not parameter.help] == []
    shown = CliRunner().invoke(cli.app, [name, "--help"], terminal_width=80).stdout
    options = [option for parameter in command.params for option in parameter.opts if option.startswith("-")]
    assert [option for option in options if option not in shown] == [], "no name is cut off"


def test_serve_offers_every_setting_with_its_default() -> None:
    defaults = {parameter.name: parameter.default for parameter in commands()["serve"].params}
    fields = EngineConfig.model_fields | WorkerConfig.model_fields
    assert defaults.keys() == fields.keys()
    assert all(defaults[name] == field.default for name, field in fields.items() if name != "model")


@pytest.mark.parametrize("command", ["serve", "verify", "bench", "generate"])
@thinned(lambda command: command in ("serve", "generate"))
def test_a_missing_model_is_one_clear_line(command: str, tmp_path: Path) -> None:
    prompt = ("--prompt", "hello") if command == "generate" else ()
    result = trueroll(command, str(tmp_path / "nowhere"), *prompt)
    assert result.returncode == 1
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1].startswith(f"trueroll: {tmp_path}/nowhere: must be a model folder")


def test_http_offers_every_setting_with_its_default() -> None:
    defaults = {parameter.name: parameter.default for parameter in commands()["http"].params}
    fields = HttpConfig.model_fields
    assert defaults.keys() == fields.keys() | {"server_public_key", "client_key_file"}
    assert all(defaults[name] == field.default for name, field in fields.items() if name != "address")


def test_http_without_its_packages_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == "h11" else name)
    with pytest.raises(ConfigError, match=r"the package h11 is not installed; run pip install 'trueroll\[http\]'"):
        cli.http("ipc:///nowhere")


def test_a_wrong_setting_is_one_clear_line() -> None:
    result = trueroll("serve", "smollm2", "--block-size", "0")
    assert result.returncode == 1
    assert result.stderr.splitlines() == ["trueroll: block_size: must be at least 2 (got 0)"]


def test_an_output_path_that_is_a_folder_is_refused_before_the_work(tmp_path: Path) -> None:
    result = trueroll("verify", "smollm2", "--json", str(tmp_path))
    assert result.returncode == 2 and f"{tmp_path} is a folder; give a file" in result.stderr


def test_an_output_file_in_a_missing_folder_is_refused_before_the_work(tmp_path: Path) -> None:
    result = trueroll("verify", "smollm2", "--json", str(tmp_path / "missing" / "report.json"))
    assert result.returncode == 2
    assert f"the folder {tmp_path / 'missing'} does not exist" in result.stderr


def test_generate_prints_every_sample(address: str) -> None:
    options = ("-n", "2", "--max-tokens", "5", "--seed", "3", "--temperature", "0.7")
    result = trueroll("generate", address, "--prompt", "one", "--prompt", "two", *options)
    assert result.returncode == 0, result.stderr
    headers = [line for line in result.stdout.splitlines() if line.startswith("===")]
    assert headers == ["=== one (seed 3)", "=== two (seed 3)"]
    assert result.stdout.count("--- sample 0: ") == result.stdout.count("--- sample 1: ") == 2
    assert trueroll("generate", address, "--prompt", "one", "--prompt", "two", *options).stdout == result.stdout


def test_generate_needs_a_chat_template_for_a_chat(address: str) -> None:
    result = trueroll("generate", address, "--prompt", "one", "--chat")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("trueroll: chat: the model has no chat template")


def test_generate_refuses_what_sampling_refuses(address: str) -> None:
    result = trueroll("generate", address, "--prompt", "one", "--top-p", "0")
    assert result.returncode == 1
    assert result.stderr.startswith("trueroll: top_p: ")


def test_text_without_a_tokenizer_is_an_error(tmp_path: Path, tiny_llama: Path) -> None:
    shutil.copy(tiny_llama / "config.json", tmp_path)
    with pytest.raises(ModelError, match="the model's tokenizer does not load"):
        TextModel(str(tmp_path))


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (False, 1)])
def test_the_exit_code_of_verify_is_its_verdict(passed: bool, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(verify, "verify", lambda *arguments: calls.append(arguments) or passed)
    result = CliRunner().invoke(cli.app, ["verify", "some-model", "--dtype", "float32", "--json", "report.json"])
    assert result.exit_code == code
    (config, _, json_file), *rest = calls
    assert (config.model, config.dtype, json_file, rest) == ("some-model", "float32", Path("report.json"), [])


def test_bench_runs_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[bench.Plan] = []
    monkeypatch.setattr(bench, "bench", lambda config, plan, console: plans.append(plan))
    asked = ["bench", "m", "--workload", "single", "--cache", "off", "--compare", "hf", "--plot", "speed.png"]
    assert CliRunner().invoke(cli.app, asked).exit_code == 0
    assert CliRunner().invoke(cli.app, ["bench", "m"]).exit_code == 0
    single = [*bench.WORKLOADS["single"]]
    assert plans[0] == bench.Plan(single, caches=(False,), with_hf=True, plot_file=Path("speed.png"))
    every = [workload for workloads in bench.WORKLOADS.values() for workload in workloads]
    assert plans[1] == bench.Plan(every, caches=(True, False))


def test_bench_takes_a_configuration_without_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, bool]] = []
    monkeypatch.setattr(bench, "bench", lambda config, plan, _: calls.append((config.model, plan.dummy_weights)))
    assert CliRunner().invoke(cli.app, ["bench", "--dummy-weights", "qwen3-0.6b"]).exit_code == 0
    assert CliRunner().invoke(cli.app, ["bench", "m"]).exit_code == 0
    assert calls == [("qwen3-0.6b", True), ("m", False)]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((), "MODEL or --dummy-weights CONFIG is missing"),
        (("m", "--dummy-weights", "qwen3-0.6b"), "MODEL m and --dummy-weights qwen3-0.6b exclude each other"),
        (
            ("--dummy-weights", "qwen3-0.6b", "--compare", "hf"),
            "--compare hf needs a MODEL; give one instead of --dummy-weights, or omit --compare",
        ),
    ],
)
def test_bench_takes_one_model(arguments: tuple[str, ...], error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "bench", lambda *_: pytest.fail("nothing is measured"))
    result = CliRunner().invoke(cli.app, ["bench", *arguments])
    assert result.exit_code == 2 and error in result.stderr


@pytest.fixture
def chat_model(tiny_llama: Path, tmp_path: Path) -> Path:
    folder = shutil.copytree(tiny_llama, tmp_path / "chat-model")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


def test_the_demo_shows_samples_and_that_all_bits_agree(chat_model: Path) -> None:
    console = Console(record=True, width=160)
    assert demo.demo(console, str(chat_model), demo.Sizes(samples=2, max_tokens=4, greedy_tokens=6))
    text = console.export_text()
    stages = [line.split()[0] for line in text.splitlines() if line.endswith(" ...")]
    assert stages == ["Loading", "Starting", "Generating", "Generating", "Putting", "Starting", "Generating"]
    assert "4 prompts x 2 samples" in text and "tokens/s" in text and "hit rate" in text
    assert all(question in text for question in demo.QUESTIONS)
    assert all(word in text for word in ("cache cold", "cache warm", "cache off", "beside other requests"))
    assert "All bits agree" in text


def test_the_first_demo_says_that_it_converts_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRUEROLL_CACHE", str(tmp_path / "file"))
    console = Console(record=True, width=40)
    with pytest.raises(ModelError, match="set TRUEROLL_CACHE"):
        demo.demo(console)
    assert console.export_text() == f"Converting smollm2 to {tmp_path / 'file'} (only once) ...\n"


def test_a_stage_of_the_demo_leaves_one_line_on_a_terminal() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, force_interactive=True, color_system=None, width=40)
    with demo._stage(console, "Working ..."):
        pass
    printed = file.getvalue()
    assert printed.startswith("Working ...\n") and "0:00:00" in printed, "the line, then the spinner"
    assert printed.endswith("\r\x1b[1A\x1b[2K"), "the spinner is erased at the end"


def sample(logprobs: list[float], num_cached_tokens: int) -> SampleOutput:
    tokens: Any = np.arange(len(logprobs), dtype=np.int32)
    return SampleOutput("r", 0, tokens, np.array(logprobs, np.float32), "length", 0, num_cached_tokens, ())


def test_the_demo_sees_one_bit_and_a_cache_that_was_not_warm() -> None:
    cold = demo.Repetition("cold", False, [sample([-1.0, -2.0], 0)])
    warm = demo.Repetition("warm", True, [sample([-1.0, -2.0], 16)])
    one_bit = demo.Repetition("warm", True, [sample([-1.0, float(np.nextafter(np.float32(-2), np.float32(0)))], 16)])
    not_warm = demo.Repetition("warm", True, [sample([-1.0, -2.0], 0)])
    assert demo.compare(Console(), [cold, warm])
    assert not demo.compare(Console(), [cold, warm, one_bit])
    assert not demo.compare(Console(), [cold, not_warm])


def test_version() -> None:
    shown = trueroll("--version")
    assert (shown.returncode, shown.stderr) == (0, "") and re.fullmatch(r"trueroll \d+\.\d+\.\d+\n", shown.stdout)


@pytest.mark.parametrize(
    "text, size", [("4096", 4096), ("4G", 2**32), ("4GiB", 2**32), ("1.5 MB", 3 * 2**19), ("2kib", 2048), (7, 7)]
)
def test_sizes_may_have_units(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "4X", "-1", "1.5", "G", "4 gigabytes", "inf"])
def test_a_wrong_size_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="such as 4GiB"):
        parse_bytes(text)


@pytest.mark.parametrize("command", [["top"], ["audit", "smollm2"], ["generate", "--prompt", "a"]])
def test_a_missing_socket_is_told_at_once(tmp_path: Path, command: list[str]) -> None:
    shown = trueroll(*command, f"ipc://{tmp_path}/none.sock")
    assert shown.returncode == 1 and "does not exist; start one with `trueroll serve MODEL`" in shown.stderr
    assert shown.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "address, hint",
    [
        ("localhost:8000", "give tcp://127.0.0.1:8000"),
        ("127.0.0.1:8000", "give tcp://127.0.0.1:8000"),
        ("tcp://localhost:8000", "give tcp://127.0.0.1:8000"),
        ("http://127.0.0.1:8000", "give the worker's address, which `trueroll serve` prints"),
    ],
)
def test_an_address_that_is_nearly_right_gets_a_hint(address: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"{re.escape(hint)}$"):
        check_address(address, has_keys=False)


def test_serve_says_what_it_does_before_it_loads_anything(tmp_path: Path) -> None:
    shown = trueroll("serve", str(tmp_path / "no-model"))
    assert shown.returncode == 1 and shown.stderr.startswith(f"starting a worker for {tmp_path / 'no-model'} ...\n")
