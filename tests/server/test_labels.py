"""What clients call a version, where publishing it fails."""

import asyncio
from types import SimpleNamespace

import pytest

from inflight.core.errors import WeightFileError
from inflight.server.updates import Updates


@pytest.mark.parametrize(
    ("publish_fails", "live_fails", "name"), [(False, True, "step-1"), (True, False, "1"), (False, False, "step-1")]
)
def test_a_version_that_goes_live_late_keeps_its_name_and_one_that_was_refused_loses_it(
    tmp_path, publish_fails, live_fails, name
):
    publisher = SimpleNamespace(version=0, closed=False, close=lambda: None)

    def publish(directory):
        if publish_fails:
            raise WeightFileError("it does not fit")
        publisher.version = 1
        return 1

    def wait_for_version(version, *, timeout_s=60.0):
        assert timeout_s == 3600  # Weights can take minutes to arrive at several engines.
        if live_fails:
            raise TimeoutError("it did not go live within 3600 s")

    publisher.publish = publish
    engine = SimpleNamespace(
        publisher=lambda *_, **__: publisher,
        wait_for_version=wait_for_version,
        status=lambda: SimpleNamespace(version=0),
    )
    updates = Updates(engine)  # type: ignore[arg-type]
    publishing = updates.publish_directory(str(tmp_path), "step-1")
    if publish_fails or live_fails:
        with pytest.raises((WeightFileError, TimeoutError)):
            asyncio.run(publishing)
    else:
        assert asyncio.run(publishing) == 1
    assert updates.labels.get(1, "1") == name
    updates.close()
