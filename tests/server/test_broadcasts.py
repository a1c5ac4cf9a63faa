"""Weights that a trainer sends to a server as it sends them to vLLM's, over a stand-in for NCCL, with a model whose
tokens proclaim the version that drew them."""

import copy
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

import nccl_trainer
import pytest
import torch
from http_calls import call
from nccl_trainer import NcclTrainer, announced
from truth_teller import make_truth_teller, teach
from waiting import wait_until

import inflight
from inflight.server import broadcasts
from inflight.server.nccl_protocol import NcclGroup
from inflight.weights import nccl
from inflight.weights.tensors import published_tensors

BUFFER = 200_000
_BOUND_S = 60.0


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """An engine over the truth-teller, its server, and the model of the trainer."""
    root = tmp_path_factory.mktemp("truth")
    model = make_truth_teller()
    model.save_pretrained(root)
    with inflight.launch(str(root), device="cpu", max_sequences=8, max_context=512, threads=1) as engine:
        yield engine, engine.serve(port=0), model


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    return nccl_trainer.build(tmp_path_factory.mktemp("nccl"))


@pytest.fixture(autouse=True)
def _with_stand_in(stand_in, monkeypatch):
    monkeypatch.setenv(nccl.VARIABLE, stand_in)
    monkeypatch.setattr(broadcasts, "_MEETING_S", _BOUND_S)


@pytest.fixture
def beside():
    """Calls beside the test."""
    with ThreadPoolExecutor(8) as pool:
        yield pool.submit


def meeting(trainer, **more):
    info = {"master_address": "127.0.0.1", "master_port": trainer.port, "rank_offset": 1, "world_size": 2, **more}
    return {"init_info": info}


def meet(server, stand_in, beside, **more):
    trainer = NcclTrainer(stand_in)
    joined = beside(lambda: (trainer.leave_id(), trainer.join()))
    asked = beside(call, server, "POST", "/init_weight_transfer_engine", meeting(trainer, **more))
    wait([joined, asked], 2 * _BOUND_S, FIRST_EXCEPTION)
    joined.result(0)
    status, answer = asked.result(0)
    assert (status, answer.get("message")) == (200, "the trainer was met; weights come by NCCL"), answer
    return trainer


def send(server, trainer, tensors, packed_bytes, beside):
    """One /update_weights, and the broadcast beside it."""
    sent = beside(trainer.send, tensors, packed_bytes)
    answer = call(server, "POST", "/update_weights", {"update_info": announced(tensors)})
    sent.result(_BOUND_S)
    return answer


def taught(model, version, *, dtype=None):
    """Names and tensors of a checkpoint of this version."""
    teach(model, version)
    return [(name, tensor.to(dtype or tensor.dtype)) for name, tensor in published_tensors(model).items()]


def draw(server, num_tokens):
    body = {
        "prompt": [5], "max_tokens": num_tokens, "temperature": 0, "return_token_ids": True,
        "return_weight_versions": True,
    }  # fmt: skip
    status, answer = call(server, "POST", "/v1/completions", body)
    assert status == 200, answer
    choice = answer["choices"][0]
    spans = [s["version"] for s in choice["weight_versions"] for _ in range(s["start"], s["end"])]
    return [str(token - 1) for token in choice["token_ids"]], spans


