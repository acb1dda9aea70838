"""The identity of a block: tokens, salt, and the content (such as an image) that placeholder tokens represent."""

from __future__ import annotations

from array import array
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from trueroll.engine.cache.prefix_cache import PrefixCache
from trueroll.engine.request import HASH_BYTES, ContentSpan

BLOCK_SIZE = 4
PROMPT_LEN = 20
HASHES = [bytes([number] * HASH_BYTES) for number in range(3)]
Prompt = tuple[list[int], str | None, tuple[ContentSpan, ...]]


def span(start: int, end: int, number: int = 0) -> ContentSpan:
    return ContentSpan(start, end, HASHES[number])


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    tokens = draw(st.lists(st.integers(0, 1), min_size=PROMPT_LEN, max_size=PROMPT_LEN))
    borders = sorted(draw(st.sets(st.integers(0, PROMPT_LEN), max_size=6)))
    pairs = list(zip(borders[::2], borders[1::2], strict=False))
    spans = tuple(span(start, end, draw(st.integers(0, 2))) for start, end in pairs)
    return tokens, draw(st.sampled_from([None, "", "spans:"])), spans


@st.composite
def changed(draw: st.DrawFn, prompt: Prompt) -> Prompt:
    """Return the prompt itself, or a prompt that shares a random amount with it."""
    tokens, salt, spans = prompt
    other_tokens, other_salt, other_spans = draw(prompts())
    kept = draw(st.integers(0, PROMPT_LEN))
    return (
        tokens[:kept] + other_tokens[kept:],
        draw(st.sampled_from([salt, salt, other_salt])),
        draw(
            st.sampled_from([spans, spans[:-1], tuple(s._replace(content_hash=HASHES[0]) for s in spans), other_spans])
        ),
    )


def found(cache: PrefixCache, prompt: Prompt) -> int:
    """Return the number of the prompt's blocks that the cache finds."""
    tokens, salt, spans = prompt
    return len(cache.lookup(cache.identity.new_chain(salt, spans), array("i", tokens), len(tokens)))


def publish(cache: PrefixCache, prompt: Prompt) -> None:
    tokens, salt, spans = prompt
    table = cache.tables.allocate([], cache.tables.blocks_for(len(tokens)))
    cache.publish(cache.identity.new_chain(salt, spans), array("i", tokens), table, len(tokens))


def shared(first: Prompt, second: Prompt) -> int:
    """Return how many of the first blocks have the same tokens, salt and content."""
    count = 0
    if first[1] != second[1]:
        return 0
    for start in range(0, PROMPT_LEN, BLOCK_SIZE):
        end = start + BLOCK_SIZE
        contents = [{s for s in prompt[2] if s.start < end and s.end > start} for prompt in (first, second)]
        if first[0][start:end] != second[0][start:end] or contents[0] != contents[1]:
            break
        count += 1
    return count


def test_a_prompt_finds_only_blocks_with_equal_tokens_salt_and_content() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=300, deadline=None, database=None, derandomize=True)
    @given(st.data())
    def compare(data: st.DataObject) -> None:
        first = data.draw(prompts())
        second = data.draw(changed(first))
        cache = PrefixCache({None: PROMPT_LEN // BLOCK_SIZE}, BLOCK_SIZE)
        publish(cache, first)
        common = shared(first, second)
        assert found(cache, second) == common
        tokens_alone = shared((first[0], None, ()), (second[0], None, ()))
        seen["content differs"] += first[1] == second[1] and common < tokens_alone
        seen["content is the same"] += bool(first[2]) and common == PROMPT_LEN // BLOCK_SIZE
        seen["some blocks"] += 0 < common < PROMPT_LEN // BLOCK_SIZE

    compare()
    assert min(seen[event] for event in ("content differs", "content is the same", "some blocks")) > 10, seen


def test_a_span_moved_or_cut_within_its_block_is_different_content() -> None:
    tokens = [0] * PROMPT_LEN
    cache = PrefixCache({None: PROMPT_LEN // BLOCK_SIZE}, BLOCK_SIZE)
    publish(cache, (tokens, None, (span(5, 7),)))
    counts = {other: found(cache, (tokens, None, (span(*other),))) for other in ((5, 7), (6, 8), (5, 8), (9, 11))}
    assert counts == {(5, 7): 5, (6, 8): 1, (5, 8): 1, (9, 11): 1}


def test_a_salt_cannot_imitate_a_span() -> None:
    tokens, spans = [0] * PROMPT_LEN, (span(0, PROMPT_LEN),)
    cache = PrefixCache({None: 2 * PROMPT_LEN // BLOCK_SIZE}, BLOCK_SIZE)
    publish(cache, (tokens, None, spans))
    with_spans = cache.identity.new_chain(None, spans)
    extra = cache.identity.content(with_spans, array("i", tokens), 0)[1]
    assert extra.isascii(), "premise: a salt may have these bytes"
    assert found(cache, (tokens, extra.decode(), ())) == 0


def test_forks_and_epochs_keep_the_content() -> None:
    tokens, spans = [0] * PROMPT_LEN, (span(5, 7),)
    cache = PrefixCache({None: PROMPT_LEN // BLOCK_SIZE}, BLOCK_SIZE)
    chain = cache.identity.new_chain("a", spans)
    cache.invalidate()
    for begun in (cache.identity.restart(chain), cache.identity.restart(chain).fork()):
        cache.lookup(begun, array("i", tokens), PROMPT_LEN)
        same = cache.identity.new_chain("a", spans)
        cache.lookup(same, array("i", tokens), PROMPT_LEN)
        assert (begun.hashes, begun.epoch) == (same.hashes, cache.identity.epoch) and len(same.hashes) == 5
