"""The sections of a report: which there are of what was measured, in their order."""

from collections.abc import Sequence

from inflight.report.figures import Panels
from inflight.report.of_others import learning_section, swaps_section, throughput_section
from inflight.report.of_staleness import distributions_section, measures_section, served_section, waits_section
from inflight.report.of_sweeps import sweep_section
from inflight.report.results import Learning, Result, Swap, Sweep, Throughput
from inflight.report.section import Section
from inflight.report.systems import System

MEANINGS = {
    "swap_ms": "From publish() to the first token that was drawn with the new weights.",
    "stall_ms": "Time in which the engine had work and drew nothing because of a swap.",
    "weight_lag_ms": "How long newer weights had been published when a token was drawn; 0 if its own were the newest.",
    "policy_age_ms": "How long the weights that drew a token had been published when they drew it.",
    "token_age_ms": "From the draw of a token until an optimizer step consumed it.",
    "version_lag": "Versions that the trainer was ahead of the weights that drew a token when it consumed it.",
}
"""What the six measures mean; docs/staleness.md says more."""


def sections_of(results: Sequence[Result], systems: Sequence[System], panels: Panels) -> list[Section]:
    """Whatever the files give cause for."""
    outside_sweeps = [one for one in systems if not one.is_of_sweep]
    made = [
        measures_section(systems),
        distributions_section(outside_sweeps or systems, panels),
        waits_section([one for one in systems if one.found.trainer_s], panels),
        served_section([one for one in systems if one.is_served]),
        *(sweep_section(result, panels) for result in results if isinstance(result.found, Sweep)),
        swaps_section([result for result in results if isinstance(result.found, Swap)], panels),
        throughput_section([result for result in results if isinstance(result.found, Throughput)], panels),
        *(learning_section(result, panels) for result in results if isinstance(result.found, Learning)),
    ]
    return [section for section in made if section is not None]
