"""Two policies, LoRA adapters of one model that change at every publish, and a check of the tokens that they drew."""

import numpy as np
import torch
from full_forward import full_forward_logprobs
from tiny_adapters import with_adapters

import inflight

NAMES = ("one", "two")


class Policies:
    """A model with two adapters, and the values that each had when it was published."""

    def __init__(self, seed: int = 0):
        self.model = with_adapters("qwen3", *NAMES)
        self.random = torch.Generator().manual_seed(seed)
        self.own = {
            name: {n: p for n, p in self.model.named_parameters() if f".{name}." in n and "lora_" in n}
            for name in NAMES
        }
        self.published: dict[str, dict[int, dict[str, torch.Tensor]]] = {name: {} for name in NAMES}

    @torch.no_grad()
    def change(self, *names: str) -> None:
        for name in names:
            for parameter in self.own[name].values():
                parameter.normal_(std=0.2, generator=self.random)

    def note(self, version: int, *names: str) -> None:
        for name in names:
            self.published[name][version] = {n: p.detach().clone() for n, p in self.own[name].items()}

    def publish(self, publisher: inflight.Publisher, name: str) -> int:
        """Change both adapters and publish one of them."""
        publisher.wait_copied()
        self.change(*NAMES)
        version = publisher.publish(adapter=name)
        self.note(version, name)
        return version

    @torch.no_grad()
    def errors(self, rollout: inflight.Rollout, wrong: bool = False) -> np.ndarray:
        """Errors f64[drawn] of recorded log-probabilities: their distance to a forward pass of the token's version.
        wrong: under the weights one publish older; for the first version, one publish younger."""
        own, published = self.own[rollout.adapter], self.published[rollout.adapter]
        self.model.set_adapter(rollout.adapter)
        errors = np.zeros(len(rollout.token_ids))
        clock = sorted(published)
        places = np.searchsorted(clock, rollout.weight_versions, side="right") - 1
        if wrong:
            places = np.where(places > 0, places - 1, 1)
        for place in set(places[rollout.drawn].tolist()):
            for name, value in published[clock[place]].items():
                own[name].copy_(value)
            expected = full_forward_logprobs(self.model, rollout)
            errors[places == place] = np.abs(expected - rollout.logprobs)[places == place]
        return errors[rollout.drawn]

    def check(self, rollouts: list[inflight.Rollout]) -> None:
        """Assert that each token is of its version, and that this can be seen."""
        assert {rollout.adapter for rollout in rollouts} == set(NAMES)
        for rollout in rollouts:
            errors = self.errors(rollout)
            worst = int(errors.argmax())
            assert errors[worst] < 1e-3, (
                f"{rollout.adapter}: token {worst} of {len(errors)} is off by {errors[worst]} under version "
                f"{rollout.weight_versions[rollout.drawn][worst]}; {(errors >= 1e-3).sum()} are off by 0.001 or more"
            )
            assert np.median(self.errors(rollout, wrong=True)) > 0.01
