"""The page in a real browser: what it shows, by mouse and keys, at three widths, while its run ends and begins anew.

`make test-browser` runs this; it needs Chromium."""

import random
import re
import subprocess
import sys
import time

import pytest
from browser import expect, scrolls
from waiting import PATIENCE_S

from inflight.observability.event_file import EventFile
from inflight.observability.events import (
    Began,
    Consumed,
    Ended,
    Engine,
    Episodes,
    Event,
    Sample,
    Samples,
    Step,
    Swapped,
    Version,
)
from inflight.tools.recorded_run import read_run
from inflight.tools.verdict import verdict_of
from inflight.tools.watch.server import PageServer
from inflight.tools.watch.sources import RunDirectory

pytestmark = pytest.mark.browser
MEASURES = ("weight_lag_ms", "policy_age_ms", "token_age_ms", "version_lag")


def made_run(steps: int, *, title: str = "a made run", ended: bool = False) -> list[Event]:
    """The events of a run whose reward rises to 1, one step a second until now."""
    rng, began = random.Random(0), time.time() - steps
    events: list[Event] = [Began(time=began, title=title, model="tiny", max_sequences=64)]
    for step in range(1, steps + 1):
        now = began + step
        numbers = {"reward": step / steps, "ratio/ess": 0.9, "mean_length": 8.0, "stale/logprob_diff": 0.04}
        numbers |= {
            "loss": -0.01,
            "grad_norm": 1.0,
            "staleness/age_over_bound": 2.5,
            "staleness/token_age_ms": 250.0,
            "lead/rule": 2.0,
        }
        numbers |= {"accuracy": 0.5} if step % 5 == 0 else {}
        counts = [0] * 42
        counts[20:22] = [600, 400]
        spans = {"wait for rollouts": 0.3, "forward": 0.4, "optimizer step": 0.2, "wait for the publish copy": 0.1}
        events += [
            Step(time=now, step=step, numbers=numbers, seconds=1.0, spans=spans, mismatch=counts, stale=counts),
            Consumed(time=now, num_tokens=9, measures={name: [1.0, 2.0, 3.0, rng.uniform(4, 9)] for name in MEASURES}),
            Swapped(time=now, version=step, swap_ms=12.0, stall_ms=0.1),
            Version(time=now, version=step, published=now - 0.1, drawn=900, trained=500, dropped=300),
            Engine(
                time=now,
                states={"generating": 0.8, "idle": 0.2},
                version=step,
                num_running=40,
                num_waiting=7,
                num_outstanding=12,
                num_tokens=5000 * step,
                kv_used=0.5,
            ),
        ]
    rollout = Sample(
        prompt="abc -> ", tokens=["c", "b\n", "a"], versions=[1, 1, 2], log_ratios=[0.5, -0.25, None], reward=1.0
    )
    events.append(Samples(time=began + steps, trainer_version=steps, rollouts=[rollout]))
    return [*events, Ended(time=began + steps)] if ended else events


@pytest.mark.parametrize("width", [390, 1024, 1600])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_chart_is_drawn_and_nothing_scrolls_sideways(shown, tmp_path, width, scheme):
    EventFile(tmp_path / "run").append(made_run(30))
    page = shown(width, color_scheme=scheme)
    expect(page.locator("h1")).to_have_text("a made run")
    expect(page.locator("#status")).to_have_text("live")
    charts = page.locator(".panel svg")
    assert charts.count() == 20
    expect(page.locator("svg .empty")).to_have_count(0)
    assert page.locator("svg").evaluate_all("all => all.every((one) => one.querySelector('path, rect'))")
    assert not scrolls(page)
    overflowing = "all => all.filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.id)"
    assert page.locator(".panel, .finding, .tile, .sample").evaluate_all(overflowing) == []
    assert page.evaluate("document.documentElement.dataset.theme") == scheme


def test_the_verdict_is_first_and_has_the_sentences_of_the_report(shown, tmp_path):
    EventFile(tmp_path / "run").append(made_run(60))
    page = shown(390)
    cards = page.locator(".finding")
    expect(cards).to_have_count(4)
    findings = verdict_of(read_run(tmp_path / "run"))
    for card, found in zip(cards.all(), findings, strict=True):
        expect(card).to_have_attribute("data-level", found.level)
        shown_words = re.sub(r"\s+", " ", card.inner_text())
        for part in (found.state, found.facts, found.cause, found.change.replace("`", "")):
            assert part in shown_words
    assert [found.state for found in findings] == ["learning", "each waits for the other", "old", "good"]
    first = page.locator("main").locator("article, a").first
    expect(first).to_have_class("finding")
    assert cards.first.bounding_box()["y"] < 400
    assert cards.last.bounding_box()["y"] < 800  # four answers on the first screen of a phone
    cards.nth(1).click()
    assert page.evaluate("location.hash") == "#waits"


