"""Conversion between text and token ids. Limits on what a model's folder or a worker can make a client do."""

from __future__ import annotations

import builtins
import errno
import gc
import json
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import psutil
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast, dynamic_module_utils

from trueroll.engine.request import SamplingParams
from trueroll.errors import ConfigError, ModelError, UnavailableError
from trueroll.rollout import plain_tokenizer, text, text_child
from trueroll.rollout.plain_tokenizer import PlainTokenizer
from trueroll.rollout.text import TextModel, TooMany
from trueroll.rollout.tools import text as printing
from trueroll.rollout.tools.text import print_completions

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
CODE = """
import pathlib
pathlib.Path({marker!r}).touch()
from transformers import PreTrainedTokenizerFast
class Other(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_llama, tmp_path / "model")


def with_template(folder: Path, template: str) -> TextModel:
    (folder / "chat_template.jinja").write_text(template)
    return TextModel(str(folder))


def test_a_chat_is_encoded_as_transformers_encodes_it(smollm2: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is <|im_end|>?"}]
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert TextModel("smollm2").encode_chat("What is <|im_end|>?", "Be brief.") == expected


def test_a_model_may_have_several_chat_templates(folder: Path) -> None:
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    with closing(with_template(folder, "plain")) as model:
        assert model.chat_templates == {"default": "plain", "tool_use": "with tools"}
        found = [
            model.render([{"role": "user", "content": "x"}], {"tools": tools}) for tools in (None, [{"name": "f"}])
        ]
        assert found == ["plain", "with tools"]
    shutil.rmtree(folder / "additional_chat_templates")
    with closing(with_template(folder, "plain")) as model:
        assert model.chat_templates == {"default": "plain"}


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma3_text", "mistral", "of no model"])
@pytest.mark.parametrize("tokenizer_class", ["GPT2Tokenizer", "LlamaTokenizerFast", "TokenizersBackend", "Other", None])
@pytest.mark.parametrize("auto_map", [None, {"AutoTokenizer": ["other.Other", None]}], ids=["", "with code"])
def test_a_tokenizer_is_chosen_as_by_the_whole_config(
    folder: Path, model_type: str, tokenizer_class: str | None, auto_map: dict[str, Any] | None
) -> None:
    for name, changes in (
        ("config", dict(model_type=model_type)),
        ("tokenizer_config", dict(tokenizer_class=tokenizer_class, auto_map=auto_map)),
    ):
        settings = json.loads((folder / f"{name}.json").read_text()) | changes
        told = {key: value for key, value in settings.items() if value is not None}
        (folder / f"{name}.json").write_text(json.dumps(told))
    found, expected = (
        outcome_of(lambda load=load: load(folder))
        for load in (text._load_by_transformers, partial(AutoTokenizer.from_pretrained, trust_remote_code=False))
    )
    assert found == expected


def outcome_of(load: Callable[[], Any]) -> Any:
    """Return a description of the loaded tokenizer, or the error text."""
    try:
        tokenizer = load()
    except ValueError as error:
        return str(error)
    return type(tokenizer), tokenizer.backend_tokenizer.to_str(), tokenizer.special_tokens_map, tokenizer.chat_template


def imported_for(model: Path, call: str, *modules: str) -> str:
    """Return which of `modules` a new process has imported after a call of a TextModel."""
    load = f"from trueroll.rollout.text import TextModel; TextModel({str(model)!r}){call}"
    look = f"import sys; print(*sorted({set(modules)} & sys.modules.keys()))"
    return subprocess.run(
        [sys.executable, "-P", "-c", f"{load}; {look}"], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_a_tokenizer_is_loaded_without_torchs_compiler(folder: Path) -> None:
    """The model classes of transformers would import torch's compiler, which takes seconds and 150 MB."""
    change(folder, "config", model_type="qwen2")  # a tokenizer that transformers builds by a class of its own
    assert imported_for(folder, "", "torch._dynamo", "transformers") == "transformers"


