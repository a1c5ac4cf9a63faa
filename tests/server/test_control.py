"""Weights that change under answers, adapters and pauses, with a model whose tokens proclaim the version that drew
them."""

import asyncio
import copy
import hashlib
import http.client
import threading

import openai
import pytest
import torch
from engine_files import slot_bytes
from http_calls import answered, call
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from tiny_adapters import error
from truth_teller import make_truth_teller, teach
from waiting import wait_until

import inflight
from inflight.integrations.directory import DirectoryTransfer
from inflight.server.adapters import Adapter
from inflight.server.control import resume
from inflight.server.options import ServerOptions
from inflight.server.responses import ApiError
from inflight.server.served import Served
from inflight.weights.tensors import published_tensors


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """An engine over the truth-teller, its server, and a function that saves the checkpoint of a version."""
    root = tmp_path_factory.mktemp("truth")
    model = make_truth_teller()
    model.save_pretrained(root / "0")

    def save(version):
        teach(model, version, before=save.last)
        save.last = version
        model.save_pretrained(root / str(version))
        return str(root / str(version))

    save.last = 0
    save.model = model
    with inflight.launch(
        str(root / "0"), device="cpu", max_sequences=8, max_context=512, threads=1, lora_rank=4, adapters=("place-0",)
    ) as engine:
        yield engine, engine.serve(port=0), save


def proclaimed(choice):
    """The version that each token says it was drawn with, and that which the spans say."""
    spans = [s["version"] for s in choice["weight_versions"] for _ in range(s["start"], s["end"])]
    return [str(i - 1) for i in choice["token_ids"]], spans


def draw(server, num_tokens, **more):
    body = {
        "prompt": [5], "max_tokens": num_tokens, "temperature": 0, "return_token_ids": True,
        "return_weight_versions": True, **more,
    }  # fmt: skip
    status, answer = call(server, "POST", "/v1/completions", body)
    assert status == 200, answer
    return answer["choices"][0]


def test_spans_match_what_tokens_proclaim_while_weights_change_under_load(truth):
    engine, server, save = truth
    choices, stopping = [], threading.Event()

    def ask():
        while not stopping.is_set():
            choices.append(draw(server, 200))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        version = engine.status().version + 1
        status, answer = call(server, "POST", "/update_weights", {"weight_dir": save(version)})
        assert (status, answer["weight_version"]) == (200, str(version)), answer
        assert engine.status().version == version, "the answer comes when the version is live"
    stopping.set()
    for thread in threads:
        thread.join()
    for choice in choices:
        tokens, spans = proclaimed(choice)
        assert tokens == spans
        assert [s["start"] for s in choice["weight_versions"]] == sorted(
            {s["start"] for s in choice["weight_versions"]}
        )
    assert any(len(choice["weight_versions"]) > 1 for choice in choices), "some answer went on with new weights"
    assert engine.status().num_swaps_in_flight > 0


def test_a_stream_goes_on_with_new_weights(truth):
    engine, server, save = truth
    for _ in range(20):  # a stream can end before the update begins
        before = engine.status().version
        body = {"weight_dir": save(before + 1)}
        updated = threading.Thread(target=call, args=(server, "POST", "/update_weights", body))
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            parts = []
            for part in client.completions.create(
                model="", prompt=[5], max_tokens=480, temperature=0, stream=True,
                extra_body={"return_token_ids": True, "return_weight_versions": True},
            ):  # fmt: skip
                if not parts:
                    updated.start()
                parts.append(part.choices[0].to_dict())
            updated.join()
        whole = {
            "token_ids": [i for part in parts for i in part["token_ids"]],
            "weight_versions": parts[-1]["weight_versions"],
        }
        tokens, spans = proclaimed(whole)
        assert len(tokens) == 480
        assert tokens == spans
        if set(spans) == {str(before), str(before + 1)}:
            return
        assert set(spans) == {str(before)}
    raise AssertionError("no update came during a stream")


