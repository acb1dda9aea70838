"""A short siege: every attack and good requests at the same time, on a front end with limits that the attacks reach."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from http_fronts import CHAT_TEMPLATE
from siege.attacks import ATTACKS, Target
from siege.siege import KEY, Plan, Siege, front_end

from tiny import make_tiny_model
from trueroll.rollout import launch_worker

LIMITS = ("--head-seconds", "1", "--body-seconds", "2", "--write-seconds", "1", "--linger-seconds", "3")
PLAN = Plan(seconds=3.0, attackers=30, good=2, pause=0.05, max_tokens=4)
GONE = {"closed", "left"}
"""Ways to end without an answer that the client received or waited for."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a chat template that refuses a message without content."""
    folder = make_tiny_model("llama", tmp_path_factory.mktemp("siege") / "tiny")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE.replace("m.content or ''", "m.content + ''"))
    return folder


@pytest.fixture(scope="module")
def siege(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Siege]:
    log = tmp_path_factory.mktemp("siege") / "front.log"
    with launch_worker(str(model), num_blocks=512, num_threads=1) as worker:
        with front_end(worker.address, log, *LIMITS) as (port, pid):
            yield Siege(PLAN, Target(port, KEY, patience=4.0, scale=0.25), pid, worker.address)
    assert "Traceback" not in log.read_text(), log.read_text()


def test_under_attack_good_requests_keep_their_bits_and_no_resource_leaks(siege: Siege) -> None:
    """Every attack is refused. Which refusal an attack gets depends on the load of the machine."""
    siege.attacked()  # warm-up, in which memory grows once
    before = siege.settled()
    seen = siege.attacked()
    assert seen.requests and seen.silences  # each answer was compared, each probe was answered
    assert seen.ended.keys() == {attack.__name__ for attack in ATTACKS}
    found = {how for ended in seen.ended.values() for how in ended} - GONE
    assert found and all(how.startswith("4") or how == "503" for how in found), seen.ended
    left = siege.wait_until_idle(before)
    assert left.open_requests == 0
    assert left.has_no_more_than(before), (left, before)