@pytest.mark.parametrize("call", [".encode('hi')", ".decode([1])", ".encode_chat('hi')"])
def test_a_plain_tokenizer_needs_neither_torch_nor_transformers(smollm2: Path, call: str) -> None:
    assert imported_for(smollm2, call, "torch", "transformers") == ""


def change(folder: Path, name: str, **settings: Any) -> None:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def make_plain(folder: Path, model_type: str = "llama", kind: str = "TokenizersBackend") -> Path:
    change(folder, "config", model_type=model_type)
    change(folder, "tokenizer_config", tokenizer_class=kind)
    (folder / "special_tokens_map.json").unlink(missing_ok=True)
    return folder


TEXTS = ("", "Grüße, 世界 👋🏽!", "  two  spaces ", "<s>a</s>", "don't , we 're . <|im_end|>\n\tx" * 9)


@pytest.mark.parametrize("model_type", sorted(plain_tokenizer._MODEL_TYPES))
@pytest.mark.parametrize("kind", sorted(plain_tokenizer._CLASSES))
@pytest.mark.parametrize("post_processor", ["its own", None])
def test_a_plain_tokenizer_is_the_one_of_transformers(
    smollm2: Path, folder: Path, model_type: str, kind: str, post_processor: str | None
) -> None:
    for source in (smollm2, folder):
        copy = shutil.copytree(source, folder.with_name("copy"), ignore=shutil.ignore_patterns("*.safetensors"))
        make_plain(copy, model_type, kind)
        if post_processor is None:
            change(copy, "tokenizer", post_processor=None)
        plain, full = text._load(copy), AutoTokenizer.from_pretrained(copy)
        assert isinstance(plain, PlainTokenizer) and type(full) is PreTrainedTokenizerFast
        for adds in (True, False):
            assert [plain.encode(each, adds) for each in TEXTS] == [
                full.encode(each, add_special_tokens=adds) for each in TEXTS
            ]
        assert plain.get_vocab() == full.get_vocab() and plain.chat_template == full.chat_template
        assert repr(plain.added_tokens_decoder) == repr(full.added_tokens_decoder)
        shutil.rmtree(copy)


