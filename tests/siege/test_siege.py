"""A short siege: every attack beside good requests, at a front end whose limits are low enough to be reached."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from http_fronts import CHAT_TEMPLATE
from siege.attacks import ATTACKS, Target
from siege.siege import KEY, Plan, Siege, front_end

from tiny import make_tiny_model
from trueroll.rollout import launch_worker

LIMITS = ("--head-seconds", "1", "--body-seconds", "2", "--write-seconds", "1", "--linger-seconds", "6")
PLAN = Plan(seconds=4.0, attackers=30, good=2, pause=0.05, max_tokens=4, niceness=0)
ENDED = {
    "chunks_of_strangers": {"401"},
    "chunks": {"408", "413"},
    "trailers": {"400", "408", "413", "431"},
    "silent": {"closed"},
    "half_a_head": {"408"},
    "huge_answer": {"400"},
    "small_elements": {"400", "413"},
    "unfinished_body": {"408"},
    "long_text": {"left"},
    "long_conversation": {"400"},
    "refused_conversation": {"400"},
    "huge_head": {"431"},
    "strange_names": {"400"},
    "escape_codes": {"404"},
}
"""What the front end answers. A stream that nobody reads may end before it fills the buffers."""
LOST = {"closed", "left"}
"""What a client may get instead: its answer is lost with the connection, or a busy machine takes longer than it waits."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose chat template refuses a message without content."""
    folder = make_tiny_model("llama", tmp_path_factory.mktemp("siege") / "tiny")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE.replace("m.content or ''", "m.content + ''"))
    return folder


@pytest.fixture(scope="module")
def siege(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Siege]:
    log = tmp_path_factory.mktemp("siege") / "front.log"
    with launch_worker(str(model), num_blocks=512, num_threads=1) as worker:
        with front_end(worker.address, log, *LIMITS) as (port, pid):
            yield Siege(PLAN, Target(port, KEY, patience=6.0, scale=0.25), pid, worker.address)
    assert "Traceback" not in log.read_text(), log.read_text()


def test_good_requests_keep_their_bits_and_nothing_stays(siege: Siege) -> None:
    before = siege.held()
    seen = siege.attacked()
    assert seen.requests and seen.silences  # each answer was compared, each look was answered
    assert seen.ended.keys() == {attack.__name__ for attack in ATTACKS}
    for name, ended in seen.ended.items():
        assert ended, f"{name} never ended"
        if name in ENDED:
            assert ended.keys() <= ENDED[name] | LOST, (name, ended)
    answered = [name for name, ended in seen.ended.items() if ended.keys() & ENDED.get(name, set())]
    assert len(answered) > len(ENDED) // 2, seen.ended
    left = siege.wait_until_idle(before)
    assert left.open_requests == 0
    assert left.descriptors <= before.descriptors and left.children <= max(before.children, 2)