def test_an_update_in_three_steps_is_live_when_it_is_finished(truth):
    engine, server, save = truth
    version = engine.status().version + 1
    path = save(version)
    call(server, "POST", "/pause?mode=keep")
    assert call(server, "GET", "/is_paused")[1] == {"is_paused": True}
    assert call(server, "POST", "/start_weight_update", {"is_checkpoint_format": True})[0] == 200
    assert call(server, "POST", "/update_weights", {"update_info": {"path": path}})[0] == 200
    assert engine.status().version == version - 1, "nothing goes live before the end"
    status, answer = call(server, "POST", "/finish_weight_update", {"weight_version": "step-7"})
    assert (status, answer["version"], engine.status().version) == (200, version, version)
    call(server, "POST", "/resume")
    assert call(server, "GET", "/is_paused")[1] == {"is_paused": False}
    choice = draw(server, 8)
    assert choice["weight_versions"] == [{"version": "step-7", "start": 0, "end": 8}]
    assert choice["token_ids"] == [version + 1] * 8
    assert call(server, "GET", "/weight_info")[1] == {"weight_version": "step-7", "version": version}
    assert call(server, "POST", "/update_weight_version", {"new_version": "8"})[0] == 200
    assert call(server, "GET", "/weight_info")[1]["weight_version"] == "8"
    assert call(server, "POST", "/reset_prefix_cache")[1] == {"success": True}


def test_an_update_that_nobody_finishes_keeps_no_other_client_from_publishing(truth, tmp_path):
    engine, server, save = truth
    assert call(server, "POST", "/start_weight_update")[0] == 200
    version = engine.status().version + 1
    save(version)
    DirectoryTransfer(server.url, tmp_path).send_weights(published_tensors(save.model).items())
    assert engine.status().version == version
    assert call(server, "POST", "/init_weight_transfer_engine", {"init_info": {"backend": "directory"}})[0] == 200
    assert call(server, "POST", "/finish_weight_update")[0] == 400, "who begins anew begins with nothing noted"
    assert call(server, "POST", "/start_weight_update")[0] == 200
    assert call(server, "POST", "/shutdown_weight_transfer_engine")[0] == 200
    assert call(server, "POST", "/finish_weight_update")[0] == 400


def test_weights_that_do_not_fit_change_nothing(truth, tmp_path):
    engine, server, save = truth
    before = engine.status().version
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    save_file({name: t * float("nan") for name, t in published_tensors(save.model).items()}, tmp_path / "nan")
    for body, status, message in (
        ({"weight_dir": str(tmp_path)}, 422, "cannot be read as safetensors"),
        ({"weight_dir": str(tmp_path / "nothing")}, 422, "neither a directory nor a file"),
        ({"weight_dir": str(tmp_path / "nan")}, 422, "NaN"),
        ({"weight_dir": "relative"}, 422, "absolute"),
        ({}, 400, "weight_dir"),
        ({"update_info": {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]}}, 501, "NCCL"),
    ):
        found, answer = call(server, "POST", "/update_weights", body)
        assert (found, message in answer["error"]["message"]) == (status, True), answer
    assert call(server, "POST", "/finish_weight_update")[0] == 400
    info = {"init_info": {"master_address": "a", "master_port": 1, "rank_offset": 1, "world_size": 2, "packed": True}}
    status, answer = call(server, "POST", "/init_weight_transfer_engine", info)
    assert (status, "NCCL" in answer["error"]["message"]) == (501, True)
    for path in ("/collective_rpc", "/areal_init_weights_update_group", "/areal_update_weights_xccl"):
        status, answer = call(server, "POST", path, {})
        assert (status, "NCCL" in answer["error"]["message"]) == (501, True)
    assert call(server, "POST", "/shutdown_weight_transfer_engine")[0] == 200
    assert engine.status().version == before
    assert draw(server, 3)["token_ids"] == [before + 1] * 3


def test_checksums_tell_which_tensors_an_update_has_changed(truth):
    engine, server, save = truth

    def checker(**body):
        return call(server, "POST", "/weight_checker", body)

    status, first = checker(action="checksum")
    assert (status, first["version"]) == (200, engine.status().version)
    tensors = published_tensors(save.model)
    assert first["checksums"] == {
        name: hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()
        for name, tensor in tensors.items()
    }
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    version = engine.status().version + 1
    assert call(server, "POST", "/update_weights", {"weight_dir": save(version)})[0] == 200
    changed = {name for name, tensor in published_tensors(save.model).items() if not tensor.equal(before[name])}
    assert 0 < len(changed) < len(before)
    second = checker(action="checksum")[1]
    assert second["version"] == version
    assert {name for name, digest in second["checksums"].items() if digest != first["checksums"][name]} == changed
    for body in ({"action": "reset"}, {}):
        status, answer = checker(**body)
        assert (status, "action" in answer["error"]["message"]) == (400, True), answer


