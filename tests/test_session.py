"""What a user does with a running engine, through its process."""

import os
import time
from types import SimpleNamespace
from typing import Any

import pytest
from engine_files import slot_bytes, slots_of
from full_forward import logprob_error
from peft import LoraConfig, get_peft_model
from tiny_models import make_model
from waiting import draw_some, wait_until

import inflight
from inflight.core.errors import InvalidRequestError, NonFiniteWeightsError
from inflight.core.messages import LIVE_VERSION, Ids
from inflight.weights.trainer.engine_link import EngineLink
from inflight.weights.trainer.publisher import Publisher

LONG = inflight.SamplingParams(max_tokens=240, seed=5, ignore_eos=True)


@pytest.fixture
def launch(model_dir):
    """Engines of the small test models, in separate processes."""
    engines = []

    def start(name="qwen3", **options):
        defaults = {"device": "cpu", "max_sequences": 8, "max_context": 256, "threads": 1}
        engines.append(inflight.launch(model_dir(name), **(defaults | options)))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def collect(engine, *group_ids):
    return {group[0].group_id: group for group in engine.stream.collect(list(group_ids))}


def test_a_fork_goes_on_from_a_running_sample_which_goes_on_too(launch):
    engine = launch()
    engine.pause()
    [group] = engine.submit([[1, 2, 3]], LONG)
    [sample] = draw_some(engine, group, 20)
    assert sample.finish_reason == ""
    params = inflight.SamplingParams(max_tokens=6, n=3, ignore_eos=True)
    fork = engine.fork(sample, at=7, params=params, metadata={"why": "a pivot"})
    engine.resume()
    rollouts = collect(engine, group, fork)
    [whole] = rollouts[group]
    assert len(whole.token_ids) == 240
    for child in rollouts[fork]:
        assert child.forked_from == (whole.request_id, 7)
        assert child.prompt_token_ids.tolist() == [1, 2, 3, *whole.token_ids[:7]]
        assert child.metadata == {"why": "a pivot"}
        assert len(child.token_ids) == 6
    assert len({tuple(child.token_ids) for child in rollouts[fork]}) > 1
    with pytest.raises(InvalidRequestError, match="is not unfinished; submit its prompt and tokens as a new prompt"):
        engine.fork(whole)


@pytest.mark.medium
def test_a_paused_engine_computes_nothing_and_takes_weights(launch):
    engine = launch()
    expected = engine.generate([[1, 2, 3]], LONG)[0][0]
    engine.pause()
    [group] = engine.submit([[1, 2, 3]], LONG)
    draw_some(engine, group)
    before = engine.status()
    time.sleep(0.2)
    after = engine.status()
    assert before.paused
    assert before.num_tokens == after.num_tokens
    assert before.num_running == 1
    with engine.publisher(make_model("qwen3")) as publisher:  # the same weights again
        publisher.publish()
        engine.wait_for_version(1)
        assert engine.status().num_tokens == before.num_tokens
        engine.resume()
        [rollout] = collect(engine, group)[group]
    assert set(rollout.weight_versions) == {0, 1}
    assert rollout.token_ids.tolist() == expected.token_ids.tolist()


@pytest.mark.medium
def test_a_sleeping_engine_holds_no_blocks_and_goes_on_where_it_was(launch):
    engine = launch()
    expected = engine.generate([[1, 2, 3]], LONG)[0][0]
    engine.pause()
    [group] = engine.submit([[1, 2, 3]], LONG)
    draw_some(engine, group)
    engine.resume()
    engine.sleep()
    status = engine.status()
    assert (status.asleep, status.kv_blocks_used, status.num_running) == (True, 0, 0)
    [late] = engine.submit([[7, 8]], inflight.SamplingParams(max_tokens=3, ignore_eos=True))
    engine.wake()
    rollouts = collect(engine, group, late)
    assert rollouts[group][0].token_ids.tolist() == expected.token_ids.tolist()
    assert len(rollouts[late][0].token_ids) == 3
    assert engine.status().num_preemptions == 1


