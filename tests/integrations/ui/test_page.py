"""The page at `/ui` in a headless Chromium: content, arbitrary model output, any window width, and keyboard control."""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from http_fronts import Front, front_end
from playwright.sync_api import Browser, Page, expect, sync_playwright
from transformers import AutoModelForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from trueroll.engine.request import SampleOutput, SamplingParams, WeightSpan
from trueroll.rollout import WeightPublisher, WorkerProcess, launch_worker
from trueroll.rollout.http import app
from trueroll.rollout.http.samples import SampleLog

CHROMIUM = Path(sys.prefix) / "chromium" / "chromium"
MOST_MS = 60_000
MARKUP = "<img src=x onerror='harmed=1'>"
HOSTILE = MARKUP + "<script>harmed=1</script>\u202egnp.exe\u2066\x00\x07\x1b[31m\u200b 🙂 שלום"
"""Text that a model may generate: markup, bidirectional and invisible characters, and a legitimate other script."""


@pytest.fixture(scope="module")
def worker(tiny_llama: Path) -> Iterator[WorkerProcess]:
    with launch_worker(str(tiny_llama), num_blocks=64, num_threads=1) as running:
        yield running


@pytest.fixture(scope="module")
def log() -> SampleLog:
    return SampleLog()


@pytest.fixture(scope="module")
def front(worker: WorkerProcess, log: SampleLog) -> Iterator[Front]:
    """A front end with an access key. The front end adds its answers to `log`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "SampleLog", lambda: log)
        with front_end(worker.address, key="the-secret-key", model_name="tiny") as running:
            yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert CHROMIUM.is_file(), f"no Chromium at {CHROMIUM}; run {sys.executable} .ci/chromium.py"
    options = ["--no-sandbox", "--no-zygote", "--in-process-gpu"]  # the sandbox needs privileges that containers lack
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=options, timeout=MOST_MS)
        yield found
        found.close()


def open_page(
    browser: Browser, front: Front, key: str | None, path: str = "/ui", **settings: Any
) -> tuple[Page, list[str]]:
    """Return a page, and a list that collects its errors while it is open."""
    context = browser.new_context(locale="en-US", **settings)
    context.set_default_timeout(MOST_MS)
    expect.set_options(timeout=MOST_MS)
    page, complaints = context.new_page(), []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("dialog", lambda dialog: complaints.append(dialog.message) or dialog.dismiss())
    if key is not None:
        page.add_init_script(f"sessionStorage.setItem('trueroll-key', '{key}')")
    page.goto(f"{front.url}{path}")
    return page, complaints


@pytest.fixture
def page(browser: Browser, front: Front) -> Iterator[Page]:
    """The page at desktop width, opened with the key.

    The page must have no errors and must not execute injected code.
    """
    page, complaints = open_page(browser, front, front.key)
    yield page
    assert complaints == [] and page.evaluate("window.harmed") is None
    page.context.close()


def add(
    log: SampleLog, text: str, *spans: WeightSpan, prompt: str = "hm", message: str | None = None, **fields: Any
) -> None:
    """Log a group as if the front end had answered it: one token per byte, with probabilities that decrease with the
    position.
    """
    tokens = ids(text)
    logprobs = -np.linspace(0, 9, len(tokens), dtype=np.float32)
    told: dict[str, Any] = dict(finish_reason="length", seed=2**64 - 1, num_cached_tokens=0) | fields
    told["weight_versions"] = spans or (WeightSpan(0, 0, len(tokens)),)
    sample = SampleOutput(request_id="x", index=0, token_ids=tokens, logprobs=logprobs, **told)
    log.add(ids(prompt), SamplingParams(max_tokens=len(tokens)), 2**64 - 1, [sample], message=message)


def ids(text: str) -> list[int]:
    """Encode with the tiny tokenizer: three special tokens, then one token per byte, in the order of the characters."""
    alphabet = bytes_to_unicode()
    order = {character: i + 3 for i, character in enumerate(sorted(alphabet.values()))}
    return [order[alphabet[byte]] for byte in text.encode()]


def newest(page: Page, log: SampleLog) -> None:
    """Select the group that was added last."""
    page.locator(f"#groups li[data-id='{log.after(0)[-1].id}'] button").click()
    expect(page.get_by_role("heading", name=f"Group {log.after(0)[-1].id}")).to_be_visible()


def test_the_page_asks_for_the_key_and_keeps_it_in_the_tab(browser: Browser, front: Front, log: SampleLog) -> None:
    add(log, "an answer")
    page, complaints = open_page(browser, front, None)
    field, button = page.get_by_role("textbox", name="Key"), page.get_by_role("button", name="Continue")
    expect(page.get_by_role("dialog")).to_be_visible()
    assert page.locator("#groups li").count() == 0
    field.fill("a-wrong-key")
    button.click()
    expect(page.locator("#wrong")).to_have_text("This is not the key of this server.")
    field.fill(front.key)
    page.keyboard.press("Enter")
    expect(page.locator("#groups li")).to_have_count(1)
    expect(page.get_by_role("dialog")).not_to_be_visible()
    assert page.url == f"{front.url}/ui" and page.evaluate("localStorage.length") == 0
    assert page.evaluate("Object.values(sessionStorage)") == [front.key]
    assert all("401" in complaint for complaint in complaints)
    page.context.close()


def test_samples_are_shown_and_scored_again(page: Page, front: Front, worker: WorkerProcess, tiny_llama: Path) -> None:
    body = {"prompt": list(range(40, 80)), "n": 3, "max_tokens": 12, "seed": 4, "logprobs": 0}
    for _ in range(2):
        front.post("/v1/completions", body).raise_for_status()
    group = front.get("/ui/live").json()["groups"][-1]["id"]
    page.locator(f"#groups li[data-id='{group}'] button").click()
    expect(page.locator(".card")).to_have_count(3)
    expect(page.locator(".card .t")).to_have_count(36)
    assert page.locator(".prompt .t.cached").count() == 32, "the whole blocks of the first request"
    assert page.locator(".card [class~=t]:not([class*=' p'])").count() == 0, "each token has its shade"
    page.get_by_role("button", name="Score all again").click()
    expect(page.locator(".result.good")).to_have_count(3)
    assert re.search(r"Same bits: 12 log-probs, weights 0", page.locator(".result").first.inner_text())
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    with WeightPublisher("shared") as publisher:
        publisher.connect([worker.address])
        publisher.push(model, version=7)
    expect(page.locator("#weights")).to_have_text("weights version 7")
    expect(page.locator("#events li").first).to_contain_text("weights 0 → 7")
    page.get_by_role("button", name="Score sample 1 again").click()
    expect(page.locator(".result.changed")).to_contain_text("Sampled with weights 0, scored with 7")
    expect(page.locator(".result.good")).to_have_count(2)


def test_any_text_of_a_model_is_shown_as_text(page: Page, log: SampleLog) -> None:
    add(log, HOSTILE, prompt=HOSTILE)
    newest(page, log)
    expect(page.locator(".tokens .t").first).to_be_visible()
    for box in (page.locator(".prompt .tokens"), page.locator(".card .tokens"), page.locator("#groups .preview").first):
        expect(box).to_contain_text("[31m")  # prompt and samples come in separate answers
        text = box.inner_text().replace("·", "")  # "·" marks a token inside a character
        assert "⟨U+202E⟩gnp.exe⟨U+2066⟩␀␇␛[31m⟨U+200B⟩ 🙂 שלום" in text
        assert not re.search("[\u202e\u2066\x00\x07\x1b\u200b]", text)
    assert f"{MARKUP}<script>" in page.locator(".card .tokens").inner_text()
    add(log, "hm", prompt=MARKUP, finish_reason="stop", stop_reason=MARKUP, error=f"\u202e{MARKUP}")
    newest(page, log)
    expect(page.locator(".card .end")).to_have_text(f"stop (“{MARKUP}”)")
    expect(page.locator(".card .bad")).to_have_text(f"⟨U+202E⟩{MARKUP}")
    expect(page.locator("#groups .preview").first).to_have_text(MARKUP)
    add(log, "hm", message=f"\u202e{MARKUP}")
    newest(page, log)
    expect(page.locator("#groups .preview").first).to_have_text(f"⟨U+202E⟩{MARKUP}")
    assert page.locator("#samples img, #samples script").count() == 0


def test_a_long_completion_is_shown_in_parts(page: Page, log: SampleLog) -> None:
    add(log, "word " * 20_000)
    newest(page, log)
    tokens, more = page.locator(".card .t"), page.locator(".card").get_by_role("button", name="Show more")
    expect(tokens).to_have_count(2048)
    expect(more).to_have_text("Show more: 97,952 tokens left")
    more.click()
    expect(tokens).to_have_count(4096)
    assert page.locator(".card .tokens").inner_text().startswith("word word ")


def test_a_change_of_weights_within_a_sample_is_marked(page: Page, log: SampleLog) -> None:
    add(log, "abcdef", WeightSpan(3, 0, 4), WeightSpan(4, 4, 6))
    newest(page, log)
    expect(page.locator(".card .tokens")).to_have_text("weights 3abcdweights 4ef")
    page.locator(".card .t", has_text="e").click()
    expect(page.locator(".card .about")).to_contain_text(
        re.compile(r"token 4 · id \d+ · “e” · log-prob -7\.2 .* · weights 4")
    )
    expect(page.locator(".card .facts")).to_contain_text("weights 3 → 4 · ")
    expect(page.locator(".card .facts")).to_contain_text(f"seed {2**64 - 1}")


def test_every_control_is_reachable_by_keyboard(page: Page, log: SampleLog) -> None:
    add(log, "first")
    add(log, "second")
    page.reload()
    expect(page.locator(f"#groups li[data-id='{log.after(0)[-1].id}']")).to_be_visible()
    names = []
    for _ in range(20):
        page.keyboard.press("Tab")
        focused = page.locator(":focus")
        names.append(
            focused.evaluate("e => e.id || e.className || e.closest('li, .bar, .card')?.className || e.tagName")
        )
        assert focused.evaluate("e => getComputedStyle(e).outlineStyle") != "none", names
        if focused.evaluate("e => e.closest('#groups') !== null"):
            break
    assert names[:3] == ["skip", "range", "events"], "in reading order"
    page.keyboard.press("Enter")
    expect(page.locator(".card .tokens")).to_have_text("second")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.locator(".card .tokens")).to_have_text("first")
    page.keyboard.press("Tab")
    expect(page.locator(":focus")).to_have_text("Score all again")
    page.locator(".card .tokens").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft"):
        page.keyboard.press(key)
    expect(page.locator(".card .about")).to_contain_text("token 1 · ")
    for button in page.get_by_role("button").all():
        assert button.evaluate("e => e.ariaLabel || e.innerText.trim()")


def test_an_empty_page_has_an_example_that_works(
    browser: Browser, worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "SampleLog", SampleLog)
    with front_end(worker.address, key="the-secret-key", model_name="it's <b>tiny</b>") as front:
        permissions = ["clipboard-read", "clipboard-write"]
        page, complaints = open_page(browser, front, front.key, path="/", permissions=permissions)
        assert page.url == f"{front.url}/ui"
        expect(page.locator("#example")).to_contain_text("curl")
        expect(page.locator("#legend")).to_be_hidden()
        page.get_by_role("button", name="Copy").click()
        expect(page.locator("#copy")).to_have_text("Copied")
        copied = page.evaluate("navigator.clipboard.readText()")
        assert copied == page.locator("#example").inner_text()
        program, url, *options = shlex.split(copied)
        sent = dict(zip(options[::2], options[1::2], strict=True))
        assert (program, url) == ("curl", f"{front.url}/v1/completions")
        assert sent.keys() == {"-H", "-d"} and sent["-H"] == "Authorization: Bearer $TRUEROLL_HTTP_API_KEY"
        assert json.loads(sent["-d"])["model"] == front.model
        front.post("/v1/completions", json.loads(sent["-d"])).raise_for_status()
        expect(page.locator(".card")).to_have_count(2)
        expect(page.locator("#example")).to_be_hidden()
        assert complaints == []
        page.context.close()


CONTRASTS = """() => {
  const paper = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const paint = (color) => {
    paper.fillStyle = color;
    paper.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...paper.getImageData(0, 0, 1, 1).data].slice(0, 3).map((value) => {
      const part = value / 255;
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (element) => {
    const chain = [];
    for (let each = element; each; each = each.parentElement) chain.unshift(each);
    const back = chain.map((each) => paint(getComputedStyle(each).backgroundColor)).at(-1);
    const [low, high] = [back, paint(getComputedStyle(element).color)].sort((a, b) => a - b);
    return [(high + 0.05) / (low + 0.05), element.outerHTML.slice(0, 200)];
  };
  const hasText = (element) => [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  const shown = (element) => element.checkVisibility() && hasText(element);
  return [...document.body.querySelectorAll("*")].filter(shown).map(contrast);
}"""
"""JavaScript that returns, for each element with text, the WCAG contrast of text and background, and the element."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_is_readable_at_any_width_and_in_both_modes(
    browser: Browser, front: Front, log: SampleLog, width: int, scheme: str
) -> None:
    add(log, "W" * 500 + HOSTILE, prompt="x" * 300, message="What is\n6 times 7? " + "W" * 150)
    size = dict(width=width, height=800)
    page, complaints = open_page(browser, front, front.key, viewport=size, color_scheme=scheme, has_touch=width < 500)
    newest(page, log)
    expect(page.locator(".card .t").first).to_be_visible()
    expect(page.locator("#groups .preview").first).to_have_text(f"What is 6 times 7? {'W' * 61}…")
    expect(page.locator("#about")).to_contain_text("0 as loaded, then the version of the latest push")
    button = page.get_by_role("button", name="Score sample 0 again")
    expect(button).to_have_accessible_description(re.compile("with the same weights, all bits must be equal"))
    expect(page.locator("#about-score")).to_be_visible()
    assert button.get_attribute("title") and page.locator("#weights").get_attribute("title")
    for fact in (page.locator(".facts span", has_text=f"seed {2**64 - 1}")).all():
        assert fact.bounding_box()["height"] < 25, "the seed is on one line"  # type: ignore[index]
    button.click()
    expect(page.locator(".result")).to_have_class(re.compile("changed|bad"))
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert all(canvas.bounding_box()["width"] > 100 for canvas in page.locator("canvas").all())  # type: ignore[index]
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 50 and min(contrasts)[0] >= 4.5, min(contrasts)
    is_dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
    assert is_dark == (scheme == "dark") and complaints == []
    page.context.close()
