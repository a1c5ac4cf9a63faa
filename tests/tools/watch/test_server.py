"""The server of the page: files, events, allowed names, and sources."""

import http.client
import json
import re
import urllib.request
from types import SimpleNamespace

import pytest

from inflight.core.errors import ListenError
from inflight.observability.event_file import EventFile
from inflight.observability.events import Began, Event, Sample, Samples, Step
from inflight.tools.watch.server import PAGE, PageServer, names_of
from inflight.tools.watch.sources import RunDirectory, directory_of


@pytest.fixture
def server(tmp_path):
    with PageServer(RunDirectory(tmp_path / "run")) as server:
        yield server


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read()


def test_the_page_comes_with_its_files_and_asks_no_other_site(server):
    page = get(server.url + "/").decode()
    names = re.findall(r'(?:href|src)="([\w.]+)"', page)
    assert {"style.css", "page.js", "icon.svg"} <= set(names)
    for path in PAGE.iterdir():
        if path.name != "index.html":
            assert get(f"{server.url}/{path.name}") == path.read_bytes()
        addresses = set(re.findall(r"https?://[\w./]+", path.read_text()))
        assert addresses <= {"http://www.w3.org/2000/svg"}, path.name


def test_news_of_a_run_that_begins_goes_on_and_begins_anew(server, tmp_path):
    def news(cursor: str = "") -> dict:
        return json.loads(get(f"{server.url}/events?cursor={cursor}"))

    missing = news()
    assert missing["there"] is False
    assert missing["why"] == f"there is no {tmp_path}/run/events.jsonl"
    file = EventFile(tmp_path / "run")
    file.append([Began(time=1.0, title="first")])
    first = news(missing["cursor"])
    assert (first["there"], first["is_new"], first["events"][0]["title"]) == (True, True, "first")
    file.append([Step(time=2.0, step=1, numbers={"reward": 0.5})])
    second = news(first["cursor"])
    assert (second["is_new"], [event["step"] for event in second["events"]]) == (False, [1])
    EventFile(tmp_path / "run").append([Began(time=3.0, title="second")])
    third = news(second["cursor"])
    assert (third["is_new"], [event["title"] for event in third["events"]]) == (True, ["second"])


def test_news_end_with_the_verdict_on_the_whole_run(tmp_path):
    source = RunDirectory(tmp_path)

    def learning(cursor: str) -> str:
        return next(found.state for found in source.news(cursor).verdict if found.topic == "learning")

    def steps(first: int, rewards: list[float]) -> list[Event]:
        return [Step(time=at, step=at, numbers={"reward": reward}) for at, reward in enumerate(rewards, first)]

    file = EventFile(tmp_path)
    file.append([Began(time=1.0, title="first"), *steps(1, [0.01 * step + 0.02 * (step % 3) for step in range(60)])])
    assert learning("") == learning("") == "learning"  # for every client, from wherever it reads
    file.append(steps(61, [0.0] * 60))
    assert learning(source.news("").cursor) == "the reward fell"
    EventFile(tmp_path).append(steps(1, [0.5] * 3))
    assert learning("") == "no verdict yet"
    long = [Sample(prompt="a" * 4000, tokens=[], versions=[], log_ratios=[])]
    EventFile(tmp_path).append([Samples(time=1.0, trainer_version=1, rollouts=long)] * 600)
    news = source.news("")
    assert (news.has_more, news.verdict) == (True, [])


def test_other_paths_and_names_of_other_sites_are_refused(server):
    for path in ("/../sources.py", "/sources.py", "/events/x"):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        connection.request("GET", path)
        assert connection.getresponse().status == 404
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("GET", "/events", headers={"Host": "attacker.example"})
    assert connection.getresponse().status == 400


def test_every_address_of_this_machine_alone_refuses_names_of_other_sites(tmp_path):
    with PageServer(RunDirectory(tmp_path), host="127.0.0.2") as server:
        assert get(server.url)
        connection = http.client.HTTPConnection("127.0.0.2", server.port, timeout=10)
        connection.request("GET", "/events", headers={"Host": "attacker.example"})
        assert connection.getresponse().status == 400


@pytest.mark.parametrize(("bound", "is_open"), [("::1", False), ("127.0.0.1", False), ("0.0.0.0", True), ("::", True)])
def test_any_name_will_do_only_where_others_reach_the_page(bound, is_open):
    names = names_of(SimpleNamespace(getsockname=lambda: (bound, 8800)), "My-Host")
    assert is_open or "my-host" in names  # which can be a name of a loopback address
    assert (names == ["*"]) == is_open
    assert is_open or (f"[{bound}]" if ":" in bound else bound) in names


def test_a_port_that_is_taken_is_named(server):
    with pytest.raises(ListenError, match=f"cannot listen on 127.0.0.1 port {server.port}: .*choose another port"):
        PageServer(RunDirectory(PAGE), port=server.port)


def test_what_names_no_run_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"is a file; a run is a directory with events\.jsonl in it"):
        directory_of(str(tmp_path / "file"))
    with pytest.raises(ValueError, match="expected the directory of a run, got 'http://a'"):
        directory_of("http://a")
    EventFile(tmp_path).append([Began(time=1.0, title="a")])
    assert directory_of(str(tmp_path / "events.jsonl")).news("").there
