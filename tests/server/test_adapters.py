"""Adapters that clients load from directories, by name."""

import asyncio
import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from http_calls import answered, call
from safetensors.torch import load_file, save_file
from tiny_adapters import error, with_adapters
from waiting import wait_until

import inflight
from inflight.core.errors import EngineBusyError, EngineHungError, WeightFileError
from inflight.server.adapters import Adapters
from inflight.server.updates import Updates
from inflight.weights.trainer.adapter_files import read_adapter

MOST = 2e-4


@pytest.fixture(scope="module")
def served(model_dir):
    with inflight.launch(
        model_dir("qwen3"),
        device="cpu",
        max_sequences=8,
        max_context=128,
        threads=1,
        lora_rank=4,
        adapters=("place-0", "place-1"),
    ) as engine:
        yield engine, engine.serve(port=0, served_model_name="base")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Directories of PEFT's adapters, with their models, by a number."""
    made = {}

    def get(seed, **options):
        key = (seed, repr(options))
        if key not in made:
            model = with_adapters("qwen3", "default", seed=seed, **options)
            path = tmp_path_factory.mktemp("adapter")
            model.save_pretrained(path)
            made[key] = str(path), model
        return made[key]

    return get


def draw(server, model, num_tokens=20, **more):
    body = {"model": model, "prompt": [3, 4, 5], "max_tokens": num_tokens, "seed": 1, "ignore_eos": True,
            "return_token_ids": True, "return_weight_versions": True, "logprobs": 0, **more}  # fmt: skip
    return call(server, "POST", "/v1/completions", body)


def difference(answer, peft_model):
    """How far the log-probabilities are from PEFT's."""
    return error(peft_model, answered([3, 4, 5], answer["choices"][0]), "default")


def load(server, name, path, **more):
    return call(server, "POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path, **more})


@pytest.mark.slow
def test_adapters_by_name_are_those_of_peft(served, saved):
    _, server = served
    lora = call(server, "GET", "/server_info")[1]["vllm_config"]["lora_config"]
    assert lora == {"max_lora_rank": 4, "max_loras": 2}
    (first, first_model), (second, second_model) = saved(1), saved(2, rank=2)
    assert load(server, "step-1", first)[0] == 200
    assert load(server, "step-2", second)[0] == 200
    models = call(server, "GET", "/v1/models")[1]["data"]
    assert [(m["id"], m["parent"]) for m in models][2:] == [("step-1", "base"), ("step-2", "base")]
    status, answer = draw(server, "step-1")
    assert status == 200
    assert difference(answer, first_model) < MOST
    assert difference(draw(server, "step-2")[1], second_model) < MOST
    assert difference(answer, second_model) > 0.05
    assert error(first_model, answered([3, 4, 5], draw(server, "base")[1]["choices"][0]), None) < MOST
    unload_all(server)


@pytest.mark.slow
def test_a_name_that_is_there_is_replaced_only_if_asked(served, saved):
    _, server = served
    (first, _), (second, second_model) = saved(1), saved(2, rank=2)
    assert load(server, "policy", first)[0] == 200
    status, answer = load(server, "policy", second)
    assert (status, "load_inplace" in answer["error"]["message"]) == (400, True)
    assert load(server, "policy", second, load_inplace=True)[0] == 200
    assert difference(draw(server, "policy")[1], second_model) < MOST
    body = {"lora_name": "policy", "lora_path": first}
    assert call(server, "POST", "/load_lora_adapter", body)[0] == 200, "prime-rl's replaces"
    assert difference(draw(server, "policy")[1], saved(1)[1]) < MOST
    unload_all(server)


@pytest.mark.slow
def test_an_adapter_that_is_unloaded_while_it_draws_keeps_its_place(served, saved):
    engine, server = served
    (first, first_model), (second, _) = saved(1), saved(2, rank=2)
    assert load(server, "a", first)[0] == 200
    assert load(server, "b", second)[0] == 200
    engine.pause()
    answers = []
    thread = threading.Thread(target=lambda: answers.append(draw(server, "a", 120)))
    thread.start()
    wait_until(lambda: engine.status().num_waiting == 1)
    assert call(server, "POST", "/v1/unload_lora_adapter", {"lora_name": "a"})[0] == 200
    assert draw(server, "a")[0] == 404
    status, answer = load(server, "c", second)
    assert (status, "places" in answer["error"]["message"]) == (400, True)
    engine.resume()
    thread.join()
    assert difference(answers[0][1], first_model) < MOST
    assert load(server, "c", second)[0] == 200, "the place is free once the request has ended"
    unload_all(server)


@pytest.mark.slow
def test_adapters_and_weights_take_turns(served, saved, model_dir):
    """An engine has one publisher: what was loaded stays through an update of the weights."""
    _, server = served
    path, model = saved(1)
    assert load(server, "a", path)[0] == 200
    assert call(server, "POST", "/update_weights", {"weight_dir": model_dir("qwen3")})[0] == 200
    assert difference(draw(server, "a")[1], model) < MOST
    assert load(server, "b", saved(2, rank=2)[0])[0] == 200
    assert difference(draw(server, "a")[1], model) < MOST
    unload_all(server)


@pytest.mark.slow
def test_adapters_that_do_not_fit_are_refused_and_change_nothing(served, saved, tmp_path):
    engine, server = served
    path, model = saved(1)
    assert load(server, "a", path)[0] == 200
    version = engine.status().version
    wide = saved(3, rank=8)[0]
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 8}))
    for name, directory, message in (
        ("b", wide, "lora_rank"),
        ("b", str(tmp_path), "adapter_model.safetensors"),
        ("b", str(tmp_path / "nothing"), "adapter_config.json"),
    ):
        status, answer = load(server, name, directory)
        assert (status, message in answer["error"]["message"]) == (422, True), answer
    status, answer = load(server, "a", wide, load_inplace=True)
    assert status == 422
    assert engine.status().version == version
    assert difference(draw(server, "a")[1], model) < MOST
    assert call(server, "POST", "/v1/unload_lora_adapter", {"lora_name": "b"})[0] == 404
    assert call(server, "POST", "/v1/load_lora_adapter", {"lora_name": "b"})[0] == 400
    unload_all(server)