@pytest.mark.parametrize(
    "settings",
    [
        {"bos_token": "<not in tokenizer.json>"},
        {"extra_special_tokens": ["<not in tokenizer.json>"]},
        {"added_tokens_decoder": {"0": {"content": "<not in tokenizer.json>"}}},
        {"add_bos_token": True},
        {"split_special_tokens": True},
        {"a_setting_of_a_later_release": 1},
        {"chat_template": [{"name": "default", "template": "x"}, {"name": "other", "template": "y"}]},
    ],
    ids=str,
)
def test_a_tokenizer_with_settings_of_effect_is_left_to_transformers(folder: Path, settings: dict[str, Any]) -> None:
    make_plain(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    assert isinstance(text._load(folder), PlainTokenizer)
    change(folder, "tokenizer_config", **settings)
    assert type(text._load(folder)) is PreTrainedTokenizerFast


def test_a_panic_of_the_decoder_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        """An exception like the one that the tokenizers library raises."""

    def panic(*_: Any) -> str:
        raise Panic("slice index out of range")

    model = TextModel(str(folder))
    monkeypatch.setattr(model, "_decode", panic)
    with pytest.raises(ModelError, match="Panic: slice index out of range"):
        model.decode([1])


def test_tokens_are_decoded_as_transformers_decodes_them(smollm2: Path) -> None:
    """One of the tokenizers overrides decoding in Python, which the Rust library does not know about."""
    tokenizer, model, generator = AutoTokenizer.from_pretrained(smollm2), TextModel("smollm2"), random.Random(0)
    for skips in (True, False):
        for length in range(200):
            token_ids = generator.choices(range(len(tokenizer)), k=length % 9)
            expected = tokenizer.decode(token_ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False)
            assert model.decode(token_ids, skips) == expected
    special = tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert model.is_silent(special) and not model.is_silent(special, skip_special_tokens=False)
    assert model.is_silent(10**6) and not model.is_silent(tokenizer.encode("a")[0])
    own = type("Own", (type(tokenizer),), {"_decode": lambda self, token_ids, **_: f"own {token_ids}"})
    tokenizer.__class__ = own
    assert text._decoder_of(tokenizer)([7], True) == "own [7]"


def test_a_chat_is_rendered_in_any_thread(folder: Path) -> None:
    model = with_template(folder, CHAT)
    with ThreadPoolExecutor(1) as threads:
        assert model.decode(threads.submit(model.encode_chat, "hi", "sys").result()) == "<system>sys\n<user>hi\n<a>"


@pytest.mark.parametrize(
    ("template", "found"),
    [
        (ENDLESS, "more than 1 s or 1073741824 bytes, or crashes"),
        ("{{ range(99999) | list * 99999 * 99999 }}", "MemoryError"),
        ("{{ 'x' * (2**33) }}", "MemoryError"),
        ("{{ 'x' * (2**22 + 1) }}", "the conversation has 4194305 characters"),
        ("{{ raise_exception('\x1b[2Jno' * 1000) }}", r"TemplateError: \\x1b\[2Jno"),
        ("{% for", "TemplateSyntaxError"),
        ("{{" + "(" * 5000 + ")" * 5000 + "}}", "RecursionError"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
    ],
)
def test_the_error_says_why_a_template_fails(
    folder: Path, template: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (text, text_child):
        monkeypatch.setattr(module, "LIMITS", replace(text_child.LIMITS, cpu_seconds=1))
    model = with_template(folder, template)
    message = f"the model's chat template cannot be rendered: .*{found}.*; check the template"
    with pytest.raises(ModelError, match=message) as caught:
        model.encode_chat("hi")
    assert len(str(caught.value)) < 1000 and str(caught.value).isprintable()


def test_code_in_a_model_folder_is_never_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "ran"
    (folder / "code.py").write_text(CODE.format(marker=str(marker)))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"auto_map": {"AutoTokenizer": ["code.Other", "code.Other"]}, "tokenizer_class": "Other"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").unlink()
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", sys.path[:])
    with pytest.raises(ModelError, match="the model's tokenizer does not load: .*custom code"):
        TextModel(str(folder))
    assert not marker.exists()
    AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    assert marker.exists(), "this is what it would have done"


def pid_of(model: TextModel, is_long: bool = False) -> int:
    process = model._children[is_long]._process
    assert process is not None
    return process.pid


def test_the_process_for_long_texts_has_a_lower_priority(folder: Path) -> None:
    model, own = TextModel(str(folder)), os.getpriority(os.PRIO_PROCESS, 0)
    model.encode("a")
    model.encode("a" * (text.LONG_CHARS + 1))
    priorities = [os.getpriority(os.PRIO_PROCESS, pid_of(model, is_long)) for is_long in (False, True)]
    assert priorities == [own, min(19, own + text.LONG_NICENESS)]


def test_a_child_that_refuses_a_conversation_goes_on(folder: Path) -> None:
    template = "{% if messages[0].content == 'bad' %}{{ raise_exception('no') }}{% endif %}"
    model = with_template(folder, template + "{% if messages[0].content == 'huge' %}{{ 'x' * (2**33) }}{% endif %}ok")
    assert model.decode(model.encode_chat("good")) == "ok"
    first = pid_of(model)
    for _ in range(3):
        with pytest.raises(ModelError, match="TemplateError: no"):
            model.encode_chat("bad")
    assert model.decode(model.encode_chat("good")) == "ok" and pid_of(model) == first
    with pytest.raises(ModelError, match="MemoryError"):
        model.encode_chat("huge")
    assert model.decode(model.encode_chat("good")) == "ok" and pid_of(model) != first


def test_a_child_gets_values_of_any_kind_unchanged(folder: Path) -> None:
    """Integers of any size arrive unchanged. Text that cannot be encoded is an error."""
    model = with_template(
        folder, "{{ messages[0].many }} {{ messages[0].few }} {{ messages[0].share }} {{ messages[0].word }}"
    )
    message = {"many": 10**39, "few": -(2**70), "share": 0.1, "word": "Grüße 👋"}
    assert model.decode(model.encode_conversation([message], {})) == f"{10**39} {-(2**70)} 0.1 Grüße 👋"
    for encode in (model.encode, model.encode_chat):
        with pytest.raises(ModelError, match=r"'\\ud800' is not a valid character"):
            encode("a \ud800")
    for value in (2**64, -(2**63) - 1, 10**5000):
        sign = with_template(folder, "{{ 'more' if messages[0].n > 0 else 'less' }} {{ messages[0].n % 1000 }}")
        expected = f"{'more' if value > 0 else 'less'} {value % 1000}"
        assert sign.decode(sign.encode_conversation([{"n": value}], {})) == expected
    with pytest.raises(ModelError, match=r"a conversation may contain only JSON values \(got set\)"):
        model.encode_conversation([{"content": {1}}], {})
    with pytest.raises(ModelError, match="nested too deeply"):
        model.encode_conversation([{"content": reduce(lambda inner, _: [inner], range(2000), [])}], {})


def test_an_abandoned_call_ends_the_child(folder: Path) -> None:
    model = with_template(folder, ENDLESS)
    asked: list[int] = []

    def is_abandoned() -> bool:
        asked.append(pid_of(model))
        return True

    with pytest.raises(ModelError, match="cannot be rendered"):
        model.encode_conversation([{"role": "user"}], {}, is_abandoned=is_abandoned)
    assert len(asked) == 1 and not psutil.pid_exists(asked[0])
    assert model.decode(model.encode("still")) == "still"


def no_process() -> int:
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def test_a_failed_fork_names_the_machine_and_leaks_no_descriptor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = TextModel(str(folder))
    before = open_files()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fork", no_process)
        for _ in range(2):
            with pytest.raises(UnavailableError, match="cannot start another process: .*unavailable; try again"):
                model.encode("hi")
        assert open_files() == before
        with pytest.raises(UnavailableError):
            TextModel(str(folder))
        assert open_files() == before
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, files[1]))
    try:
        with pytest.raises(UnavailableError, match="Too many open files; try again"):
            model.encode("hi")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
    assert model.decode(model.encode("hi")) == "hi"


def open_files() -> set[str]:
    gc.collect()
    return set(os.listdir("/proc/self/fd"))


def test_a_result_beyond_the_limit_is_counted_but_not_sent_back(folder: Path) -> None:
    model = with_template(folder, CHAT)
    with pytest.raises(TooMany, match="^100000 tokens$"):
        model.encode("x" * 100_000, add_special_tokens=False, most=10)
    with pytest.raises(TooMany, match="^1007 characters$"):
        model.encode_conversation([{"role": "user", "content": "x" * 1000}], {}, most_chars=1000)


def test_long_texts_are_decoded_as_short_ones(folder: Path) -> None:
    model = TextModel(str(folder))
    token_ids = model.encode("Grüße, 世界 👋🏽! " * 3000)
    assert model.decode_long(token_ids) == model.decode(token_ids)


def test_a_decoder_that_doubles_a_letter_30_times_is_refused(folder: Path) -> None:
    path = folder / "tokenizer.json"
    double = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    decoder = {"type": "Sequence", "decoders": [double] * 30}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"decoder": decoder}))
    with pytest.raises(ModelError, match="decoder can make a text more than 16 times as long .in step Replace"):
        TextModel(str(folder))


FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "additional_chat_templates/a.jinja")


@pytest.mark.timeout(60)  # opening a FIFO blocks until a writer opens it
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", ["FIFO", "device"])
def test_a_tokenizer_reads_regular_files_only(folder: Path, file: str, kind: str) -> None:
    path = folder / file
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path) if kind == "FIFO" else path.symlink_to("/dev/null")
    with pytest.raises(ModelError, match=f"{path.name}: must be a regular file, but is a pipe"):
        TextModel(str(folder))


def test_an_oversized_tokenizer_file_is_refused(folder: Path) -> None:
    os.truncate(folder / "tokenizer.json", 2**26 + 1)
    with pytest.raises(ModelError, match="tokenizer.json: file is too large: 67108865 bytes"):
        TextModel(str(folder))


@pytest.mark.parametrize("content", ["[" * 10**5, "[]", '"\ud800"', '{"model":' * 200])
@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_tokenizer_is_one_clear_line(folder: Path, file: str, content: str) -> None:
    (folder / file).write_bytes(content.encode(errors="surrogatepass"))
    with pytest.raises(ModelError, match="the model's tokenizer does not load: ") as caught:
        TextModel(str(folder))
    assert len(str(caught.value)) < 1000 and str(caught.value).isprintable()


def with_tokenizer(folder: Path, kind: str) -> Path:
    """Give the folder a tokenizer of class `kind` of transformers, with the files that this class reads."""
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": kind}))
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text('{"a": 0}')
    return folder


