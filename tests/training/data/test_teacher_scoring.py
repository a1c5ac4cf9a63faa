"""A teacher outside of the trainer: an engine, our server, a server with vLLM's answers, and what goes wrong."""

import asyncio
import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count

import numpy as np
import pytest
import torch
from made_batches import make_rollouts, next_token_kl
from tiny_models import VOCABULARY, make_model

import inflight
from inflight.core.errors import ScoreError, TeacherError, VocabularyError
from inflight.core.rollout import Turn
from inflight.core.sampling import SamplingParams
from inflight.training.data import teacher_scoring
from inflight.training.data.batch import pack
from inflight.training.data.rewards import Rewards
from inflight.training.data.scoring import GroupScorer
from inflight.training.data.teacher_scoring import Teacher, TeacherScorer, TeacherScores
from inflight.training.grpo import GRPOConfig, grpo
from inflight.training.objective.distillation import LOGPROBS, TOP_IDS, TOP_LOGPROBS
from inflight.training.objective.objective import Objective
from inflight.training.schedules import Example
from inflight.training.teacher import with_teacher

PARAMS = SamplingParams(n=2, max_tokens=12)


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(teacher_scoring, "_PAUSE_S", 0.0)


@pytest.fixture(scope="module")
def teacher_engine(tmp_path_factory) -> Iterator[inflight.Engine]:
    directory = tmp_path_factory.mktemp("teacher")
    make_model("qwen3", seed=1).save_pretrained(directory)
    with inflight.launch(str(directory), device="cpu", threads=1, max_sequences=16, max_context=64) as engine:
        yield engine


def plain_rollouts(number: int = 6):
    rollouts = make_rollouts(number)
    for rollout in rollouts:
        rollout.params = PARAMS
    return rollouts


def rewards_of(scorer, rollouts):
    try:
        return scorer.start(rollouts).result(60)
    finally:
        scorer.close()


def check_columns(rollouts, top_k):
    """The columns are the scores of the module that the teacher was saved from."""
    taught = with_teacher(make_model("qwen3", seed=1), pack(rollouts, [0.0] * len(rollouts)), top_k=top_k)
    ours = pack(rollouts, [0.0] * len(rollouts)).columns
    for name in (LOGPROBS, TOP_LOGPROBS) if top_k else (LOGPROBS,):
        torch.testing.assert_close(ours[name], taught.columns[name], rtol=1e-4, atol=1e-4)
    if top_k:
        assert (ours[TOP_IDS] == taught.columns[TOP_IDS]).float().mean() > 0.99


# ---- a server of others --------------------------------------------------------------------------------------------


class VLLM:
    """A server with the answers of vLLM's /v1/completions for `prompt_logprobs`, in front of a module."""

    def __init__(self, *, failing: int = 0, text_of=str, lacks: bool = False, k_at_most: int = 20, context: int = 64):
        self.model, self.failing, self.text_of, self.lacks = make_model("qwen3", seed=1), failing, text_of, lacks
        self.k_at_most, self.requests, self.url, self.lock = k_at_most, [], "", threading.Lock()
        self.context = context

    def answer(self, path, fields):
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": "org/teacher", "object": "model"}]}
        assert path == "/v1/completions"
        with self.lock:
            self.requests.append(fields)
            if self.failing:
                self.failing -= 1
                return 503, {"error": {"message": "busy"}}
        ids, k = fields["prompt"], fields["prompt_logprobs"]
        if max(ids) >= VOCABULARY:
            return 400, {"error": {"message": f"token id {max(ids)} is out of vocabulary", "code": 400}}
        if len(ids) >= self.context:
            message = f"This model's maximum context length is {self.context} tokens"
            return 400, {"error": {"message": message, "code": 400}}
        with torch.no_grad():
            logs = self.model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        rows = [None]
        for token, row in zip(ids[1:], logs, strict=False):
            ranks = row.argsort(descending=True).tolist()
            kept = [token, *(i for i in ranks[: min(k, self.k_at_most)] if i != token)]
            rows.append(
                {
                    str(i): {"logprob": row[i].item(), "rank": ranks.index(i) + 1, "decoded_token": self.text_of(i)}
                    for i in kept
                }
            )
        choice = {"index": 0, "text": "x", "logprobs": None, "finish_reason": "length", "stop_reason": None}
        scores = {} if self.lacks else {"prompt_logprobs": rows}
        return 200, {"id": "cmpl-1", "object": "text_completion", "choices": [choice | scores], "usage": {}}


class Server(ThreadingHTTPServer):
    request_queue_size = 256


