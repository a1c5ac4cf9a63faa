"""The page says what the files say, says where they come from, and is nothing but a page."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import made_results
import pytest
from browser import chromium, expect
from made_results import ENVIRONMENT, staleness, write
from typer.testing import CliRunner

from inflight.tools.cli import app
from inflight.tools.report.figures import of_ms
from inflight.tools.report.page import notices, write_report
from inflight.tools.report.results import AGES, read
from inflight.tools.report.systems import systems_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NASTY = '<img src=x onerror="document.title=1">&"\'$x$'


def made(directory: Path, *data, title: str = "a report") -> str:
    """The page of these results."""
    results = [read(write(directory / f"{index}.json", each)) for index, each in enumerate(data)]
    write_report(results, directory / "page.html", title=title)
    return (directory / "page.html").read_text()


def cells_of(page: str, heading: str) -> list[str]:
    """The cells of the row with this heading."""
    [row] = re.findall(rf'<tr><th scope="row">{re.escape(heading)}</th>(.*?)</tr>', page)
    return re.findall(r"<td[^>]*>(.*?)</td>", row)


def test_the_six_measures_stand_side_by_side(tmp_path):
    page = made(tmp_path, staleness(), staleness(2.0, mode="sync"))
    assert cells_of(page, "in flight, two slots") == [
        "12 / 36 ms", "0.05 / 0.15 ms", "0 / 0", "800 ms / 2.4 s", "21 / 63 s", "2 / 8", "3,000",
    ]  # fmt: skip
    assert cells_of(page, "synchronous, two slots")[0] == "24 / 72 ms"
    numbers = json.loads((tmp_path / "page.json").read_text())
    assert [one["swap_ms"]["p50"] for one in numbers["systems"]] == [12.0, 24.0]
    assert numbers["files"][0]["environment"]["commit"] == ENVIRONMENT["commit"]
    [comparison] = numbers["comparisons"]
    assert {row["measure"]: row["ratio"] for row in comparison["rows"]}["swap_ms.p50"] == 2.0
    for figure in numbers["figures"]:
        assert (tmp_path / figure).read_bytes().startswith(b"\x89PNG")
    assert len(numbers["figures"]) == len(list(tmp_path.glob("page-figures/*"))) == 8  # six measures, two sides


def test_names_tell_systems_apart(tmp_path):
    data = [staleness(), staleness(model="small"), staleness(), staleness(publish_every=4), made_results.servers()]
    names = [one.name for one in systems_of([read(write(tmp_path / f"{i}.json", one)) for i, one in enumerate(data)])]
    assert names == [
        "in flight, two slots, tiny, publish every 1 (0)",
        "in flight, two slots, small, publish every 1",
        "in flight, two slots, tiny, publish every 1 (2)",
        "in flight, two slots, tiny, publish every 4",
        "server: inflight, two slots",
        "server: vLLM, pause keep",
    ]
    assert len(set(names)) == len(names)


def test_other_machines_commits_and_changed_code_are_said(tmp_path):
    gpu = ENVIRONMENT | {"machine": {"cpu": "another", "cores": 8, "gpu": "H200", "system": "Linux"}}
    dirty = ENVIRONMENT | {"commit": "fedcba-dirty"}
    data = [staleness(), staleness(environment=gpu), staleness(environment=dirty)]
    results = [read(write(tmp_path / f"{i}.json", one)) for i, one in enumerate(data)]
    assert notices(results[:1]) == []
    machines, commits, changed = notices(results)
    assert "different machines" in machines
    assert "a processor, 2 cores (0, 2); another, 8 cores, H200 (1)" in machines
    assert "0123456789ab (0, 1); fedcba-dirty (2)" in commits
    assert changed.endswith("when this was measured: 2")
    sweep = made_results.sweep()
    sweep["points"][3]["environment"] = dirty
    [notice] = notices([read(write(tmp_path / "sweep.json", sweep))])
    assert notice.startswith("Points of sweep are from different places: 0123456789ab on a processor")


def test_what_a_file_says_is_text_and_nothing_else(tmp_path):
    environment = {"command": NASTY, "commit": NASTY, "machine": {"cpu": NASTY}, "versions": {NASTY: NASTY}}
    nasty = made_results.servers() | {"environment": environment}
    nasty["servers"] = {NASTY: made_results.served(api=NASTY, model=NASTY), "\x00\n": made_results.served()}
    point = staleness(model=NASTY, mode=NASTY, trainer_s={NASTY: 1.0}, engine_s={NASTY: 1.0})
    sweep = made_results.sweep() | {"points": [point]}
    sweep["failed"][0] |= {"reason": NASTY, "model": NASTY}
    learning = made_results.learning() | {"modes": [NASTY], NASTY: made_results.learning()["sync"]}
    swap = made_results.swap() | {"model": NASTY, "gap_ms": {NASTY: {"p50": 1.0}}, "peer_mode": NASTY}
    page = made(tmp_path, nasty, sweep, learning, swap, made_results.throughput() | {"model": NASTY}, title=NASTY)
    assert "<img" not in page
    assert "onerror=&#34;" in page
    assert not re.search(r"<script|javascript:|https?://(?!www\.w3\.org)", page)


def test_numbers_at_the_edge_of_what_can_be_drawn_are_drawn(tmp_path):
    nothing = {name: {} for name in AGES}
    empty = staleness(tokens_per_s=0.0, trainer_s={}, engine_s={}, distributions={}, parts={}, **nothing)
    wild = staleness(tokens_per_s=-1e300, swap_ms={"p50": -5.0, "p99": 1e300}, stall_ms={"p50": 1e-300, "p99": 0.0})
    zero = made_results.sweep() | {"points": [staleness(0.0, sequences=1)], "failed": []}
    page = made(tmp_path, empty, wild | {"distributions": {}, "parts": {}}, zero)
    assert cells_of(page, "in flight, two slots, 32 sequences (0)")[0] == "–"


def test_a_figure_takes_the_colours_of_the_page_and_keeps_its_letters(tmp_path):
    page = made(tmp_path, staleness())
    [figure, *_] = re.findall(r"<figure.*?</figure>", page, flags=re.DOTALL)
    assert "var(--blue)" in figure
    assert not re.search(r"(fill|stroke): #", figure.replace("#000000", ""))
    assert "in flight, two slots</text>" in figure
    assert 'role="group" aria-label="swap_ms. in flight, two slots: 50 % below 12 ms' in figure
    assert len(set(re.findall(r'id="([^"]+)"', page))) == len(re.findall(r'id="([^"]+)"', page))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.0046, "4.6 µs"), (0.069, "0.069 ms"), (123.4, "123 ms"), (21_670, "21.7 s"), (1.2e6, "1,200 s")],
)
def test_times_are_told_in_a_unit_that_makes_them_short(value, text):
    assert of_ms(value) == text


def test_the_command_writes_a_report_and_tells_mistakes_in_a_sentence(tmp_path):
    path, out = str(write(tmp_path / "speeds.json", made_results.throughput())), tmp_path / "reports" / "all.html"
    done = CliRunner().invoke(app, ["report", path, path, "--out", str(out)])
    assert done.exit_code == 0, done.stderr
    assert {path.name for path in out.parent.iterdir()} == {"all.html", "all.json", "all-figures"}
    (tmp_path / "bad.json").write_text('{"bench": "staleness", "model": 3}')
    done = CliRunner().invoke(app, ["report", path, str(tmp_path / "bad.json"), "--out", str(out)])
    assert done.exit_code == 2
    assert "bad.jsonhasawrongormissingkey" in joined(done.stderr)
    for page, message in (("speeds.html", "speeds.json would be overwritten"), ("page.json", "must end in .html")):
        done = CliRunner().invoke(app, ["report", path, "--out", str(tmp_path / page)])
        assert (done.exit_code, joined(message) in joined(done.stderr)) == (2, True)
    assert CliRunner().invoke(app, ["report"]).exit_code == 2


def joined(text: str) -> str:
    """Without spaces and frames, since a long path is broken anywhere."""
    return "".join(text.split()).replace("│", "")


@pytest.mark.slow
def test_a_report_of_every_kind_has_its_section(tmp_path):
    results = [read(path) for path in made_results.write_all(tmp_path)]
    write_report(results, tmp_path / "page.html", title="all")
    text = (tmp_path / "page.html").read_text()
    for heading in ("Compared", "The six measures side by side", "Who waits for whom", "What updates did to clients"):
        assert f"<h2>{heading}</h2>" in text
    for heading in ("Sweep: sweep", "Swaps under load", "Throughput", "Learning: learning", "Learning: learning-lags"):
        assert f"<h2>{heading}</h2>" in text


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def full(tmp_path_factory) -> Path:
    """A report of a file of every kind, with names that are long and hostile."""
    directory = tmp_path_factory.mktemp("full")
    paths = made_results.write_all(directory)
    environment = ENVIRONMENT | {"command": "x" * 500, "commit": "c" * 90}
    long = staleness(model="organisation/a-model-whose-name-does-not-end-" * 3, environment=environment)
    results = [read(path) for path in (*paths, write(directory / f"{'n' * 120}.json", long))]
    write_report(results, directory / "page.html", title=NASTY * 3)
    return directory / "page.html"


@pytest.mark.browser
@pytest.mark.parametrize("width", [400, 1024, 1600])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_report_fits_its_window_and_its_letters_can_be_read(browser, full, width, scheme):
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    complaints, asked = [], []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(full.as_uri())
    assert page.locator("figure svg").count() > 20
    assert not page.evaluate("document.documentElement.scrollWidth > window.innerWidth")
    wide = "all => all.filter((one) => one.getBoundingClientRect().right > window.innerWidth + 1).map((one) => one.id)"
    assert page.locator("figure, .scroll, .notice, details, h2, h3").evaluate_all(wide) == []
    heights = "all => all.filter((one) => one.textContent.trim()).map((one) => one.getBoundingClientRect().height)"
    assert min(page.locator("figure svg text").evaluate_all(heights)) > 8.5
    outside = """all => all.filter((svg) => [...svg.querySelectorAll("text")].some((text) => {
        const inner = text.getBoundingClientRect(), outer = svg.getBoundingClientRect();
        return inner.left < outer.left - 1 || inner.right > outer.right + 1;
    })).map((svg) => svg.parentElement.id)"""
    assert page.locator("figure svg").evaluate_all(outside) == []
    assert page.title() == NASTY * 3
    assert page.locator("img").count() == 0
    assert contrast(page) > 4.5
    assert (complaints, [url for url in asked if not url.startswith(("file:", "data:"))]) == ([], [])
    page.close()


@pytest.mark.browser
def test_a_report_is_read_by_keys(browser, full):
    page = browser.new_page(viewport={"width": 400, "height": 800})
    page.goto(full.as_uri())
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("location.hash") == "#content"
    table = page.locator("#measures .scroll")
    table.focus()
    page.keyboard.press("ArrowRight")
    moved = """async () => {
        const table = document.querySelector("#measures .scroll");
        for (let tries = 0; tries < 100 && !table.scrollLeft; tries++) await new Promise(next => setTimeout(next, 20));
        return table.scrollLeft;
    }"""
    assert page.evaluate(moved) > 0
    source = page.locator("#sources details").first
    source.locator("summary").focus()
    page.keyboard.press("Enter")
    expect(source.locator("code")).to_be_visible()
    page.close()


def contrast(page) -> float:
    """Between the letters of a figure and its ground, as WCAG computes it."""
    colours = page.evaluate(
        """() => {
            const figure = document.querySelector("figure"), text = figure.querySelector("svg text");
            return [getComputedStyle(text).fill, getComputedStyle(figure).backgroundColor];
        }"""
    )

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted(map(luminance, colours), reverse=True)
    return (light + 0.05) / (dark + 0.05)
