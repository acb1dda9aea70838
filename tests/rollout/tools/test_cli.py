"""The command line as a user sees it: help, one line for each error, exit codes, and a worker that is started from a
shell.
"""

from __future__ import annotations

import io
import os
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
from trueroll.rollout import Audit
from trueroll.rollout.config import WorkerConfig, check_address
from trueroll.rollout.http.config import HttpConfig
from trueroll.rollout.text import TextModel
from trueroll.rollout.tools import bench, cli, demo, verify
from trueroll.rollout.tools.options import parse_bytes

PROGRAM = (sys.executable, "-P", "-c", "from trueroll.rollout.tools.program import main; main()")
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
    heavy = {"torch", "transformers", "zmq", "starlette", "h11", "opentelemetry"}
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
        "replay",
        "serve",
        "top",
        "verify",
    ]
    assert all(name in result.stdout for name in commands())


@pytest.mark.parametrize(
    "name", ["audit", "bench", "demo", "fleet", "generate", "http", "plan", "replay", "serve", "top", "verify"]
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
    assert result.stderr.splitlines()[-1].startswith(f"trueroll: {tmp_path}/nowhere: a model is a folder")


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


def test_an_output_file_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """root may write everywhere, so the answer of the system is replaced."""
    asked = list[Path]()
    monkeypatch.setattr(cli.os, "access", lambda path, mode: asked.append(path))
    shown = CliRunner().invoke(cli.app, ["audit", "smollm2", "http://127.0.0.1:1", "--plot", str(tmp_path / "a.png")])
    assert shown.exit_code == 2 and "cannot be written; give a file that you may write" in shown.output
    assert asked == [tmp_path]


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
    monkeypatch.setattr(verify, "verify", lambda *arguments, quick: calls.append(arguments) or passed)
    result = CliRunner().invoke(cli.app, ["verify", "smollm2", "--dtype", "float32", "--json", "report.json"])
    assert result.exit_code == code
    (config, _, json_file), *rest = calls
    assert (config.model, config.dtype, json_file, rest) == ("smollm2", "float32", Path("report.json"), [])


def test_bench_runs_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[bench.Plan] = []
    monkeypatch.setattr(bench, "bench", lambda config, plan, console: plans.append(plan))
    asked = ["bench", "smollm2", "--workload", "single", "--cache", "off", "--compare", "hf", "--plot", "speed.png"]
    assert CliRunner().invoke(cli.app, asked).exit_code == 0
    assert CliRunner().invoke(cli.app, ["bench", "smollm2"]).exit_code == 0
    single = [*bench.WORKLOADS["single"]]
    assert plans[0] == bench.Plan(single, caches=(False,), with_hf=True, plot_file=Path("speed.png"))
    every = [workload for workloads in bench.WORKLOADS.values() for workload in workloads]
    assert plans[1] == bench.Plan(every, caches=(True, False))


def test_bench_takes_a_configuration_without_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, bool]] = []
    monkeypatch.setattr(bench, "bench", lambda config, plan, _: calls.append((config.model, plan.dummy_weights)))
    assert CliRunner().invoke(cli.app, ["bench", "--dummy-weights", "qwen3-0.6b"]).exit_code == 0
    assert CliRunner().invoke(cli.app, ["bench", "smollm2"]).exit_code == 0
    assert calls == [("qwen3-0.6b", True), ("smollm2", False)]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((), "MODEL or --dummy-weights CONFIG is missing"),
        (
            ("smollm2", "--dummy-weights", "qwen3-0.6b"),
            "MODEL smollm2 and --dummy-weights qwen3-0.6b exclude each other",
        ),
        (
            ("--dummy-weights", "qwen3-0.6b", "--compare", "hf"),
            "--compare hf needs a MODEL; give MODEL instead of --dummy-weights, or omit --compare",
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
    console, sizes = Console(record=True, width=160), demo.Sizes(samples=2, max_tokens=4, compared_tokens=6)
    assert demo.demo(console, str(chat_model), sizes)
    text = console.export_text()
    lines = text.splitlines()
    stages = [line.split()[0] for line in lines if line.endswith(" ...")]
    assert stages == [
        "Loading",
        "Starting",
        "Generating",
        "Computing",
        "Generating",
        "Putting",
        "Starting",
        "Generating",
    ]
    seconds = [float(found) for found in re.findall(r"^  done in (\S+) s$", text, re.M)]
    assert len(seconds) == len(stages) and f"All stages took {sum(seconds):.1f} s." in lines
    assert "4 prompts x 2 samples = 8 samples with " in text and "tokens/s" in text
    assert all(question in text for question in demo.QUESTIONS)
    assert all(word in text for word in ("cache cold", "cache warm", "cache off", "beside other requests"))
    assert "All bits agree" in text
    check_trainers(text)
    assert all(command in text for command, _ in demo.NEXT)


def check_trainers(text: str) -> None:
    """Check the demo's claims about an aligned trainer and an ordinary one. For each trainer, the counts must add up to
    the number of all tokens.
    """
    [total] = re.findall(r"samples with (\d+) tokens", text)
    assert re.search(rf"aligned trainer +│ 0 of {total} +│ 0 +│ exactly 1\.0 ", text)
    [(differing, largest, low, high)] = re.findall(
        rf"ordinary forward pass +│ (\d+) of {total} +│ (\S+) +│ (\S+) to (\S+) ", text
    )
    assert int(differing) > 0 and float(largest) > 0 and float(low) < 1 < float(high)
    rows = [re.findall(rf"│ {name} +│ +(\d+) .*│ +(\d+) ", text)[-1] for name in demo.BINS]
    aligned, plain = ([int(count) for count in column] for column in zip(*rows, strict=True))
    assert aligned == [int(total), 0, 0, 0]
    assert sum(plain) == int(total) and plain[0] == int(total) - int(differing)


def test_the_demo_fails_if_the_trainers_do_not_differ_as_claimed() -> None:
    """The aligned trainer must have the worker's bits, and the ordinary forward pass must not."""

    def audit_of(*differences: float) -> Audit:
        found = np.array(differences, np.float32)
        largest, place = float(np.abs(found).max()), (0, 0, 0) if found.any() else None
        return Audit(len(found), int(np.count_nonzero(found)), largest, 0.0, place, (), (), True, (found,))

    same, other = audit_of(0.0, 0.0), audit_of(0.0, -0.25)
    console = Console(record=True, width=160)
    assert demo.compare_trainers(console, same, other)
    assert not demo.compare_trainers(console, other, other)
    assert not demo.compare_trainers(console, same, same)
    text = console.export_text()
    assert "0.778801 to 1.000000" in text and "1 of 2 log-probs differ" in text and "Nothing is proved" in text
    assert demo.count_by_size(np.array([0.0, -0.005, 0.01, 0.5, -0.1, np.inf])) == [1, 1, 1, 3]


def test_the_first_demo_says_that_it_converts_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRUEROLL_CACHE", str(tmp_path / "file"))
    console = Console(record=True, width=40)
    with pytest.raises(ModelError, match="set TRUEROLL_CACHE"):
        demo.demo(console)
    assert console.export_text() == f"Converting smollm2 to {tmp_path / 'file'} (only once) ...\n"


def test_a_stage_of_the_demo_leaves_its_title_and_duration_on_a_terminal() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, force_interactive=True, color_system=None, width=40)
    with demo.Stages(console).stage("Working ..."):
        pass
    printed = file.getvalue()
    assert printed.startswith("Working ...\n") and "0:00:00" in printed, "the line, then the spinner"
    assert printed.endswith("\r\x1b[1A\x1b[2K  done in 0.0 s\n"), "the spinner is erased at the end"