@contextmanager
def serving(vllm: VLLM) -> Iterator[VLLM]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply(None)

        def do_POST(self):
            self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def reply(self, fields):
            status, body = vllm.answer(self.path, fields)
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            """Be silent."""

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    vllm.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield vllm
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


# ---- scores --------------------------------------------------------------------------------------------------------


@pytest.mark.medium
@pytest.mark.parametrize("top_k", [0, 5])
def test_an_engine_scores_the_tokens_of_rollouts_next_to_rewards(teacher_engine, top_k):
    rollouts = plain_rollouts()
    assert rewards_of(TeacherScorer(teacher_engine, lambda r: float(r.request_id), top_k=top_k), rollouts) == [
        0, 1, 2, 3, 4, 5
    ]  # fmt: skip
    check_columns(rollouts, top_k)


@pytest.mark.medium
@pytest.mark.parametrize("top_k", [0, 5])
def test_our_server_is_a_teacher(teacher_engine, top_k):
    server = teacher_engine.serve(port=0, served_model_name="teacher")
    try:
        rollouts = plain_rollouts()
        assert rewards_of(TeacherScorer(f"{server.url}/v1", top_k=top_k), rollouts) == [0.0] * 6
        check_columns(rollouts, top_k)
        scorer = TeacherScorer(server.url)
        scorer.check(None, VOCABULARY, PARAMS)
        with pytest.raises(VocabularyError, match=r"did not score tokens of the policy's vocabulary.*token id 999"):
            scorer.check(None, 1000, PARAMS)
    finally:
        server.close()


@pytest.mark.parametrize("top_k", [0, 5])
def test_a_server_with_the_answers_of_vllm_is_a_teacher(top_k):
    rollouts = plain_rollouts()
    with serving(VLLM()) as vllm:
        assert rewards_of(TeacherScorer(vllm.url, top_k=top_k), rollouts) == [0.0] * 6
    check_columns(rollouts, top_k)
    one = vllm.requests[0]
    assert (one["model"], one["max_tokens"], one["prompt_logprobs"]) == ("org/teacher", 1, top_k)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_function_is_a_teacher_and_rewards_have_parts(is_async):
    def plain(rollouts, top_k):
        ids = [np.tile(np.arange(top_k), (len(r.token_ids), 1)) for r in rollouts]
        return [TeacherScores(-r.token_ids / 7, of_one, -1.0 - of_one) for r, of_one in zip(rollouts, ids, strict=True)]

    async def later(rollouts, top_k):
        await asyncio.sleep(0)
        return plain(rollouts, top_k)

    rollouts = plain_rollouts(2)
    score = Rewards({"a": lambda rollout: 1.0, "b": lambda rollout: 2.0})
    assert rewards_of(TeacherScorer(later if is_async else plain, score, top_k=3), rollouts) == [3.0, 3.0]
    assert rollouts[0].rewards == {"a": 1.0, "b": 2.0}
    for rollout in rollouts:
        np.testing.assert_allclose(rollout.columns[LOGPROBS], -rollout.token_ids / 7, rtol=1e-6)
        assert rollout.columns[TOP_IDS].dtype == np.int32
    score.close()


def test_episodes_keep_their_rewards():
    rollouts = plain_rollouts(2)
    for rollout, reward in zip(rollouts, (0.25, None), strict=True):
        rollout.turns, rollout.reward = (Turn(0, len(rollout.token_ids), True, began_ns=1),), reward
    scorer = TeacherScorer(lambda given, k: [TeacherScores(-1.0 * r.token_ids) for r in given], lambda rollout: 9.0)
    assert all(map(scorer.wants, rollouts))
    assert rewards_of(scorer, rollouts) == [0.25, 0.0]
    assert all(LOGPROBS in rollout.columns for rollout in rollouts)


class Nines(list):
    """A score function that is false, since it is an empty list."""

    def __call__(self, rollout):
        return 9.0


class OwnScorer(GroupScorer):
    def start(self, group, *, prepare=lambda group: None):
        raise AssertionError("a group of episodes has rewards")

    def close(self):
        pass


def test_a_score_is_not_called_for_a_group_of_episodes_and_can_be_a_false_object():
    rollouts = plain_rollouts(2)
    teacher = lambda given, k: [TeacherScores(-1.0 * r.token_ids) for r in given]  # noqa: E731
    assert rewards_of(TeacherScorer(teacher, Nines()), rollouts) == [9.0, 9.0]
    for rollout in rollouts:
        rollout.turns, rollout.reward = (Turn(0, len(rollout.token_ids), True, began_ns=1),), 0.25
    assert rewards_of(TeacherScorer(teacher, OwnScorer()), rollouts) == [0.25, 0.25]