def test_a_tokenizer_of_another_kind_is_one_clear_line(folder: Path) -> None:
    with_tokenizer(folder, "RagTokenizer")
    with pytest.raises(ModelError, match="the model's tokenizer does not load: TypeError: RagTokenizer is"):
        TextModel(str(folder))


def test_a_tokenizer_that_fails_later_is_one_clear_line(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(CHAT)
    model = TextModel(str(with_tokenizer(folder, "Wav2Vec2CTCTokenizer")))
    for encode in (model.encode, model.encode_chat):
        with pytest.raises(ModelError, match="the tokenizer does not encode the text: ValueError"):
            encode("hi")
    with pytest.raises(ModelError, match="the tokenizer cannot decode the tokens: .*; check"):
        model.decode(["x"])  # pyright: ignore[reportArgumentType]


@pytest.fixture
def worker_that_serves(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Connect `print_completions` to a fake worker that claims to serve a model. Sending prompts or accessing the hub
    fails.
    """

    def serve(model: Any) -> None:
        client = SimpleNamespace(health=lambda: SimpleNamespace(state="ready", engine={"model": model}))
        client.__dict__["generate"] = lambda *_, **__: pytest.fail("the prompts were sent")
        monkeypatch.setattr(printing, "RolloutClient", lambda *_: Entered(client))
        monkeypatch.setattr(printing, "contact", lambda *_: None)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("the hub was asked"))
    return serve


class Entered:
    def __init__(self, client: Any) -> None:
        self._client = client

    def __enter__(self) -> Any:
        return self._client

    def __exit__(self, *_: object) -> None:
        pass


def complete(address: str, tokenizer: str | None = None) -> None:
    print_completions(address, ["hi"], SamplingParams(), seed=None, chat=False, tokenizer=tokenizer)


@pytest.mark.parametrize("served", ["org/name", "hf://org/name", "/gone/model", "", None, 5, "x\0", "\x1b[2J"])
def test_a_model_name_from_a_worker_is_never_downloaded(worker_that_serves: Callable[[Any], None], served: Any) -> None:
    worker_that_serves(served)
    with pytest.raises(
        ConfigError, match="neither smollm2 nor a folder on this machine; .* --tokenizer MODEL"
    ) as caught:
        complete("ipc:///tmp/worker")
    assert str(caught.value).isprintable()


def test_a_worker_on_tcp_needs_a_named_tokenizer(worker_that_serves: Callable[[Any], None], tiny_llama: Path) -> None:
    worker_that_serves(str(tiny_llama))
    with pytest.raises(ConfigError, match="tokenizer: the worker at .* may run on another machine"):
        complete("tcp://127.0.0.1:5555")


@pytest.mark.parametrize("address", ["ipc:///tmp/worker", "tcp://127.0.0.1:5555"])
def test_a_tokenizer_that_the_user_names_is_loaded(
    worker_that_serves: Callable[[Any], None], address: str, tiny_llama: Path
) -> None:
    worker_that_serves("org/name")
    with pytest.raises(pytest.fail.Exception, match="the prompts were sent"):
        complete(address, str(tiny_llama))


def test_a_folder_of_this_machine_is_loaded(worker_that_serves: Callable[[Any], None], tiny_llama: Path) -> None:
    worker_that_serves(str(tiny_llama))
    with pytest.raises(pytest.fail.Exception, match="the prompts were sent"):
        complete("ipc:///tmp/worker")