def test_a_name_that_comes_with_weights_is_that_of_all_their_tokens(truth):
    engine, server, save = truth
    choices, version = [], engine.status().version + 1
    names = {str(version - 1): call(server, "GET", "/weight_info")[1]["weight_version"], str(version): "step-9"}
    threads = [threading.Thread(target=lambda: choices.append(draw(server, 300))) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: engine.status().num_running == 3)
    refused = {"weight_dir": "/nowhere", "weight_version": "never"}
    assert call(server, "POST", "/update_weights", refused)[0] == 422
    body = {"weight_dir": save(version), "weight_version": "step-9"}
    assert call(server, "POST", "/update_weights", body)[1] == {
        "message": "the weights are live", "weight_version": "step-9", "version": version,
    }  # fmt: skip
    for thread in threads:
        thread.join()
    for choice in choices:
        tokens, spans = proclaimed(choice)
        assert [names[number] for number in tokens] == spans


def test_a_pause_that_aborts_gives_clients_what_was_drawn(truth):
    engine, server, _ = truth
    answers = []
    thread = threading.Thread(target=lambda: answers.append(draw(server, 500)))
    thread.start()
    wait_until(lambda: engine.status().num_running == 1)
    assert call(server, "GET", "/load")[1] == {"server_load": 1}
    assert call(server, "POST", "/pause?mode=abort")[1]["generating"] is False
    thread.join()
    assert answers[0]["finish_reason"] == "abort"
    assert len(answers[0]["token_ids"]) < 500
    assert engine.status().paused
    assert call(server, "POST", "/pause?mode=keep")[1]["generating"] is False
    assert call(server, "POST", "/resume")[0] == 200
    assert not engine.status().paused


def test_a_pause_of_a_paused_engine_does_not_wait_for_requests_that_wait(truth):
    engine, server, _ = truth
    assert call(server, "POST", "/pause?mode=abort")[0] == 200
    answers = []
    later = threading.Thread(target=lambda: answers.append(draw(server, 4)))
    later.start()
    wait_until(lambda: engine.status().num_waiting == 1)
    assert call(server, "POST", "/pause?mode=wait")[0] == 200
    assert not answers
    assert call(server, "POST", "/resume")[0] == 200
    later.join()
    assert answers[0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("query", "body"),
    [
        ("?mode=wait", None),
        ("?wait_for_inflight_requests=true&clear_cache=false", None),
        ("?wait_for_inflight_requests=True&mode=wait", None),
        ("", {"wait_for_inflight_requests": True}),
        ("", {"wait_for_inflight_requests": False, "mode": "wait"}),
    ],
)
def test_a_pause_that_waits_lets_answers_end_and_later_ones_wait(truth, query, body):
    engine, server, _ = truth
    answers = []
    first = threading.Thread(target=lambda: answers.append(draw(server, 200)))
    first.start()
    wait_until(lambda: engine.status().num_running == 1)
    assert call(server, "POST", f"/pause{query}", body)[0] == 200
    first.join(60)
    assert answers[0]["finish_reason"] == "length"
    second = threading.Thread(target=lambda: answers.append(draw(server, 4)))
    second.start()
    wait_until(lambda: engine.status().num_waiting == 1)
    assert call(server, "POST", "/resume")[0] == 200
    second.join(60)
    assert answers[1]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("mode=stop", "mode must be keep, wait or abort"),
        ("mode=abort&wait_for_inflight_requests=true", "wait_for_inflight_requests means mode=wait, got mode=abort"),
        ("wait_for_inflight_requests=perhaps", "Invalid enum value 'perhaps'"),
    ],
)
def test_a_pause_of_another_mode_is_refused(truth, query, message):
    _, server, _ = truth
    status, answer = call(server, "POST", f"/pause?{query}")
    assert (status, message in answer["error"]["message"]) == (400, True), answer
    assert call(server, "GET", "/is_paused")[1] == {"is_paused": False}