def sample(logprobs: list[float], num_cached_tokens: int) -> SampleOutput:
    tokens: Any = np.arange(len(logprobs), dtype=np.int32)
    return SampleOutput("r", 0, tokens, np.array(logprobs, np.float32), "length", 0, num_cached_tokens, ())


def test_the_demo_sees_one_bit_and_a_cache_that_was_not_warm() -> None:
    def repetition(name: str, has_cache: bool, greedy: SampleOutput, sampled: SampleOutput) -> demo.Repetition:
        return demo.Repetition(name, has_cache, demo.Answers([greedy], [sampled]))

    one_bit = [-1.0, float(np.nextafter(np.float32(-2), np.float32(0)))]
    cold_sample, warm_sample = sample([-1.0, -2.0], 0), sample([-1.0, -2.0], 16)
    cold = repetition("cold", False, cold_sample, cold_sample)
    warm = repetition("warm", True, warm_sample, warm_sample)
    not_warm = repetition("warm", True, cold_sample, cold_sample)
    console = Console(record=True)
    assert demo.compare(console, [cold, warm], prompt_tokens=20)
    assert "32 of 40" in console.export_text()
    for answers in ((sample(one_bit, 16), warm_sample), (warm_sample, sample(one_bit, 16))):
        assert not demo.compare(Console(), [cold, warm, repetition("warm", True, *answers)], 20)
    assert not demo.compare(Console(), [cold, not_warm], 20)


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