def test_the_verdict_follows_the_run_and_alarms_have_a_color_of_their_own(shown, tmp_path):
    file = EventFile(tmp_path / "run")
    file.append(made_run(60))
    page = shown()
    learning, border = page.locator(".finding").first, "one => getComputedStyle(one).borderTopColor"
    expect(learning).to_have_attribute("data-level", "good")
    calm = learning.evaluate(border)
    alarm = page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--alarm')")
    file.append([Step(time=time.time(), step=step, numbers={"reward": 0.1}, seconds=1.0) for step in range(61, 91)])
    expect(learning).to_have_attribute("data-level", "alarm")
    expect(learning.locator(".state")).to_have_text("the reward fell")
    assert learning.evaluate(border) != calm
    drawn = page.locator("#sections").inner_html() + page.locator("#rollouts").inner_html()
    assert "alarm" not in drawn
    assert alarm.lower() not in drawn.lower()


def test_figures_are_those_of_the_run(shown, tmp_path):
    EventFile(tmp_path / "run").append(made_run(30))
    page = shown()
    expect(page.locator("h1")).to_have_text("a made run")
    assert "accuracy 0.5 " in page.locator("#panel-reward svg").get_attribute("aria-label")
    label = page.locator("#panel-trainer-waits svg").get_attribute("aria-label")
    assert re.search(r"trains 50 %, waits for rollouts 30 %, waits for the copy 10 %, .* does other things 10 %", label)
    assert "generates 80 %, has no prompts 20 %" in page.locator("#panel-engine-waits svg").get_attribute("aria-label")
    assert "trained on 500, left out 300" in page.locator("#panel-lives svg").get_attribute("aria-label")


def test_any_number_of_the_run_has_a_chart_and_the_choice_is_remembered(shown, tmp_path):
    numbers = [{"loss": -0.5, "grad_norm": 2.0, "made by/a user": float(step)} for step in range(9)]
    events = [Step(time=time.time(), step=step, numbers=one) for step, one in enumerate(numbers, 1)]
    EventFile(tmp_path / "run").append([Began(time=time.time() - 9, title="a run"), *events])
    page = shown(390)
    titles = page.locator("#number-panels h3")
    expect(titles).to_have_text(["loss", "grad_norm"])  # without the entropy, which this run does not log
    page.select_option("#add", "made by/a user")
    expect(titles).to_have_text(["loss", "grad_norm", "made by/a user"])
    expect(page.locator("#number-panels svg").last).to_have_attribute(
        "aria-label", re.compile("^made by/a user. value 8")
    )
    page.locator("#number-panels .remove").first.click()
    page.reload()
    expect(titles).to_have_text(["grad_norm", "made by/a user"])
    assert not scrolls(page)


def test_the_configuration_of_the_run_is_listed(shown, tmp_path):
    config = {"engine.max_sequences": "8", "grpo.staleness": ""}
    EventFile(tmp_path / "run").append([Began(time=time.time(), title="a run", config=config)])
    page = shown(390)
    page.locator("summary").click()
    expect(page.locator("#options")).to_have_text("engine.max_sequences8grpo.staleness–")
    assert not scrolls(page)


def test_the_time_before_a_restart_is_cut_out(shown, tmp_path):
    now = time.time()
    before = [
        Began(time=now - 1000, title="a run"),
        *(Step(time=now - 1000 + s, step=s, numbers={}) for s in range(1, 10)),
    ]
    after = [Began(time=now - 10, title="a run", resumed_after_step=9)]
    after += [Step(time=now - 10 + s, step=9 + s, numbers={"reward": 0.5}) for s in range(1, 10)]
    version = Version(time=now - 5, version=3, published=now - 6, drawn=1)
    EventFile(tmp_path / "run").append([*before, *after, version])
    page = shown()
    expect(page.locator("#facts")).to_contain_text("0:18 since it began")
    expect(page.locator("#panel-reward .mark")).to_have_count(1)
    chart = page.locator("#panel-reward svg")
    chart.focus()
    page.keyboard.press("Home")
    expect(page.locator("#panel-reward .tip em")).to_have_text("0:10")
    page.locator("#panel-lives svg").focus()
    page.keyboard.press("End")
    expect(page.locator("#panel-lives .tip em")).to_have_text("version 3, published at 0:13")


