"""A model whose greedy tokens proclaim the version of its weights, and a process that publishes it.

Each of several tensors far apart in the slot puts its own sign of the version into the hidden state: the embedding in
block 0, the MLP of layer l in block l + 1. The output row of token v + 1 adds up the signs of version v; if one of them
is of another version, that row loses to row 0, whose token proclaims a torn model. So token − 1 is the version, and
token 0 says that a forward pass read two versions.

Run as a program it is the publisher. `truth_teller.py ENDPOINTS publish COUNT SEED DEVICE TRANSPORT` publishes COUNT
versions at random moments. `truth_teller.py ENDPOINTS kill COUNT SEED DEVICE TRANSPORT` forks COUNT publishers that are
killed in the middle of a publish, then publishes once more and prints {"torn": slots found half-written, "version": the
last one} as JSON. ENDPOINTS are separated by commas; TRANSPORT is slots, broadcast, or files=DIRECTORY, the last two
also with +delta.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from inflight.weights.trainer.publisher import Publisher
from inflight.weights.trainer.staging import StagingBuffer
from inflight.weights.transports.broadcast import Broadcast, BroadcastGroup
from inflight.weights.transports.files import Files
from inflight.weights.transports.slots import Slots

TORN = 0
HIDDEN, LAYERS, VOCABULARY, INTERMEDIATE = 64, 2, 8192, 1024
BLOCK = HIDDEN // (LAYERS + 1)
_SIGNS = (BLOCK, BLOCK - 2, BLOCK - 4)  # of each block; coprime, so that the signs together tell versions apart


def make_truth_teller() -> PreTrainedModel:
    """The model at version 0."""
    config = Qwen3Config(
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        intermediate_size=INTERMEDIATE,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,  # which FlashInfer takes
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).eval().requires_grad_(False)
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.o_proj.weight.zero_()  # attention computes, and adds nothing
        layer.mlp.gate_proj.weight.zero_()
        layer.mlp.up_proj.weight.zero_()
        # The RMSNorm of a hidden state of index + 1 ones sums up to this, so that gate and up become 1.
        total = (index + 1) * (HIDDEN / (index + 1)) ** 0.5
        layer.mlp.gate_proj.weight[0] = layer.mlp.up_proj.weight[0] = 1 / total
    teach(model, 0)
    return model


def _signs(version: int) -> list[int]:
    return [block * BLOCK + version % count for block, count in enumerate(_SIGNS)]


@torch.no_grad()
def teach(model: PreTrainedModel, version: int, before: int | None = None) -> None:
    """Make the model proclaim a version (below VOCABULARY − 1) instead of the one that it proclaimed before."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    downs = [layer.mlp.down_proj.weight for layer in model.model.layers]
    if before is None:
        for weight in (embedding, head, *downs):
            weight.zero_()
        head[TORN] = 0.84  # 3 signs beat 3 · 0.84, 2 signs do not beat it
        before = version
    for old_or_new, on in ((before, 0.0), (version, 1.0)):
        signs = _signs(old_or_new)
        embedding[:, signs[0]] = on
        for down, sign in zip(downs, signs[1:], strict=True):
            down[sign, 0] = on / torch.nn.functional.silu(torch.ones(()))
        head[old_or_new + 1, signs] = on


def proclaimed_by(views: dict[str, torch.Tensor]) -> list[int]:
    """The sign of each tensor of a slot, and the version of its output rows (−1 if there are several)."""
    rows = views["lm_head.weight"][1:].sum(-1).nonzero()[:, 0].tolist()
    signs = [int(views["model.embed_tokens.weight"][0].argmax())]
    signs += [int(views[f"model.layers.{i}.mlp.down_proj.weight"][:, 0].argmax()) for i in range(LAYERS)]
    version = rows[0] if len(rows) == 1 else -1
    return signs if version >= 0 and signs == _signs(version) else []


def _publisher(endpoints: str, model: PreTrainedModel, transport: str) -> Publisher:
    kind, _, delta = transport.partition("+")
    kind, _, directory = kind.partition("=")
    chosen = {
        "slots": lambda: Slots(),
        "broadcast": lambda: Broadcast(delta=bool(delta), bucket_bytes=1 << 18),
        "files": lambda: Files(directory=Path(directory), delta=bool(delta)),
    }[kind]()
    engines = endpoints.split(",")
    return Publisher(engines if len(engines) > 1 else engines[0], model, transport=chosen)


