"""Tests turns and branches of episodes on the page, by mouse and keys, on wide and narrow screens.

`make test-browser` runs this; it needs Chromium."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browser import expect, scrolls

from inflight.observability.event_file import EventFile
from inflight.observability.events import Began, Sample, Samples, SampleTurn

if TYPE_CHECKING:
    from playwright.sync_api import Locator

pytestmark = pytest.mark.browser


def sequence(request: int, tokens: list[str], turns: list[SampleTurn], **more: object) -> Sample:
    """A token sequence of the episode. Tokens that begin with a capital were given; version 3 drew the others."""
    given = [token[0].isupper() for token in tokens]
    return Sample(
        tokens=tokens,
        versions=[None if is_given else 3 for is_given in given],
        log_ratios=[None if is_given else 0.5 for is_given in given],
        turns=turns,
        request_id=request,
        group_id=1,
        num_turns=more.pop("num_turns", len(turns)),
        num_tokens=sum(turn.num_tokens for turn in turns),
        reward=1.5,
        finish_reason="stop",
        **more,
    )


def drawn(num_tokens: int, began_s: float, ended_s: float, finish_reason: str = "stop", **more: object) -> SampleTurn:
    return SampleTurn(
        drawn=True, num_tokens=num_tokens, began_s=began_s, ended_s=ended_s, finish_reason=finish_reason, **more
    )


def episode() -> list[Sample]:
    """Three turns, the last one in two parts. A branch leaves the first turn, and another one that branch."""
    first = [
        drawn(3, 0.0, 0.2, reward=0.5),
        SampleTurn(num_tokens=90, num_left_out=88),
        drawn(1, 0.7, 0.75, "", reward=0.25),
        drawn(2, 0.75, 1.75, "length"),
    ]
    return [
        sequence(1, ["a", "b", "c", "Tool", "Says", "d", "e", "f"], first, prompt="the question"),
        sequence(2, ["g", "h"], [drawn(2, 0.3, 0.4, reward=-1.0)], prompt="", forked_from=(1, 2)),
        sequence(3, ["i"], [drawn(1, 2.0, 4.5)], prompt="", forked_from=(2, 2), adapter="solver"),
    ]


@pytest.fixture
def card(shown, tmp_path) -> "Callable[..., Locator]":
    """Opens the page of a run with these rollouts, and returns the first card."""

    def show(rollouts: list[Sample], width: int = 1024, **context) -> "Locator":
        write(tmp_path, rollouts)
        return shown(width, **context).locator(".sample").first

    return show


def write(directory: Path, rollouts: list[Sample]) -> None:
    now = time.time()
    samples = Samples(time=now, trainer_version=3, rollouts=rollouts)
    EventFile(directory / "run").append([Began(time=now - 9, title="a run"), samples])


def words(heads: "Locator") -> list[str]:
    return [re.sub(r"\s+", " ", head.inner_text()) for head in heads.all()]


def test_an_episode_is_shown_as_turns_with_rewards_reasons_and_times(card):
    shown = card(episode())
    expect(shown.locator(".meta").first).to_contain_text("reward 1.5")
    expect(shown).to_have_attribute("aria-label", "Episode with reward 1.5: 6 turns, 2 branches, 99 tokens, stop")
    assert words(shown.locator(".turn > .meta")) == [
        "Turn 1 drawn stop reward 0.5 200 ms drawing",
        "Turn 1 drawn stop reward -1 100 ms drawing",
        "Turn 2 drawn by solver stop 2.5 s drawing",
        "Turn 2 given",
        "Turn 3 drawn goes on in turn 4 reward 0.25 50 ms drawing after 400 ms of tools",
        "Turn 4 drawn continues turn 3 length 1 s drawing",
    ]
    expect(shown.locator(".turn > .text")).to_have_text(["abc", "gh", "i", "ToolSays … 88 more", "d", "ef"])
    expect(shown.get_by_text("the question")).to_have_count(1)


def test_branches_are_indented_below_the_place_where_they_leave(card):
    shown = card(episode())
    branches = shown.locator(".branch")
    assert words(branches.locator("> .meta")) == [
        "Branch after token 2 of turn 1 reward -1",
        "Branch after turn 1",
    ]
    first, branch, inner = (shown.locator(place).first for place in (".turn", ".branch", ".branch .branch"))
    turn_2 = shown.locator(".turn").nth(3)
    boxes = [one.bounding_box() for one in (first, branch, inner, turn_2)]
    assert boxes[0]["x"] == boxes[3]["x"] < boxes[1]["x"] < boxes[2]["x"]
    assert boxes[0]["y"] < boxes[1]["y"] < boxes[2]["y"] < boxes[3]["y"]
    assert shown.get_by_role("list").count() == 3
    assert shown.get_by_role("listitem").count() == 8


def test_all_tokens_of_an_episode_are_coloured_and_reached_by_keys(card):
    shown = card(episode())
    tokens, about = shown.locator(".token"), shown.locator(".about")
    expect(tokens).to_have_text(["a", "b", "c", "g", "h", "i", "d", "e", "f"])
    colour = "one => getComputedStyle(one).backgroundColor"
    assert tokens.first.evaluate(colour) == tokens.nth(5).evaluate(colour) != "rgba(0, 0, 0, 0)"
    shown.focus()
    for _ in range(4):
        shown.press("ArrowRight")
    expect(about).to_have_text("token 1 of turn 1: version 3, log ρ 0.5000")
    expect(tokens.nth(3)).to_have_class("token at")
    tokens.last.hover()
    expect(about).to_have_text("token 2 of turn 4: version 3, log ρ 0.5000")


@pytest.mark.parametrize("width", [390, 1024])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_deep_tree_fits_on_a_phone(card, width, scheme):
    def turn(k: int) -> SampleTurn:
        return drawn(2, k, k + 0.5, reward=0.001)

    deep = [
        sequence(
            k, ["word" * 9, "x"], [turn(k)], prompt="", adapter="policy" * 9, forked_from=(k - 1, 1) if k else None
        )
        for k in range(16)
    ]
    shown = card(deep, width, color_scheme=scheme)
    expect(shown.locator(".branch")).to_have_count(15)
    assert not scrolls(shown.page)
    overflowing = "all => all.filter((one) => one.scrollWidth > one.clientWidth + 1).length"
    assert shown.page.locator(".sample, .tree, .turn, .branch").evaluate_all(overflowing) == 0
    last = shown.locator(".token").last
    shown.focus()
    shown.press("ArrowLeft")
    for _ in range(31):
        shown.press("ArrowRight")
    expect(last).to_be_in_viewport()


def test_parts_that_are_left_out_are_counted(card):
    first, branch, inner = episode()
    turns = {"turns": first.turns[:2], "num_turns": 5, "tokens": first.tokens[:5]}
    cut = sequence(1, prompt="p", num_sequences=20, **turns)
    lost = sequence(9, ["z"], [drawn(1, 9, 9.5)], prompt="elsewhere", forked_from=(77, 4))
    late = sequence(4, ["y"], [drawn(1, 8, 8.5)], prompt="", forked_from=(1, 95))
    shown = card([cut, branch, inner, lost, late])
    expect(shown.locator(".left-out")).to_have_text(["… 3 more turns", "… 15 more token sequences, not recorded"])
    heads = words(shown.locator(".branch > .meta, .tree > .meta"))
    assert "Branch of a token sequence that is not recorded" in heads
    assert "Branch after token 95, in a turn that is not shown" in heads
    assert "elsewhere" in shown.inner_text()


def test_token_sequences_without_a_common_beginning_follow_each_other(card):
    solver = sequence(1, ["a"], [drawn(1, 0.0, 1.0, reward=1.0)], prompt="to solve", adapter="solver")
    judge = sequence(2, ["b"], [drawn(1, 1.0, 2.0, reward=0.5)], prompt="to judge", adapter="judge")
    shown = card([solver, judge])
    assert words(shown.locator(".tree > .meta")) == ["Token sequence 1 reward 1", "Token sequence 2 reward 0.5"]
    text = shown.inner_text()
    assert (
        text.index("to solve") < text.index("drawn by solver") < text.index("to judge") < text.index("drawn by judge")
    )


def test_episodes_and_rollouts_without_turns_have_a_card_each(card):
    plain = Sample(prompt="p", tokens=["c", "a"], versions=[3, 4], log_ratios=[0.5, 0.25], reward=1.0)
    other = sequence(8, ["k"], [drawn(1, 0.0, 1.0)], prompt="other", sample=1)
    page = card([plain, *episode(), other]).page
    expect(page.locator(".sample")).to_have_count(3)
    expect(page.locator(".sample").first.locator(".tree")).to_have_count(0)
    expect(page.locator(".sample").first.locator(".text")).to_have_text("pca")
    expect(page.locator(".sample").nth(1).locator(".turn")).to_have_count(6)
    expect(page.locator(".sample").nth(2).locator(".turn")).to_have_count(1)


def test_text_of_an_episode_is_text_and_nothing_else(card):
    nasty = '<img src=x onerror="document.title=1">'
    shown = card([sequence(1, [nasty], [drawn(1, 0.0, 1.0, nasty)], prompt=nasty, adapter=nasty)])
    expect(shown.locator(".turn .text")).to_have_text(nasty)
    expect(shown.locator(".turn > .meta")).to_contain_text(f"drawn by {nasty}")
    assert shown.page.locator("img").count() == 0
