"""Tensors of an engine that no open publisher can send to its successor, without engines."""

import pytest

from inflight.fleet.fleet import Fleet
from inflight.fleet.publishing import PublishedFleet
from inflight.observability.staleness_meter import StalenessMeter


class Publisher:
    """Stands in for a publisher that has sent a version, or 0."""

    def __init__(self, kind: str, sent_version: int):
        self.kind, self.sent_version, self.closed = kind, sent_version, False


@pytest.fixture
def published():
    fleet = Fleet()
    yield PublishedFleet(fleet, StalenessMeter())
    fleet.close()


def follow(published: PublishedFleet, kind: str, sent_version: int) -> Publisher:
    publisher = Publisher(kind, sent_version)
    published.follow(publisher)  # type: ignore[arg-type]
    return publisher


def close(published: PublishedFleet, publisher: Publisher) -> None:
    publisher.closed = True
    published.unfollow(publisher.kind, publisher.sent_version)


@pytest.mark.parametrize(("first", "second"), [("weights", "adapters"), ("adapters", "weights")])
def test_a_publisher_of_one_kind_does_not_hold_the_other_kind(published, first, second):
    publisher = follow(published, first, 1)
    assert not published.lost_kinds
    publisher.closed = True  # and it sends its last version
    assert published.lost_kinds == [first]
    close(published, publisher)
    del publisher
    other = follow(published, second, 2)
    assert published.lost_kinds == [first]
    again = follow(published, first, 0)
    assert published.lost_kinds == [first]
    again.sent_version = 3
    assert not published.lost_kinds
    close(published, other)
    assert published.lost_kinds == [second]


def test_a_publisher_that_sent_nothing_leaves_nothing_to_send_again(published):
    close(published, follow(published, "weights", 0))
    assert not published.lost_kinds