WRONG: dict[str, tuple[list[str], str]] = {
    "serve a missing model": (["serve", "smolm2"], "did you mean smollm2?"),
    "serve with a wrong setting": (["serve", "smollm2", "--block-size", "0"], "block_size: must be"),
    "serve at a wrong address": (["serve", "smollm2", "--address", "localhost:80"], "give tcp://127.0.0.1:80"),
    "generate with a missing model": (["generate", "smolm2", "--prompt", "a"], "did you mean smollm2?"),
    "generate without a tokenizer": (["generate", "tcp://127.0.0.1:1", "--prompt", "a"], "as --tokenizer MODEL"),
    "generate at a wrong address": (["generate", "localhost:80", "--prompt", "a"], "give tcp://127.0.0.1:80"),
    "generate at a dead address": (
        ["generate", "tcp://127.0.0.1:1", "--prompt", "a", "--tokenizer", "smollm2"],
        "no worker listens at tcp://127.0.0.1:1 (Connection refused)",
    ),
    "http at a wrong address": (["http", "http://127.0.0.1:80"], "give the worker's address"),
    "top at a dead address": (["top", "tcp://127.0.0.1:1"], "no worker listens at tcp://127.0.0.1:1"),
    "audit at a dead address": (["audit", "smollm2", "tcp://127.0.0.1:1"], "no worker listens"),
    "verify a missing model": (["verify", "smolm2"], "did you mean smollm2?"),
    "bench a missing model": (["bench", "smolm2"], "did you mean smollm2?"),
    "bench a missing configuration": (["bench", "--dummy-weights", "qwen3-0.6"], "did you mean qwen3-0.6b?"),
    "plan for a missing configuration": (["plan", "qwen3-0.6"], "did you mean qwen3-0.6b?"),
    "fleet of a missing file": (["fleet", "/nowhere"], "cannot read /nowhere"),
}