def test_rewards_of_turns_that_the_score_sets_are_the_rewards_without_a_teacher():
    def steps(rollout):
        if rollout.request_id == 1:
            return 0.1
        rollout.turns = (Turn(0, 1, True, 0.25), Turn(1, len(rollout.token_ids), True, 0.5 + rollout.request_id))
        return rollout.request_id + 0.75

    teacher = lambda given, k: [TeacherScores(-1.0 * r.token_ids) for r in given]  # noqa: E731
    rollouts = plain_rollouts(3)
    for _ in range(2):  # Their turns are set when they are scored again.
        assert rewards_of(TeacherScorer(teacher, steps), rollouts) == [0.75, 0.1, 2.75]
    assert [len(rollout.turns) for rollout in rollouts] == [2, 0, 2]


# ---- failures ------------------------------------------------------------------------------------------------------


def test_a_server_that_is_busy_is_asked_again_and_one_that_stays_busy_leaves_no_reward():
    rollouts = plain_rollouts(1)
    with serving(VLLM(failing=2)) as vllm:
        scorer = TeacherScorer(Teacher(vllm.url, retries=2))
        assert rewards_of(scorer, rollouts) == [0.0]
        assert scorer.failures == {"retries: UnavailableTeacherError": 2}
        assert scorer.last_error is None
        vllm.failing = 9
        scorer = TeacherScorer(Teacher(vllm.url, retries=1))
        assert rewards_of(scorer, rollouts) == [None]
        assert scorer.failures["error: UnavailableTeacherError"] == 1
        assert "answers 503" in str(scorer.last_error)


def test_a_teacher_that_hangs_is_left_after_its_time():
    never = threading.Event()
    scorer = TeacherScorer(Teacher(lambda rollouts, k: never.wait(), timeout_s=0.2))
    assert rewards_of(scorer, plain_rollouts(2)) == [None, None]
    assert scorer.failures == {"error: TimeoutError": 1}
    never.set()


def test_nobody_at_the_address():
    scorer = TeacherScorer(Teacher("http://127.0.0.1:9", retries=0, timeout_s=math.inf))
    with pytest.raises(TeacherError, match=r"teacher at http://127.0.0.1:9/v1/models does not answer"):
        scorer.check(None, VOCABULARY, PARAMS)
    assert rewards_of(scorer, plain_rollouts(1)) == [None]


@pytest.mark.parametrize(
    ("vllm", "top_k", "message"),
    [
        (VLLM(lacks=True), 0, "answers without the prompt_logprobs of every token"),
        (VLLM(k_at_most=3), 5, r"fewer than teacher_top_k=5 likeliest tokens; a vLLM server returns at most"),
    ],
)
def test_answers_that_lack_something_are_named(vllm, top_k, message):
    with serving(vllm):
        scorer = TeacherScorer(vllm.url, top_k=top_k)
        assert rewards_of(scorer, plain_rollouts(1)) == [None]
    assert scorer.failures == {"error: TeacherError": 1}
    with pytest.raises(TeacherError, match=message):
        raise scorer.last_error


@pytest.mark.parametrize("logprobs", [np.zeros(3), [np.nan] * 50, None])
def test_scores_of_another_shape_or_not_finite_are_named(logprobs):
    [rollout] = plain_rollouts(1)
    given = logprobs if logprobs is None else np.asarray(logprobs)[: max(3, len(rollout.token_ids))]
    scorer = TeacherScorer(lambda rollouts, k: [TeacherScores(given)])
    assert rewards_of(scorer, [rollout]) == [None]
    assert "teacher_logprobs of rollout 0 must be finite numbers" in str(scorer.last_error)


def test_negative_ids_of_a_teacher_are_named():
    [rollout] = plain_rollouts(1)
    shape = (len(rollout.token_ids), 1)
    scores = TeacherScores(np.zeros(shape[0]), np.full(shape, -1), np.zeros(shape))
    scorer = TeacherScorer(lambda rollouts, k: [scores], top_k=1)
    assert rewards_of(scorer, [rollout]) == [None]
    assert "contain negative numbers" in str(scorer.last_error)


def test_other_distributions_are_refused():
    rollouts = make_rollouts(1)  # at another temperature
    scorer = TeacherScorer(lambda given, k: [])
    assert rewards_of(scorer, rollouts) == [None]
    for params in (rollouts[0].params, SamplingParams(top_p=0.9), SamplingParams(logit_bias={1: 1.0})):
        with pytest.raises(ValueError, match=r"scores at temperature 1, over the whole vocabulary.*as a module"):
            scorer.check(None, VOCABULARY, params)