@pytest.mark.medium
@pytest.mark.parametrize("dtype", [None, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("packed", [True, False])
def test_versions_arrive_while_answers_are_drawn_and_every_token_tells_its_own(truth, stand_in, beside, packed, dtype):
    engine, server, model = truth
    more = {"packed": packed, "packed_buffer_size_bytes": BUFFER}
    trainer = meet(server, stand_in, beside, **more)
    answers, stopping = [], threading.Event()

    def ask():
        while not stopping.is_set():
            answers.append(draw(server, 150))

    asking = [beside(ask) for _ in range(3)]
    swaps_before = engine.status().num_swaps_in_flight
    try:
        for _ in range(4):
            version = engine.status().version + 1
            assert call(server, "POST", "/start_weight_update", {"is_checkpoint_format": True})[0] == 200
            tensors = taught(model, version, dtype=dtype)
            status, answer = send(server, trainer, tensors, BUFFER if packed else None, beside)
            assert status == 200, answer
            assert engine.status().version == version - 1, "it is published when the update is finished"
            status, answer = call(server, "POST", "/finish_weight_update", {"weight_version": f"step-{version}"})
            assert (status, answer["version"], answer["weight_version"]) == (200, version, f"step-{version}")
            assert engine.status().version == version
            assert set(draw(server, 3)[0]) == {str(version)}
    finally:
        stopping.set()
    for done in asking:
        done.result(_BOUND_S)
    for tokens, spans in answers:
        assert tokens == [span.removeprefix("step-") for span in spans]
    assert engine.status().num_swaps_in_flight > swaps_before
    assert call(server, "POST", "/shutdown_weight_transfer_engine")[0] == 200
    trainer.close()


def test_tensors_of_several_calls_are_one_version(truth, stand_in, beside):
    engine, server, model = truth
    trainer = meet(server, stand_in, beside, packed=True)
    version = engine.status().version + 1
    call(server, "POST", "/start_weight_update", {})
    tensors = taught(model, version)
    for begin in range(0, len(tensors), 5):
        status, answer = send(server, trainer, tensors[begin : begin + 5], 1 << 30, beside)
        assert status == 200, answer
        assert engine.status().version == version - 1
    status, answer = call(server, "POST", "/finish_weight_update")
    assert (status, answer["weight_version"]) == (200, str(version))
    assert set(draw(server, 3)[0]) == {str(version)}
    trainer.close()


def wrong(tensors):
    """Versions that do not fit, and what is said of them."""
    name, tensor = tensors[3]
    yield "shape", [*tensors[:3], (name, torch.zeros(3, 5)), *tensors[4:]], 422, name
    yield "missing", tensors[:-1], 422, tensors[-1][0]
    yield "unknown", [*tensors, ("model.layers.0.nothing", torch.zeros(2))], 422, "model.layers.0.nothing"
    yield "first unknown", [("model.layers.0.nothing", torch.zeros(2)), *tensors], 422, "model.layers.0.nothing"
    yield "not finite", [*tensors[:3], (name, torch.full_like(tensor, float("nan"))), *tensors[4:]], 422, name


@pytest.mark.parametrize("case", range(5))
@pytest.mark.parametrize("num_calls", [1, 3])
def test_what_does_not_fit_is_refused_and_the_trainer_may_go_on(truth, stand_in, beside, case, num_calls):
    """It sends what it has announced whatever becomes of it; all of it is taken, and the next update is a new one."""
    engine, server, model = truth
    trainer = meet(server, stand_in, beside, packed=True, packed_buffer_size_bytes=BUFFER)
    before = engine.status().version
    good = taught(model, before + 1)
    _, bad, status, named = list(wrong(good))[case]
    call(server, "POST", "/start_weight_update", {})
    size = -(-len(bad) // num_calls)
    said = [send(server, trainer, bad[begin : begin + size], BUFFER, beside) for begin in range(0, len(bad), size)]
    found, answer = call(server, "POST", "/finish_weight_update")
    assert (found, named in answer["error"]["message"]) == (status, True), answer
    assert all(code in (200, status) for code, _ in said), said
    assert engine.status().version == before
    assert set(draw(server, 3)[0]) == {str(before)}

    call(server, "POST", "/start_weight_update", {})
    assert send(server, trainer, good, BUFFER, beside)[0] == 200
    assert call(server, "POST", "/finish_weight_update")[1]["weight_version"] == str(before + 1)
    assert set(draw(server, 3)[0]) == {str(before + 1)}
    trainer.close()


def test_an_update_that_was_begun_and_not_finished_is_forgotten(truth, stand_in, beside):
    engine, server, model = truth
    before = engine.status().version
    trainer = meet(server, stand_in, beside, packed=True)
    call(server, "POST", "/start_weight_update", {})
    assert send(server, trainer, taught(model, before + 7)[:4], 1 << 30, beside)[0] == 200
    call(server, "POST", "/start_weight_update", {})  # the trainer begins again
    assert send(server, trainer, taught(model, before + 1), 1 << 30, beside)[0] == 200
    assert call(server, "POST", "/finish_weight_update")[1]["weight_version"] == str(before + 1)
    assert set(draw(server, 3)[0]) == {str(before + 1)}
    call(server, "POST", "/start_weight_update", {})
    assert send(server, trainer, taught(model, before + 7)[:4], 1 << 30, beside)[0] == 200
    trainer.close()
    again = meet(server, stand_in, beside, packed=True)  # it was started anew
    assert call(server, "POST", "/finish_weight_update")[0] == 400
    call(server, "POST", "/start_weight_update", {})
    assert send(server, again, taught(model, before + 2), 1 << 30, beside)[0] == 200
    assert call(server, "POST", "/finish_weight_update")[1]["weight_version"] == str(before + 2)
    assert set(draw(server, 3)[0]) == {str(before + 2)}
    again.close()


@pytest.mark.medium
def test_a_trainer_that_is_killed_while_it_sends_leaves_the_old_version_and_the_next_one_is_met(
    truth, stand_in, beside
):
    engine, server, model = truth
    before = engine.status().version
    listening = nccl_trainer.listening_socket()
    port, number = listening.getsockname()[1], listening.fileno()
    command = [sys.executable, nccl_trainer.__file__, stand_in, str(number)]
    with listening, subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=[number]) as process:
        info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, "packed": True}
        assert call(server, "POST", "/init_weight_transfer_engine", {"init_info": info})[0] == 200
        call(server, "POST", "/start_weight_update", {})
        tensors = taught(model, before + 1)
        asked = beside(call, server, "POST", "/update_weights", {"update_info": announced(tensors)})
        time.sleep(0.3)
        assert set(draw(server, 3)[0]) == {str(before)}, "it goes on while a trainer is waited for"
        process.kill()
    status, answer = asked.result(_BOUND_S)
    assert (status, "remote process exited" in answer["error"]["message"]) == (424, True), answer
    status, answer = call(server, "POST", "/update_weights", {"update_info": announced(tensors)})
    assert (status, "meet again" in answer["error"]["message"]) == (424, True), answer
    assert call(server, "POST", "/finish_weight_update")[0] == 424
    trainer = meet(server, stand_in, beside, packed=True)
    call(server, "POST", "/start_weight_update", {})
    assert send(server, trainer, tensors, 1 << 30, beside)[0] == 200
    assert call(server, "POST", "/finish_weight_update")[1]["weight_version"] == str(before + 1)
    trainer.close()


@pytest.mark.medium
def test_a_trainer_that_never_comes_is_told_of_and_one_that_comes_meanwhile_is_met(
    truth, stand_in, beside, monkeypatch
):
    _, server, _ = truth
    monkeypatch.setattr(broadcasts, "_MEETING_S", 3.0)
    absent, met = NcclTrainer(stand_in), server._served.broadcasts._num_met
    asked = beside(call, server, "POST", "/init_weight_transfer_engine", meeting(absent, packed=True))
    wait_until(lambda: server._served.broadcasts._num_met > met)
    trainer = meet(server, stand_in, beside, packed=True)
    status, answer = asked.result(_BOUND_S)
    assert (status, "the trainer's store" in answer["error"]["message"]) == (424, True), answer
    assert call(server, "POST", "/start_weight_update", {})[0] == 200
    trainer.close()
    absent.close()


def test_mistakes_are_named(truth, stand_in, beside):
    engine, server, model = truth
    before = engine.status().version
    call(server, "POST", "/shutdown_weight_transfer_engine")
    tensors = taught(model, before + 1)
    update = {"update_info": announced(tensors)}
    info = call(server, "GET", "/server_info")[1]["vllm_config"]
    assert info["weight_transfer_config"] == {"backend": "nccl"}, "so that TRL tries"
    status, answer = call(server, "POST", "/update_weights", update)
    assert (status, "no trainer was met" in answer["error"]["message"]) == (501, True)
    for info, message in (
        ({"rank_offset": 1}, "world_size"),
        ({"rank_offset": 0, "world_size": 2, "master_address": "127.0.0.1", "master_port": 5}, "rank_offset"),
        ({"rank_offset": 1, "world_size": 2, "master_address": "127.0.0.1"}, "master_port"),
        ({"rank_offset": 1, "world_size": 2, "nccl_unique_id_b64": "AAAA"}, "128 bytes"),
        ({"rank_offset": 1, "world_size": "two"}, "world_size"),
    ):
        status, answer = call(server, "POST", "/init_weight_transfer_engine", {"init_info": info})
        assert (status, message in answer["error"]["message"]) == (400, True), answer
    trainer = meet(server, stand_in, beside, packed=True)
    status, answer = call(server, "POST", "/update_weights", update)
    assert (status, "start_weight_update" in answer["error"]["message"]) == (400, True), answer
    for change, message in (
        ({"names": ["a"]}, "one of each"),
        ({"dtype_names": ["float31"] * len(tensors)}, "float31"),
        ({"shapes": [[1 << 40]] * len(tensors)}, "larger than all"),
        ({"shapes": [[0, 1 << 62, 1 << 62]] * len(tensors)}, "larger than all"),
        ({"shapes": [[1 << 20, 3]] * len(tensors)}, "far smaller"),
        ({"names": None}, "names"),
    ):
        trainer.close()
        trainer = meet(server, stand_in, beside, packed=True)
        call(server, "POST", "/start_weight_update", {})
        body = {"update_info": {**copy.deepcopy(update["update_info"]), **change}}
        status, answer = call(server, "POST", "/update_weights", body)
        assert (status, message in answer["error"]["message"]) == (400, True), answer
        status, answer = call(server, "POST", "/finish_weight_update", {"weight_version": "a name"})
        assert (status, "was not taken" in answer["error"]["message"]) == (424, True), answer
        assert call(server, "GET", "/weight_info")[1]["weight_version"] == str(before)
    assert engine.status().version == before
    trainer.close()


@pytest.mark.parametrize("has_begun", [True, False])
def test_what_was_announced_and_refused_is_never_read_as_the_next_version(truth, stand_in, beside, has_begun):
    """The trainer sends it all the same; whoever read on would give the old tensors to the new version."""
    engine, server, model = truth
    before = engine.status().version
    trainer = meet(server, stand_in, beside, packed=False)
    old = taught(model, before + 7)
    update = announced(old)
    if has_begun:
        call(server, "POST", "/start_weight_update", {})
        update["dtype_names"][0] = "float31"
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(trainer.send, [(name, tensor.clone()) for name, tensor in old], None)
        assert call(server, "POST", "/update_weights", {"update_info": update})[0] == 400
        call(server, "POST", "/start_weight_update", {})
        new = taught(model, before + 1)
        status, answer = call(server, "POST", "/update_weights", {"update_info": announced(new)})
        assert (status, "meet again" in answer["error"]["message"]) == (424, True), answer
        assert "the stand-in failed" in str(sent.exception(_BOUND_S)), "the trainer is told, too"
    trainer.close()
    assert call(server, "POST", "/finish_weight_update")[0] == 424
    assert engine.status().version == before
    trainer = meet(server, stand_in, beside, packed=False)
    call(server, "POST", "/start_weight_update", {})
    assert send(server, trainer, new, None, beside)[0] == 200
    assert call(server, "POST", "/finish_weight_update")[1]["weight_version"] == str(before + 1)
    assert set(draw(server, 3)[0]) == {str(before + 1)}
    trainer.close()


def test_memory_that_runs_out_while_tensors_come_leaves_the_group(truth, stand_in, beside, monkeypatch):
    engine, server, model = truth
    before = engine.status().version
    trainer = meet(server, stand_in, beside, packed=False)
    call(server, "POST", "/start_weight_update", {})
    receive, num_received = NcclGroup._receive, iter(range(100))

    def receive_some(group, tensor):
        if next(num_received) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        receive(group, tensor)

    monkeypatch.setattr(NcclGroup, "_receive", receive_some)
    tensors = taught(model, before + 1)
    beside(trainer.send, tensors, None)
    status, answer = call(server, "POST", "/update_weights", {"update_info": announced(tensors)})
    assert (status, "its log says why" in answer["error"]["message"]) == (424, True), answer
    assert call(server, "POST", "/finish_weight_update")[0] == 424
    call(server, "POST", "/start_weight_update", {})
    status, answer = call(server, "POST", "/update_weights", {"update_info": announced(tensors)})
    assert (status, "meet again" in answer["error"]["message"]) == (424, True), answer
    assert engine.status().version == before
    trainer.close()


@pytest.mark.medium
def test_a_store_that_listens_and_says_nothing_is_left_after_the_bound(truth, monkeypatch):
    _, server, _ = truth
    monkeypatch.setattr(broadcasts, "_MEETING_S", 1.0)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        info = {
            "master_address": "127.0.0.1", "master_port": silent.getsockname()[1], "rank_offset": 1, "world_size": 2,
        }  # fmt: skip
        status, answer = call(server, "POST", "/init_weight_transfer_engine", {"init_info": info})
    assert (status, "did not answer within 3 s" in answer["error"]["message"]) == (424, True), answer


def test_what_is_refused_at_once_is_taken_to_its_end(truth, stand_in, beside, tmp_path):
    """The engine follows another publisher; the trainer sends all the same, and would wait for ever otherwise."""
    engine, first, model = truth
    version = engine.status().version + 1
    teach(model, version)
    model.save_pretrained(tmp_path)
    assert call(first, "POST", "/update_weights", {"weight_dir": str(tmp_path)})[0] == 200
    with engine.serve(port=0) as server:
        trainer = meet(server, stand_in, beside, packed=True, packed_buffer_size_bytes=BUFFER)
        for tensors in (taught(model, version + 1), taught(model, version + 1)[4:9], taught(model, version + 1)):
            call(server, "POST", "/start_weight_update", {})
            for _ in range(2):
                assert send(server, trainer, tensors, BUFFER, beside)[0] == 409
            assert call(server, "POST", "/finish_weight_update")[0] == 409
        trainer.close()
    assert engine.status().version == version
    teach(model, version)


@pytest.mark.medium
def test_a_server_ends_while_it_waits_for_a_trainer(stand_in, beside, tmp_path):
    model = make_truth_teller()
    model.save_pretrained(tmp_path)
    with inflight.launch(str(tmp_path), device="cpu", max_sequences=8, max_context=512, threads=1) as engine:
        server = engine.serve(port=0)
        trainer = meet(server, stand_in, beside, packed=True)
        call(server, "POST", "/start_weight_update", {})
        asked = beside(call, server, "POST", "/update_weights", {"update_info": announced(taught(model, 1))})
        time.sleep(0.5)
        assert not asked.done()
        beside(server.close).result(_BOUND_S)  # the trainer might not come for minutes
        assert asked.exception(_BOUND_S) is not None or asked.result()[0] >= 500
        assert engine.status().version == 0
        trainer.close()
