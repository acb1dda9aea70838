"""Random histories of agents against a simple oracle. A session's prompt equals the oracle's, or the session refuses
the history with the name of the token that would change.

`make sessions` runs many more histories.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import closing
from pathlib import Path

import pytest
from chat_templates import TEMPLATES, make_chat_folder, make_tokenizer
from scripted_sessions import Model, session_of
from session_oracle import ORACLES, Agent

from trueroll.rollout.text import TextModel

HISTORIES = int(os.environ.get("TRUEROLL_SESSION_HISTORIES", 240))
PER_SESSION = 20


@pytest.mark.parametrize("family", ORACLES)
def test_no_history_drifts_silently(family: str, tmp_path: Path) -> None:
    folder = make_chat_folder(tmp_path / "chat", TEMPLATES[family], "<|im_end|>")
    total = dict(equal=0, branched=0, refused=0, retried=0)

    async def one_session(texts: TextModel, seed: int) -> None:
        model = Model(make_tokenizer())
        agent = Agent(session_of(model, texts), model, ORACLES[family], seed)
        for _ in range(PER_SESSION):
            await agent.step()
        agent.check_samples()
        for name, count in agent.counts.items():
            total[name] += count

    with closing(TextModel(str(folder))) as texts:
        for seed in range(max(1, HISTORIES // len(ORACLES) // PER_SESSION)):
            asyncio.run(one_session(texts, seed))
    print(f"{family}: {total}")
    assert total["equal"] > 20 and total["branched"] and total["retried"], "premise"
    assert bool(total["refused"]) == ORACLES[family].drops