def _publish_randomly(endpoints: str, count: int, seed: int, device: str, transport: str) -> None:
    model, rng = make_truth_teller().to(device), random.Random(seed)
    with _publisher(endpoints, model, transport) as publisher:
        for version in range(1, count + 1):
            publisher.wait_copied()
            teach(model, version, before=version - 1)
            assert publisher.publish() == version
            time.sleep(rng.random() ** 4 * 0.01)
            if isinstance(publisher._target, StagingBuffer) and version % 2:  # the others may be overtaken
                while publisher._target._sent is None or publisher._target._sent[1].version < version:
                    publisher.check()
                    time.sleep(0.001)


def _die_during_a_publish(publisher: Publisher, rng: random.Random) -> None:
    """SIGKILL this process at a random moment of a random publish, from its copy to a little after its message."""
    sys.setswitchinterval(1e-4)  # see the copy begin
    time.sleep(rng.random() * 0.05)
    while not publisher._copies.copying:
        time.sleep(0)
    time.sleep(rng.random() * (0.02 if isinstance(publisher._target, StagingBuffer) else 0.001))
    os.kill(os.getpid(), signal.SIGKILL)


def _die_during_a_copy(publisher: Publisher, rng: random.Random) -> None:
    """SIGKILL this process when some tensors of a slot on the GPU are written and others are not. A copy there takes
    microseconds, so that no random moment would hit it."""
    whole, left = publisher._source.fill, [rng.randrange(20)]

    def torn(views: dict[str, torch.Tensor], version: int) -> None:
        if not left[0]:
            for view in rng.sample(list(views.values()), len(views) // 2):
                view.fill_(3.0)
            torch.cuda.synchronize()
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        whole(views, version)

    publisher._source.fill = torn


def _die_during_a_broadcast(rng: random.Random) -> None:
    """SIGKILL this process after some of the buckets of its first, second or third broadcast."""
    whole, left = BroadcastGroup.broadcast, [rng.randrange(3)]

    def torn(group: BroadcastGroup, buffer: torch.Tensor, bucket_bytes: int) -> None:
        if not left[0]:
            whole(group, buffer[: rng.randrange(len(buffer) // bucket_bytes + 1) * bucket_bytes], bucket_bytes)
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        whole(group, buffer, bucket_bytes)

    BroadcastGroup.broadcast = torn


def _publish_until_killed(endpoints: str, pipe: int, rng: random.Random, device: str, transport: str) -> None:
    model = make_truth_teller().to(device)
    publisher = _publisher(endpoints, model, transport)
    target, torn = publisher._target, False
    if not isinstance(target, StagingBuffer):
        torn = any(not proclaimed_by(target.views[slot]) for slot in target._engine.free)
    os.write(pipe, b"T" if torn else b"W")
    if transport.startswith("broadcast"):
        _die_during_a_broadcast(rng)
    elif device == "cuda":
        _die_during_a_copy(publisher, rng)
    else:
        threading.Thread(target=_die_during_a_publish, args=(publisher, rng), daemon=True).start()
    before = 0
    while True:
        publisher.wait_copied()
        teach(model, publisher.version + 1, before)
        before = publisher.publish()
        if isinstance(
            target, StagingBuffer
        ):  # it takes versions while it waits for the engine: more than tokens can tell
            time.sleep(0.005)


def _kill_publishers(endpoints: str, count: int, seed: int, device: str, transport: str) -> None:
    rng = random.Random(seed)
    torn = 0
    for _ in range(count):
        reading, writing = os.pipe()
        child_rng = random.Random(rng.random())
        child = os.fork()
        if child == 0:
            _publish_until_killed(endpoints, writing, child_rng, device, transport)
        torn += os.read(reading, 1) == b"T"
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
        os.close(reading)
        os.close(writing)
    model = make_truth_teller().to(device)
    with _publisher(endpoints, model, transport) as publisher:
        teach(model, publisher.version + 1, before=0)
        version = publisher.publish()
    print(json.dumps({"torn": torn, "version": version}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    command = {"publish": _publish_randomly, "kill": _kill_publishers}[sys.argv[2]]
    command(sys.argv[1], int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
