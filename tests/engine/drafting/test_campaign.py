"""The campaign with drafts: a few rounds, or as many as `make drafts` asks for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .campaign import Campaign, Seen
from .test_exactness import FAMILIES

LEAST_TOKENS = int(os.environ.get("TRUEROLL_CAMPAIGN_TOKENS", "3000"))
# One family for each further mechanism. `make test` does not use these families.
MECHANISMS = (
    "smollm3",
    "glm4_moe",
    "glm4",
    "granite",
    "gemma2",
    "deepseek_v3",
    "bamba",
    "falcon_h1",
    "nemotron_h",
    "granite4",
)
CAMPAIGNS = (*FAMILIES, *MECHANISMS) if "TRUEROLL_CAMPAIGN_TOKENS" in os.environ else FAMILIES


@pytest.mark.parametrize("family, mtp", [*((family, False) for family in CAMPAIGNS), ("qwen3_5_moe", True)])
def test_no_bit_differs_in_random_circumstances(family: str, mtp: bool, tmp_path: Path) -> None:
    campaign, total, rounds = Campaign(family, tmp_path / "model", mtp), Seen(), 0
    while total.tokens < LEAST_TOKENS or rounds < 4:
        total.add(campaign.round(rounds))
        rounds += 1
    print(f"{family}: {rounds} rounds, no sample differs, {total}")
    assert min(vars(total).values()) > 0, total
