"""A data-parallel trainer of two ranks under Ray Train: python ray_train_ranks.py ADDRESS MODEL

Each rank takes its share of two batches and publishes in between. Prints what the ranks took, as JSON.
"""

import json
import sys
import tempfile
from pathlib import Path

import ray
import ray.train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train(config: dict[str, str]) -> None:
    from truth_teller import make_truth_teller

    import inflight

    rank, options = ray.train.get_context().get_world_rank(), inflight.EngineOptions(
        config["model"], device="cpu", dtype="float32", threads=1, max_sequences=6, max_context=256
    )  # fmt: skip
    model, placement = make_truth_teller(), inflight.RayPlacement(resources={"left": 1}, allow_unencrypted=True)
    with (
        inflight.launch([options], placement=placement) as engine,
        engine.publisher(model) as publisher,
    ):
        params = inflight.SamplingParams(n=2, max_tokens=20)
        engine.submit([[1 + rank], [2 + rank], [3 + rank], [4 + rank]], params)
        taken: list[int] = []
        for batch in engine.stream.batches(rollouts=8, score=lambda rollout: float(rollout.sample)):
            taken += [rollout.group_id for rollout in batch.rollouts]
            publisher.publish()
            publisher.wait_copied()
        share = {"rank": rank, "groups": taken, "version": publisher.version}
        (Path(config["out"]) / f"{rank}.json").write_text(json.dumps(share))


if __name__ == "__main__":
    address, model = sys.argv[1:]
    ray.init(address, log_to_driver=True)
    with tempfile.TemporaryDirectory() as out:
        TorchTrainer(
            train,
            train_loop_config={"model": model, "out": out},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(name="ranks", storage_path=out),
        ).fit()
        print(json.dumps([json.loads((Path(out) / f"{rank}.json").read_text()) for rank in range(2)]))