@pytest.mark.slow
def test_more_adapters_than_places(served, saved):
    _, server = served
    path = saved(1)[0]
    assert {load(server, name, path)[0] for name in ("", *server._served.names)} == {400}
    assert [load(server, name, path)[0] for name in "abc"] == [200, 200, 400]
    unload_all(server)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "LOHA", "lora_alpha": 1}, "LOHA"),
        ({"peft_type": "LORA", "lora_alpha": 1, "use_dora": True}, "use_dora"),
        ({"peft_type": "LORA"}, "lora_alpha"),
        ({"peft_type": "LORA", "lora_alpha": "8"}, "lora_alpha"),
        ({"peft_type": "LORA", "lora_alpha": 1, "alpha_pattern": {"q_proj": "8"}}, "alpha_pattern has '8'"),
        ({"peft_type": "LORA", "lora_alpha": 1, "alpha_pattern": {"q_proj(": 8}}, "no configuration.*unterminated"),
        ({"peft_type": "LORA", "lora_alpha": 1, "alpha_pattern": ["q_proj"]}, "no configuration"),
        ([], "no configuration"),
    ],
)
def test_only_plain_lora_is_read(saved, tmp_path, config, message):
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(WeightFileError, match=message):
        read_adapter(tmp_path)


@pytest.mark.parametrize("lost", ["lora_A", "lora_B"])
def test_half_of_an_adapter_is_refused(saved, tmp_path, lost):
    tensors = load_file(f"{saved(1)[0]}/adapter_model.safetensors")
    module = next(iter(tensors)).rpartition(".lora_")[0]
    save_file(
        {name: t for name, t in tensors.items() if name != f"{module}.{lost}.weight"},
        tmp_path / "adapter_model.safetensors",
    )
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 8}))
    with pytest.raises(WeightFileError, match=f"no lora_A and lora_B of {module.removeprefix('base_model.model.')}"):
        read_adapter(tmp_path)


@pytest.mark.filterwarnings("ignore:The following alpha_pattern keys did not match")  # "proj", which is no whole name
@pytest.mark.parametrize(
    "options",
    [{}, {"alpha_pattern": {"k_proj|up_proj": 12, "layers.1.self_attn.q_proj": 6, "proj": 3}}, {"use_rslora": True}],
)
def test_scales_are_those_of_peft(saved, options):
    directory, model = saved(1, **options)
    plain = read_adapter(directory)
    names = [name for name in plain if name.endswith("lora_B")]
    assert len(names) > 4
    for name in names:
        module = model.base_model.model.get_submodule(name.removesuffix(".lora_B"))
        weight = module.lora_B["default"].weight
        assert np.allclose(plain[name], (weight * module.scaling["default"]).detach())