def test_a_run_of_episodes_has_tiles_of_its_episodes(shown, tmp_path):
    counts = {"attempts": 14, "completed": 6, "error: KeyError": 3, "episode_timeout": 1, "turns": 30}
    episodes = Episodes(
        time=time.time(),
        num_running=4,
        num_calling=2,
        counts=counts,
        seconds={"turns": 20.0, "calls": 5.0},
        reward=0.25,
    )
    EventFile(tmp_path / "run").append([*made_run(3), episodes])
    page = shown()
    expect(page.locator("h1")).to_have_text("a made run")
    tiles = [re.split(r"\n+", tile) for tile in page.locator(".tile").all_inner_texts()]
    assert {lines[0]: lines[1:] for lines in tiles[-6:]} == {
        "Episodes": ["4in progress", "6 completed"],
        "Tool calls": ["2in progress", "0 timed out"],
        "Episodes that failed": ["4", "3 KeyError, 1 episode_timeout"],
        "Turns": ["3per episode", "2 s drawing"],
        "Tool time": ["0.5s", "per episode"],
        "Reward of episodes": ["0.25", "mean, last 256"],
    }


def test_histograms_of_several_events_of_a_step_add_up(shown):
    added = shown().evaluate(
        """async () => {
            const { Run } = await import("/run.js");
            const run = new Run();
            for (const mismatch of [[1, 2], [3, 4], undefined])
                run.add({ kind: "step", time: 1, step: 1, numbers: {}, mismatch });
            return run.steps.get(1).mismatch;
        }"""
    )
    assert added == [4, 6]


def test_a_number_that_is_logged_late_does_not_move_its_step(shown):
    steps = shown().evaluate(
        """async () => {
            const { Run } = await import("/run.js");
            const run = new Run();
            run.add({ kind: "began", time: 0, title: "a" });
            for (const step of [1, 2, 3])
                run.add({ kind: "step", time: step, step, numbers: { reward: step }, seconds: 1 });
            run.add({ kind: "step", time: 9, step: 2, numbers: { accuracy: 5 } });
            return [...run.steps.values()].map((one) => [one.step, one.at, one.numbers]);
        }"""
    )
    assert steps == [[1, 1, {"reward": 1}], [2, 2, {"reward": 2, "accuracy": 5}], [3, 3, {"reward": 3}]]


def test_charts_and_their_meaning_are_reached_by_keys_and_mouse(shown, tmp_path):
    EventFile(tmp_path / "run").append(made_run(30))
    page = shown()
    chart, tip = page.locator("#panel-token_age_ms svg"), page.locator("#panel-token_age_ms .tip")
    chart.focus()
    expect(tip).to_be_hidden()
    page.keyboard.press("ArrowLeft")
    expect(tip).to_contain_text("median2 ms")
    page.keyboard.press("Home")
    expect(tip).to_contain_text("0:01")
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()
    chart.hover()
    expect(tip).to_be_visible()
    why = page.locator("#panel-swap_ms .why")
    meaning = page.locator("#why-swap_ms")
    expect(meaning).to_be_hidden()
    why.focus()
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Tab")
    expect(meaning).to_be_visible()
    expect(meaning).to_contain_text("From publish() to the first token")
    page.locator("nav a").last.click()
    assert page.evaluate("location.hash") == "#rollouts"


def test_rollouts_are_coloured_by_version_and_by_ratio(shown, tmp_path):
    EventFile(tmp_path / "run").append(made_run(30))
    page = shown()
    tokens = page.locator(".token")
    expect(tokens).to_have_count(3)
    colours = "all => all.map((one) => getComputedStyle(one).backgroundColor)"
    by_version = tokens.evaluate_all(colours)
    assert by_version[0] == by_version[1] != by_version[2]
    page.locator("input[value=version]").focus()
    page.keyboard.press("ArrowRight")
    by_ratio = tokens.evaluate_all(colours)
    assert len(set(by_ratio)) == 3
    assert by_ratio[2] == "rgba(0, 0, 0, 0)"
    page.locator(".sample").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".sample .about")).to_have_text("token 2: version 1, log ρ −0.2500")


def test_given_tokens_have_no_version_and_no_colour(shown, tmp_path):
    rollout = Sample(prompt="p", tokens=["c", "tool", "a"], versions=[3, None, 4], log_ratios=[0.5, None, 0.25])
    run = [*made_run(30), Samples(time=time.time(), trainer_version=4, rollouts=[rollout])]
    EventFile(tmp_path / "run").append(run)
    card = shown().locator(".sample").first
    expect(card.locator(".token")).to_have_text(["c", "a"])
    expect(card.locator(".text")).to_have_text("pctoola")
    card.focus()
    for _ in range(2):
        card.press("ArrowRight")
    expect(card.locator(".about")).to_have_text("token 3: version 4, log ρ 0.2500")