@pytest.mark.medium
def test_a_sleeping_engine_frees_the_slot_that_no_publisher_uses(launch):
    engine, trainer = launch(), make_model("qwen3", seed=1)

    whole = slot_bytes(engine.pid)
    assert len(whole) == 2
    assert whole[0] == whole[1] > 0
    with engine.publisher(trainer) as publisher:
        engine.sleep()
        assert slot_bytes(engine.pid) == whole, "the publisher can write to it"
        engine.wait_for_version(publisher.publish())
        engine.wake()
    engine.sleep()  # perhaps before the publisher's message that it has detached
    wait_until(lambda: slot_bytes(engine.pid) == [0, whole[0]])
    engine.wake()
    assert slot_bytes(engine.pid) == whole
    engine.sleep()
    with engine.publisher(make_model("qwen3", seed=2)) as publisher:
        assert slot_bytes(engine.pid) == whole
        engine.wait_for_version(publisher.publish())
    engine.wake()
    [[rollout]] = engine.generate([[1, 2, 3]], LONG)
    assert set(rollout.weight_versions) == {2}
    with engine.publisher(trainer) as publisher:
        publisher.publish()
    engine.sleep()  # perhaps before the new version is live
    wait_until(lambda: slot_bytes(engine.pid) == [0, whole[0]])
    with engine.publisher(trainer) as publisher:
        engine.wait_for_version(publisher.publish())
    wait_until(lambda: slot_bytes(engine.pid) == [0, whole[0]])  # it sleeps on
    engine.wake()
    assert slot_bytes(engine.pid) == whole
    assert logprob_error(make_model("qwen3", seed=2), rollout) < 1e-4


@pytest.mark.medium
@pytest.mark.parametrize("count", [1, 2])
def test_a_closed_publisher_maps_no_slot(launch, count):
    """On a GPU such a slot could not be freed."""
    engines = [launch() for _ in range(count)]
    before = slots_of(os.getpid())
    publisher = Publisher(engines, make_model("qwen3", seed=1))
    for _ in range(3):
        version = publisher.publish()
        for engine in engines:
            engine.wait_for_version(version)
    assert len(slots_of(os.getpid()) - before) == 2 * count
    publisher.close()
    assert slots_of(os.getpid()) == before


@pytest.mark.medium
def test_a_publisher_of_adapters_ends_the_lease_of_a_killed_publisher_of_weights(launch, monkeypatch):
    engine, trainer = launch(lora_rank=2), make_model("qwen3", seed=0)
    killed = engine.publisher(trainer)
    with monkeypatch.context() as patch:
        patch.setattr(EngineLink, "detach", EngineLink.release)  # without a message to the engine
        killed.close()
    with engine.publisher(get_peft_model(trainer, LoraConfig(r=2, target_modules=["q_proj"]))):
        pass
    engine.sleep()
    wait_until(lambda: 0 in slot_bytes(engine.pid))


@pytest.mark.medium
def test_a_pinned_group_keeps_its_version_through_publishes(launch):
    engine = launch(slots=3)
    engine.pause()
    with engine.publisher(make_model("qwen3", seed=1)) as publisher:
        [pinned] = engine.submit([[1, 2, 3]], LONG, version=LIVE_VERSION)
        [free] = engine.submit([[1, 2, 3]], LONG)
        num_drawn = 0
        for version in (1, 2):
            [sample] = draw_some(engine, free, num_drawn + 1)
            num_drawn = len(sample.token_ids)
            publisher.publish()
            engine.wait_for_version(version)
            assert 0 in engine.status().versions
        engine.resume()
        rollouts = collect(engine, pinned, free)
    assert set(rollouts[pinned][0].weight_versions) == {0}
    assert set(rollouts[free][0].weight_versions) == {0, 1, 2}
    assert engine.status().versions == [2]