def test_a_change_that_cannot_be_published_is_taken_back(saved):
    class Publisher:
        closed, version = False, 3

        def check(self):
            """It has no error."""

        def publish(self):
            raise inflight.InflightError("it cannot")

        def close(self):
            self.closed = True

    class Engine:
        def publisher(self, source, *, check_finite):
            return Publisher()

    updates = Updates(Engine())
    with pytest.raises(inflight.InflightError, match="it cannot"):
        asyncio.run(updates.publish_adapters(lambda files: files.tensors.update({"place-0": {}}), "step-4"))
    assert updates.files.tensors == {}
    assert updates.labels == {}, "another version will have the number"
    updates.close()


@pytest.mark.parametrize("silence", [EngineHungError, EngineBusyError])
def test_a_publisher_that_an_engine_has_ended_by_its_silence_is_replaced(silence):
    """As of an engine that is stopped for a while."""

    class Publisher:
        closed, version, error = False, 3, None

        def check(self):
            if self.error is not None:
                raise self.error

        def publish(self):
            self.check()
            self.version += 1
            return self.version

        def wait_copied(self):
            if len(made) == 1:
                self.error = silence("it lent no slot")
            self.check()

        def close(self):
            self.closed = True

    made = []

    class Engine:
        def publisher(self, source, *, check_finite):
            assert all(publisher.closed for publisher in made)
            made.append(Publisher())
            return made[-1]

        def status(self):
            return SimpleNamespace(version=3)

        def wait_for_version(self, version, *, timeout_s):
            assert version == 4

    updates = Updates(Engine())
    with pytest.raises(silence, match="it lent no slot"):
        asyncio.run(updates.publish_adapters(lambda files: None))
    assert asyncio.run(updates.publish_adapters(lambda files: None)) == 4
    assert len(made) == 2
    updates.close()


def test_an_adapter_is_not_unloaded_while_it_is_replaced():
    """Afterwards its name is free, and its place too."""

    class Slow:
        async def publish_adapters(self, change, label):
            await asyncio.sleep(0.01)
            return 1

    options = SimpleNamespace(adapters=("place-0",), lora_rank=4)
    engine = SimpleNamespace(options=options, info=SimpleNamespace(adapter_layout=()))

    async def replace_and_unload() -> None:
        adapters = Adapters(engine, Slow())
        await adapters.load("a", "/a", in_place=False)
        await asyncio.gather(adapters.load("a", "/b", in_place=True), adapters.unload("a"))
        assert adapters.loaded == {}
        other = await adapters.load("b", "/b", in_place=False)
        adapters.hold(adapters.by_name["b"])
        assert (other.place, adapters.by_name) == ("place-0", {"b": other})

    asyncio.run(replace_and_unload())


def test_a_version_that_is_refused_after_it_was_copied_leaves_no_name():
    class Publisher:
        closed, version = False, 3

        def publish(self):
            self.version += 1
            return self.version

        def check(self):
            """It has no error."""

        def wait_copied(self):
            raise inflight.InflightError("it has NaN")

        def close(self):
            self.closed = True

    class Engine:
        def publisher(self, source, *, check_finite):
            return Publisher()

        def status(self):
            return SimpleNamespace(version=3)

    updates = Updates(Engine())
    with pytest.raises(inflight.InflightError, match="it has NaN"):
        asyncio.run(updates.publish_adapters(lambda files: None, "step-4"))
    assert updates.labels == {}, "the next publisher begins at the engine's version"
    updates.close()


@pytest.mark.slow
def test_clients_draw_with_the_adapter_that_a_trainer_publishes(saved, model_dir):
    _, model = saved(1)
    with inflight.launch(
        model_dir("qwen3"), device="cpu", max_sequences=4, max_context=128, threads=1, lora_rank=4
    ) as engine:
        server = engine.serve(port=0)
        with engine.publisher(model) as publisher:
            engine.wait_for_version(publisher.publish())
            assert difference(draw(server, "default")[1], model) < MOST
            assert load(server, "mine", saved(2, rank=2)[0])[0] == 409
        assert [m["id"] for m in call(server, "GET", "/v1/models")[1]["data"]][1:] == ["default"]


def unload_all(server):
    for card in call(server, "GET", "/v1/models")[1]["data"]:
        if card["parent"] is not None:
            assert call(server, "POST", "/v1/unload_lora_adapter", {"lora_name": card["id"]})[0] == 200