def test_the_page_follows_a_run_that_begins_goes_on_ends_and_begins_anew(shown, tmp_path):
    page = shown()
    expect(page.locator("#notice")).to_contain_text("The run is not there: there is no")
    expect(page.locator("#status")).to_have_text("the run is not there")
    run = tmp_path / "run"
    first = EventFile(run)
    first.append(made_run(5, title="first"))
    expect(page.locator("h1")).to_have_text("first")
    expect(page.locator("#notice")).to_be_hidden()
    first.append([Step(time=time.time(), step=6, numbers={"reward": 0.9})])
    expect(page.locator("#facts")).to_contain_text("step 6")
    resumed = [Began(time=time.time(), title="first", resumed_after_step=4)]
    first.append([*resumed, Step(time=time.time(), step=5, numbers={"reward": 0.8})])
    expect(page.locator("#facts")).to_contain_text("step 5")
    expect(page.locator("#panel-reward .mark")).to_have_count(1)
    first.append([Ended(time=time.time())])
    expect(page.locator("#status")).to_have_text("the run has ended")
    first.path.unlink()
    expect(page.locator("#status")).to_have_text("the run is not there")
    expect(page.locator("h1")).to_have_text("first")  # its events stay visible
    EventFile(run).append(made_run(20, title="second"))
    expect(page.locator("h1")).to_have_text("second")
    expect(page.locator("#facts")).to_contain_text("step 20")
    expect(page.locator("#panel-reward .mark")).to_have_count(0)


def test_a_run_that_is_killed_is_told_by_its_silence(shown, tmp_path):
    events = made_run(30)
    EventFile(tmp_path / "run").append([event for event in events if event.time < time.time() - 15])
    expect(shown().locator("#status")).to_have_text(re.compile(r"no news for 0:1\d"))


def test_choices_are_remembered(shown, tmp_path):
    EventFile(tmp_path / "run").append(made_run(300))
    page = shown(color_scheme="light")
    page.select_option("#theme", "dark")
    page.select_option("#window", "120")
    page.reload()
    expect(page.locator("h1")).to_have_text("a made run")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.locator("#window").input_value() == "120"
    ticks = page.locator("#panel-reward svg text.axis").all_text_contents()
    assert "4:00" in ticks
    assert "0:00" not in ticks


def test_text_of_a_rollout_is_text_and_nothing_else(shown, tmp_path):
    nasty = '<img src=x onerror="document.title=1">'
    rollout = Sample(prompt=nasty, tokens=[nasty], versions=[0], log_ratios=[0.0])
    began = Began(time=time.time(), title=nasty)
    EventFile(tmp_path / "run").append([began, Samples(time=time.time(), trainer_version=0, rollouts=[rollout])])
    page = shown()
    expect(page.locator("h1")).to_have_text(nasty)
    expect(page.locator(".sample .text")).to_have_text(nasty + nasty)
    assert page.locator("img").count() == 0


def test_the_server_of_the_page_may_come_back(browser, tmp_path):
    EventFile(tmp_path / "run").append(made_run(5))
    source = RunDirectory(tmp_path / "run")
    page = browser.new_page()
    server = PageServer(source)
    page.goto(server.url)
    expect(page.locator("#status")).to_have_text("live")
    server.close()
    expect(page.locator("#notice")).to_contain_text("the server of this page does not answer")
    with PageServer(source, port=server.port):
        expect(page.locator("#notice")).to_be_hidden()
    page.close()


def test_the_demo_is_shown_and_the_one_after_it_takes_its_place(shown, tmp_path):
    page, rng, data = shown(), random.Random(0), tmp_path / "letters.jsonl"
    data.write_text("".join(f'{{"prompt": "{i} ", "answer": "{rng.choice("ab")}"}}\n' for i in range(64)))
    sizes = ("--data", str(data), "--max-tokens", "3", "--warmup-steps", "30", "--groups-per-step", "8")
    for steps in ("4", "6"):
        command = [sys.executable, "-m", "inflight.tools.cli", "demo", *sizes, "--save-every", "0", "--steps", steps]
        command += ["--web", "--web-port", "0"]
        demo = subprocess.Popen([*command, "--out", str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
        try:
            expect(page.locator("#facts")).to_contain_text(f"step {steps}", timeout=90_000)
            expect(page.locator("h1")).to_have_text("letters.jsonl, 0.6 M parameters, inflight")
            output, _ = demo.communicate(timeout=PATIENCE_S)
        finally:
            demo.kill()
        assert demo.returncode == 0
        assert re.search(r"the page of this run is at http://127\.0\.0\.1:\d+", output)
        expect(page.locator("#status")).to_have_text("the run has ended")
        assert page.locator(".sample").count() > 0
        for panel in ("reward", "swap_ms", "token_age_ms", "ess", "trainer-waits", "lives"):
            expect(page.locator(f"#panel-{panel} svg .empty")).to_have_count(0)
