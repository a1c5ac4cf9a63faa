"""Every schedule has the versions that it says, and the measures of a run are those of its steps alone."""

import pytest

from inflight.tools.bench.options import StalenessOptions
from inflight.tools.bench.staleness import WARM_UP_STEPS, measure

STEPS = 6


@pytest.mark.slow
@pytest.mark.parametrize("publish_every", [1, 3])
@pytest.mark.parametrize(("mode", "lag"), [("sync", 0), ("one_step_off", 1), ("inflight", None)])
def test_a_schedule_has_the_versions_that_it_says(mode, lag, publish_every):
    shares = []
    small = {"model": "tiny", "device": "cpu", "sequences": 8, "tokens": 8, "steps": STEPS}
    result = measure(
        StalenessOptions(mode=mode, publish_every=publish_every, **small), lambda text, share: shares.append(share)
    )
    steps = WARM_UP_STEPS + STEPS
    assert shares == [step / steps for step in range(1, steps + 1)]
    assert 1 <= result["num_swaps"] <= STEPS // publish_every + 1  # of the warm-up's last publish, too
    behind = result["version_lag"]["max"]
    if lag is None:
        assert behind >= 1
    else:  # optimizer steps since the last publish count as one version
        assert behind == max(lag, publish_every > 1)
    if mode == "sync":
        assert result["num_swaps_in_flight"] == result["weight_lag_ms"]["max"] == 0
    assert 0 <= result["trainer_wait_share"] < 1
    assert result["distributions"]["token_age_ms"][4] == result["token_age_ms"]["p50"]
