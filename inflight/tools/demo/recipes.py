"""Settings of training that fit a model and its task; options of the command replace some of them."""

from dataclasses import dataclass, fields, replace

from inflight.core.errors import InflightError
from inflight.tools.demo.options import DemoOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    steps: int
    groups_per_step: int
    learning_rate: float
    """Peak learning rate, after `ramp` steps."""
    ramp: int
    temperature: float
    max_sequences: int
    """Maximum number of sequences that the engine decodes together."""
    max_prefill_tokens: int
    """Maximum number of prompt tokens of a pass; 0: the engine's default. New weights wait for the pass in progress,
    and prompts share a beginning that an earlier pass computed."""
    trained_layers: int | None
    """Number of trained upper layers of the model. None: all parameters are trained."""
    evaluate_every: int
    """Optimizer steps between two evaluations."""
    quick_evaluation: int
    """Held-out prompts of those evaluations; the first and the last take all of them."""


SMALL = Recipe(
    steps=180,
    groups_per_step=64,
    learning_rate=4e-4,
    ramp=10,
    temperature=1.0,
    max_sequences=128,
    max_prefill_tokens=0,
    trained_layers=None,
    evaluate_every=25,
    quick_evaluation=128,
)
REAL = Recipe(
    steps=80,
    groups_per_step=2,
    learning_rate=1e-4,
    ramp=5,
    temperature=0.8,
    max_sequences=64,
    max_prefill_tokens=64,
    trained_layers=12,
    evaluate_every=20,
    quick_evaluation=32,
)


_NOT_WITH = {
    "real": (("model", "task", "data", "warmup_steps", "max_tokens"), "--real chooses model, task and lengths itself"),
    "data": (("task",), "--data takes the place of --task"),
    "sync": (("ahead",), "--sync generates no batch ahead"),
}
"""Options, with the options that they do not go with and the reason."""
_OF_A_RESUMED_RUN = ("resume", "steps", "device", "web", "web_port")


def check_options(options: DemoOptions) -> None:
    """Raise InflightError for options that would have no effect, by name."""
    given = [one.name for one in fields(options) if getattr(options, one.name) != one.default]
    for name, (others, reason) in _NOT_WITH.items():
        for other in others if name in given else ():
            if other in given:
                raise InflightError(f"{reason}; leave out {_flag(other)}")
    if "web_port" in given and not options.web:
        raise InflightError("--web-port is the port of the live page: add --web, or leave out --web-port")
    if options.resume:
        for name in [one for one in given if one not in _OF_A_RESUMED_RUN]:
            raise InflightError(f"--resume uses the options of the run again; leave out {_flag(name)}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def recipe_of(options: DemoOptions) -> Recipe:
    """Return the settings of a run."""
    given = {name: getattr(options, name) for name in ("steps", "groups_per_step", "learning_rate")}
    return replace(REAL if options.real else SMALL, **{k: v for k, v in given.items() if v is not None})