@pytest.mark.medium
def test_weights_that_are_not_finite_are_refused_and_the_old_ones_serve_on(launch):
    engine, model = launch(), make_model("qwen3", seed=1)
    name, parameter = "model.layers.1.mlp.up_proj.weight", model.model.layers[1].mlp.up_proj.weight
    with engine.publisher(model, check_finite=True) as publisher:
        publisher.publish()
        engine.wait_for_version(1)
        good = parameter.data[3, 4].item()
        parameter.data[3, 4] = float("inf")
        publisher.publish()
        with pytest.raises(NonFiniteWeightsError, match=rf"version 2 was not published: {name} of \d+ tensors hold"):
            engine.wait_for_version(2, timeout_s=20)
        assert engine.status().version == 1
        assert set(engine.generate([[1, 2]], LONG)[0][0].weight_versions) == {1}
        parameter.data[3, 4] = good
        publisher.publish()
        engine.wait_for_version(3)
        assert set(engine.generate([[1, 2]], LONG)[0][0].weight_versions) == {3}


def test_one_sample_of_a_group_can_be_cancelled(launch):
    engine = launch()
    engine.pause()
    [group] = engine.submit([[1, 2, 3]], inflight.SamplingParams(max_tokens=240, n=3, ignore_eos=True))
    samples = draw_some(engine, group)
    engine.cancel(request_ids=[samples[1].request_id])
    engine.resume()
    reasons = [rollout.finish_reason for rollout in collect(engine, group)[group]]
    assert reasons == ["length", "cancelled", "length"]


def test_what_was_asked_for_arrives_with_every_token(launch):
    engine = launch("qwen3-moe", record_routed_experts=True)
    params = inflight.SamplingParams(
        n=2, max_tokens=9, top_p=0.8, return_entropy=True, top_logprobs=3, return_sampling_mask=True, ignore_eos=True
    )
    for rollout in engine.generate([[1, 2, 3, 4]], params)[0]:
        assert {name: column.shape for name, column in rollout.columns.items()} == {
            "entropies": (9,),
            "top_token_ids": (9, 3),
            "top_logprobs": (9, 3),
        }
        left = rollout.sampling_mask.split()
        assert all(token in ids for token, ids in zip(rollout.token_ids, left, strict=True))
        model = make_model("qwen3-moe").config
        assert rollout.routed_experts.shape == (4 + 9 - 1, model.num_hidden_layers, model.num_experts_per_tok)


def test_the_engine_says_what_it_runs_on(launch):
    engine = launch()
    info = engine.info
    assert (info.device, info.attention, info.fused) == ("cpu", "cpu", True)
    assert info.kv_cache_tokens >= 8 * 256
    layers, kv_heads, head_dim = 3, 2, 16
    assert info.kv_cache_bytes >= info.kv_cache_tokens * layers * kv_heads * head_dim * 2 * 4


def test_a_publisher_may_be_made_while_somebody_waits_for_a_version():
    versions, made = iter([0, 0, 1]), []
    client = SimpleNamespace(endpoint="", keys=None, call=lambda *_, **__: SimpleNamespace(version=next(versions)))
    info = SimpleNamespace(engine_id="", next_ids=Ids(0, 0))
    process = SimpleNamespace(client=client, welcome=info, name="", check=lambda: None, close=lambda: None)
    placement: Any = SimpleNamespace(
        start=lambda *_: process, connect=lambda: lambda: None, check=lambda options: None, first_frame=0
    )

    class Publisher:
        closed = False

        def check(self) -> None:
            make()

        def close(self, timeout_s: float) -> None:
            self.closed = True

    def make() -> None:
        made.append(Publisher())
        engine._published.publishers.add(made[-1])

    with inflight.Engine(inflight.EngineOptions("tiny"), placement) as engine:
        make()
        engine.wait_for_version(1)
        assert len(made) == 4