@pytest.mark.parametrize("name", WRONG)
@thinned(lambda name: name.endswith(("dead address", "missing model")))
def test_a_wrong_word_is_told_before_anything_heavy_is_imported(name: str) -> None:
    command, told = WRONG[name]
    look = "import atexit, sys; atexit.register(lambda: print({'torch', 'transformers'} & sys.modules.keys()))"
    code = f"{look}; from trueroll.rollout.tools.program import main; main()"
    done = subprocess.run([sys.executable, "-P", "-c", code, *command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and told in done.stderr.splitlines()[-1]
    assert done.stdout == "set()\n"


def test_an_option_that_is_nearly_right_gets_a_suggestion() -> None:
    shown = CliRunner().invoke(cli.app, ["serve", "smollm2", "--max-num-seq", "3"])
    assert shown.exit_code == 2 and "--max-num-seqs" in shown.stderr


def test_the_help_of_serve_and_http_has_headings_sizes_and_examples() -> None:
    for name, heading in (("serve", "KV cache and recurrent states:"), ("http", "Limits of the front end:")):
        shown = CliRunner().invoke(cli.app, [name, "--help"], terminal_width=80).stdout
        assert f"\n{heading}\n" in shown and "MiB)]" in shown and f"\n    trueroll {name} " in shown


INFO = dict(
    model="a model", architecture="LlamaForCausalLM", dtype="bfloat16", device="cpu", weight_bytes=3 << 20,
    kv_bytes=2000 << 20, state_bytes=0, num_blocks=100, block_size=16, max_num_seqs=64, max_model_len=2048,
)  # fmt: skip


@pytest.mark.parametrize(
    ("address", "command"),
    [
        ("ipc:///tmp/a.sock", "trueroll generate ipc:///tmp/a.sock --prompt 'Once upon a time'"),
        ("tcp://127.0.0.1:5", "trueroll generate tcp://127.0.0.1:5 --tokenizer 'a model' --prompt 'Once upon a time'"),
    ],
)
def test_a_ready_worker_says_what_it_is_and_what_to_run_next(address: str, command: str) -> None:
    assert cli._summary(address, INFO).splitlines() == [
        f"address:   {address}",
        "model:     a model (LlamaForCausalLM), bfloat16 on cpu",
        "memory:    weights 3 MiB, KV cache 2,000 MiB",
        "capacity:  1,600 cached tokens, 64 samples at a time, contexts of up to 2,048 tokens",
        f"next:      {command}",
    ]
    assert "recurrent states 5 MiB" in cli._summary(address, INFO | {"state_bytes": 5 << 20})


def interrupt(*arguments: str, after: str) -> tuple[int, str]:
    """Run a command, and interrupt it as a terminal does once stdout or stderr has a line that begins with `after`.

    Return the exit code and the rest of the output.
    """
    command = [*PROGRAM, *arguments]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # A background process ignores interrupts, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stdout is not None
        assert any(line.startswith(after) for line in process.stdout)
        os.killpg(process.pid, signal.SIGINT)
        rest = process.stdout.read()
    return process.returncode, rest


@pytest.mark.parametrize("after", ["starting", "ready"])
def test_an_interrupted_worker_ends_with_one_line(after: str, tiny_llama: Path) -> None:
    code, rest = interrupt("serve", str(tiny_llama), "--num-threads", "1", "--num-blocks", "64", after=after)
    assert code == 130, rest
    assert rest.splitlines()[-1] == "trueroll: interrupted" and "Traceback" not in rest


@pytest.mark.parametrize("command", [["demo"], ["verify", "smollm2"], ["generate", "smollm2", "--prompt", "a"]])
def test_an_interrupted_command_ends_with_one_line(command: list[str]) -> None:
    begin = "loading" if command[0] == "verify" else "starting"
    assert interrupt(*command, after=begin) == (130, "trueroll: interrupted\n")


@pytest.mark.parametrize("command", [["top"], ["audit", "smollm2"], ["generate", "--prompt", "a"]])
def test_a_missing_socket_is_told_at_once(tmp_path: Path, command: list[str]) -> None:
    shown = trueroll(*command, f"ipc://{tmp_path}/none.sock")
    assert shown.returncode == 1 and "does not exist; start a worker with `trueroll serve MODEL`" in shown.stderr
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
    shown = trueroll("serve", str(tmp_path))
    assert shown.returncode == 1 and shown.stderr.startswith(f"starting a worker for {tmp_path} ...\n")


TURNS_INTERRUPT_INTO_ERROR = """
import os, signal, sys
from trueroll.rollout.tools import cli, program

def run():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt as error:
        raise ValueError("invalid schema: KeyboardInterrupt:") from None
    raise ValueError("the process ignores interrupts")

signal.signal(signal.SIGINT, signal.default_int_handler if sys.argv[1] == "foreground" else signal.SIG_IGN)
cli.main = run
program.main()
"""


@pytest.mark.parametrize("place", ["foreground", "background"])
def test_an_interrupt_that_a_library_turns_into_an_error_ends_with_one_line(place: str) -> None:
    code = [sys.executable, "-P", "-c", TURNS_INTERRUPT_INTO_ERROR, place]
    done = subprocess.run(code, capture_output=True, text=True, timeout=120)
    if place == "foreground":
        assert (done.returncode, done.stderr) == (130, "trueroll: interrupted\n")
    else:
        assert done.returncode == 1 and done.stderr.endswith("ValueError: the process ignores interrupts\n")