def test_resume_ends_a_pause_that_waits(truth):
    engine, server, _ = truth
    answers, pauses = [], []
    engine.pause()  # so that the request does not end before the pause does
    asking = threading.Thread(target=lambda: answers.append(draw(server, 200)))
    asking.start()
    wait_until(lambda: engine.status().num_waiting == 1)
    pausing = threading.Thread(target=lambda: pauses.append(call(server, "POST", "/pause?mode=wait")))
    pausing.start()
    wait_until(lambda: server._served._num_draining)
    assert call(server, "POST", "/resume")[0] == 200
    for thread in (asking, pausing):
        thread.join(60)
    [(status, answer)] = pauses
    assert (status, "was resumed" in answer["error"]["message"]) == (409, True)
    assert answers[0]["finish_reason"] == "length"
    assert call(server, "GET", "/is_paused")[1] == {"is_paused": False}


def test_resume_during_the_end_of_a_pause_has_the_last_word(truth, monkeypatch):
    engine, _, _ = truth
    pauses, is_pausing, may_pause = engine.pause, threading.Event(), threading.Event()

    def pause():
        is_pausing.set()
        may_pause.wait(60)
        pauses()

    monkeypatch.setattr(engine, "pause", pause)

    async def pause_and_resume():
        served = Served(engine, ServerOptions())
        pausing = asyncio.ensure_future(served.drain())
        assert await asyncio.to_thread(is_pausing.wait, 60)
        resuming = asyncio.ensure_future(resume(served, None))
        await asyncio.wait([resuming], timeout=0.5)  # It waits for the pause.
        may_pause.set()
        await asyncio.wait_for(asyncio.gather(pausing, resuming), 60)
        assert not served.paused

    asyncio.run(pause_and_resume())
    assert not engine.status().paused


def test_a_pause_that_waits_ends_with_its_client(truth):
    engine, server, _ = truth
    answers = []
    engine.pause()
    asking = threading.Thread(target=lambda: answers.append(draw(server, 200)))
    asking.start()
    wait_until(lambda: engine.status().num_waiting == 1)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", "/pause?mode=wait")
    wait_until(lambda: server._served._num_draining)
    connection.close()
    wait_until(lambda: not server._served._num_draining)
    engine.resume()
    asking.join(60)
    assert answers[0]["finish_reason"] == "length"
    assert call(server, "GET", "/is_paused")[1] == {"is_paused": False}


def test_a_request_that_a_pause_keeps_waiting_holds_the_place_of_its_adapter(truth):
    engine, _, _ = truth

    async def wait_and_leave():
        served, adapter = Served(engine, ServerOptions()), Adapter("a", "", "place-0")
        served.adapters.loaded["a"] = served.adapters._taken["place-0"] = adapter
        served._num_draining = 1
        waiting = asyncio.ensure_future(served.begin([[5]], inflight.SamplingParams(), adapter, request_id="1"))
        await asyncio.sleep(0)
        await served.adapters.unload("a")
        with pytest.raises(ApiError, match="all 1 places for adapters are taken, by a"):
            served.adapters._free_place()
        waiting.cancel()
        await asyncio.wait([waiting])
        assert served.adapters._free_place() == "place-0"
        with pytest.raises(ApiError, match="'a' is not loaded"):
            await served.begin([[5]], inflight.SamplingParams(), adapter, request_id="2")

    asyncio.run(wait_and_leave())


@pytest.mark.parametrize("request_ids", [None, ["late"]])
def test_a_request_that_waits_for_a_pause_is_counted_and_aborted(truth, request_ids):
    engine, server, _ = truth
    answers: dict[str, dict] = {}

    def ask(name):
        answers[name] = draw(server, 480, request_id=name, ignore_eos=True)

    engine.pause()
    first = threading.Thread(target=ask, args=("first",))
    first.start()
    wait_until(lambda: engine.status().num_waiting == 1)
    pausing = threading.Thread(target=call, args=(server, "POST", "/pause?mode=wait"))
    pausing.start()
    wait_until(lambda: server._served._num_draining)
    late = threading.Thread(target=ask, args=("late",))
    late.start()
    wait_until(lambda: call(server, "GET", "/load")[1]["server_load"] == 2)
    aborted = call(server, "POST", "/abort_requests", {"request_ids": request_ids} if request_ids else {})[1]
    assert aborted["num_aborted"] == (1 if request_ids else 2)
    late.join(60)
    assert (answers["late"]["finish_reason"], answers["late"]["token_ids"]) == ("abort", [])
    engine.resume()
    for thread in (first, pausing):
        thread.join(60)
    assert answers["first"]["finish_reason"] == ("length" if request_ids else "abort")
    assert call(server, "POST", "/resume")[0] == 200