def test_the_text_of_tokens_at_a_server_is_compared():
    class Tokenizer:
        def __call__(self, text, add_special_tokens):
            return {"input_ids": [1, 2, 3, 4]}

        def decode(self, ids):
            return f" {ids[0]}"

    with serving(VLLM(text_of=lambda i: "\ufffd" if i == 2 else f"▁{i}")) as vllm:
        TeacherScorer(vllm.url).check(Tokenizer(), 5, PARAMS)
    with (
        serving(VLLM(text_of=lambda i: str(i + (i == 4)))) as vllm,
        pytest.raises(VocabularyError, match=r"token 4 is ' 4' for the policy and '5' for the teacher at http"),
    ):
        TeacherScorer(vllm.url).check(Tokenizer(), 5, PARAMS)


def test_the_tokens_at_a_server_with_a_short_context_are_compared_in_parts():
    """Each request of the comparison has at most 24 tokens, of a sentence that is longer."""

    class Tokenizer:
        def __call__(self, text, add_special_tokens):
            return {"input_ids": list(range(len(text)))}

        def decode(self, ids):
            return str(ids[0])

    with serving(VLLM(context=24)) as vllm:
        TeacherScorer(vllm.url).check(Tokenizer(), VOCABULARY, PARAMS)
        compared = {token for fields in vllm.requests for token in fields["prompt"][1:]}
    with (
        serving(VLLM(context=24, text_of=lambda i: str(i + (i == 40)))) as vllm,
        pytest.raises(VocabularyError, match="token 40 is '40' for the policy and '41' for the teacher"),
    ):
        TeacherScorer(vllm.url).check(Tokenizer(), VOCABULARY, PARAMS)
    assert len(compared) > 40
    assert compared == set(range(1, 1 + len(compared)))


# ---- runs ----------------------------------------------------------------------------------------------------------


def train(engine, teacher, *, steps=30, score=None, **objective):
    config = GRPOConfig(
        steps=steps,
        groups_per_step=16,
        ahead=0,  # The drawn-token form learns little from tokens that are many versions old.
        sampling=SamplingParams(n=2, max_tokens=4, ignore_eos=True),
        objective=Objective(teacher_weight=1.0, **objective),
    )
    model = make_model("qwen3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    examples = (Example([index % 4, 3], {}) for index in count())
    with engine.publisher(model) as publisher:
        return model, list(grpo(engine, publisher, model, optimizer, examples, score, config, teacher=teacher))


@pytest.fixture(scope="module")
def engine(model_dir) -> Iterator[inflight.Engine]:
    with inflight.launch(model_dir("qwen3"), device="cpu", threads=1, max_sequences=16, max_context=64) as engine:
        yield engine


@pytest.mark.parametrize(
    ("kind", "top_k"),
    [
        pytest.param(kind, top_k, marks=pytest.mark.medium if top_k == in_ci else pytest.mark.slow)
        for kind, in_ci in (("engine", 0), ("our server", 8), ("vLLM", 0))
        for top_k in (0, 8)
    ],
)
def test_a_policy_learns_from_a_teacher_in_another_process(engine, teacher_engine, kind, top_k):
    if kind == "vLLM":
        with serving(VLLM()) as vllm:
            model, reports = train(engine, vllm.url, teacher_top_k=top_k)
    elif kind == "our server":
        server = teacher_engine.serve(port=0)
        model, reports = train(engine, server.url, teacher_top_k=top_k)
        server.close()
    else:
        model, reports = train(engine, teacher_engine, teacher_top_k=top_k)
    prompts = [[index, 3] for index in range(4)]
    teacher = make_model("qwen3", seed=1)
    before, after = (next_token_kl(each, teacher, prompts) for each in (make_model("qwen3"), model))
    assert after < 0.7 * before  # 0.29 to 0.47 in 30 runs
    assert reports[-1].dropped.num_unscored_rollouts == 0


@pytest.mark.medium
def test_a_run_ends_with_the_reason_if_the_teacher_always_fails(engine):
    message = r"has failed: TeacherError: the teacher at http.*without the prompt_logprobs"
    with serving(VLLM()) as vllm:
        source = Teacher(vllm.url)
        source.source.check = lambda *_: setattr(vllm, "lacks", True)  # It fails after the check before the run.
        with pytest.raises(ScoreError, match=message):
            train(engine, source)