def test_requests_are_aborted_by_their_ids(truth):
    engine, server, _ = truth
    answers = {}

    def ask(name):
        answers[name] = draw(server, 250, request_id=name)

    long = "a" * 140
    threads = [threading.Thread(target=ask, args=(name,)) for name in (long, "b")]
    for thread in threads:
        thread.start()
    wait_until(lambda: engine.status().num_running == 2)
    # The engine can have the request before the server lists it.
    body = {"request_ids": [long, "other"]}
    wait_until(lambda: call(server, "POST", "/abort_requests", body)[1]["num_aborted"] == 1)
    for thread in threads:
        thread.join()
    assert {name: choice["finish_reason"] for name, choice in answers.items()} == {long: "abort", "b": "length"}


def test_sleep_and_wake(truth):
    """The server's publisher is closed for the sleep, and the next update makes another one."""
    engine, server, save = truth
    call(server, "POST", "/update_weights", {"weight_dir": save(engine.status().version + 1)})
    assert call(server, "POST", "/sleep?level=1")[0] == 200
    assert call(server, "GET", "/is_sleeping")[1] == {"is_sleeping": True}
    wait_until(lambda: 0 in slot_bytes(engine.pid))
    version = engine.status().version + 1
    assert call(server, "POST", "/update_weights", {"weight_dir": save(version)})[0] == 200
    assert 0 not in slot_bytes(engine.pid)
    assert call(server, "POST", "/wake_up?tags=weights&tags=kv_cache")[0] == 200
    choice = draw(server, 3)
    assert choice["finish_reason"] == "length"
    assert set(proclaimed(choice)[0]) == set(proclaimed(choice)[1]) == {str(version)}


def test_an_adapter_is_drawn_with_by_its_name(truth, tmp_path):
    """The last of these tests on this engine: versions count adapters, too, and tokens proclaim the weights'."""
    engine, server, save = truth
    call(server, "POST", "/update_weights", {"weight_dir": save(engine.status().version + 1)})
    torch.manual_seed(0)
    model = get_peft_model(copy.deepcopy(save.model), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path)
    body = {"lora_name": "a", "lora_path": str(tmp_path), "weight_version": "with adapter"}
    before = call(server, "POST", "/weight_checker", {"action": "checksum"})[1]
    assert call(server, "POST", "/v1/load_lora_adapter", body)[0] == 200
    after = call(server, "POST", "/weight_checker", {"action": "checksum"})[1]
    assert after["checksums"] == before["checksums"], "versions of adapters are none of the weights"
    assert {span["version"] for span in draw(server, 5, model="a")["weight_versions"]} == {"with adapter"}
    for name, adapter in (("a", "default"), ("", None)):
        rollout = answered([5], draw(server, 20, model=name, temperature=1.0, logprobs=0))
        assert error(model, rollout, adapter) < 2e-4
        assert name == "" or error(model, rollout, None) > 0.05
    assert call(server, "POST", "/v1/unload_lora_adapter", {"lora_name": "a"})[0] == 200
    status, answer = call(server, "POST", "/v1/completions", {"model": "a", "prompt": [5]})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


@pytest.mark.slow
def test_a_trainer_that_publishes_keeps_its_place(truth):
    """The server beside a run that trains: its clients' updates are refused, and the trainer's go on."""
    _, _, save = truth
    with inflight.launch(save(save.last + 1), device="cpu", max_sequences=4, max_context=128, threads=1) as other:
        server, model = other.serve(port=0), make_truth_teller()
        with other.publisher(model) as publisher:
            status, answer = call(server, "POST", "/update_weights", {"weight_dir": save(save.last + 1)})
            assert (status, "another publisher" in answer["error"]["message"]) == (409, True)
            teach(model, 1, before=0)
            other.wait_for_version(publisher.publish())
            assert draw(server, 2)["token_ids"] == [2, 2]
            other.submit([[5]], inflight.SamplingParams(max_tokens=2))
            assert draw(server, 2)["token_ids"] == [2, 2]
            assert [len(group) for group in other.stream.groups()] == [1], "only what was submitted for training"
