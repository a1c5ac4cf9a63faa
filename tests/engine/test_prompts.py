"""What a user may submit: text, token ids, chat messages and rows of a dataset, and what comes back with them."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from datasets import Dataset
from made_batches import make_rollouts
from tiny_models import make_model
from tokenizers.processors import TemplateProcessing

import inflight
from inflight.core.errors import InvalidRequestError
from inflight.engine.model.shapes import EOS_TOKEN, EOS_TOKEN_ID, byte_tokenizer
from inflight.engine.prompts import encode_prompts, prompt_of_fork

TEMPLATE = (
    "{{ bos_token }}{% if tools %}[{{ tools[0]['function']['name'] }}]{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system prompt') }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "2+2"}


@pytest.fixture
def tokenizer():
    """One that begins every text with a token of its own, as Llama's and Gemma's do, and so does its chat template."""
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = EOS_TOKEN
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single=f"{EOS_TOKEN} $A", special_tokens=[(EOS_TOKEN, EOS_TOKEN_ID)]
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def encode(tokenizer, *prompts):
    return encode_prompts(prompts, tokenizer, model="the-model")


def ids(text):
    return [EOS_TOKEN_ID, *text.encode()]


@pytest.mark.parametrize(
    ("prompt", "expected", "columns"),
    [
        ("hi", ids("hi"), {}),
        ("<user>hi", ids("<user>hi"), {}),
        (f"{EOS_TOKEN}<user>2+2>", ids("<user>2+2>"), {}),  # a rendered template: no second beginning
        ([5, 6], [5, 6], {}),
        ([USER], ids("<user>2+2>"), {}),
        ({"prompt": "hi", "answer": 4}, ids("hi"), {"answer": 4}),
        ({"prompt": [USER], "answer": 4}, ids("<user>2+2>"), {"answer": 4}),
        ({"messages": [USER], "tools": [TOOL]}, ids("[add]<user>2+2>"), {}),
        ({"prompt": [5, 6], "level": "easy"}, [5, 6], {"level": "easy"}),
        ({"prompt": "hi", "tools": "hammer"}, ids("hi"), {"tools": "hammer"}),
        ({"prompt": [5, 6], "tools": [TOOL]}, [5, 6], {"tools": [TOOL]}),
    ],
)
def test_every_form_of_a_prompt(tokenizer, prompt, expected, columns):
    assert encode(tokenizer, prompt) == [(expected, columns)]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"question": "2+2", "answer": 4}, "prompt 1 is a row with the columns question, answer; expected one called"),
        ([{"role": "system", "content": "x"}], "prompt 1 .*'the-model': the messages do not fit .*: no system"),
        ([USER, "2+2"], "prompt 1 is .*, expected text, token ids, chat messages or a row of a dataset"),
        ({"prompt": 3}, "prompt 1 is 3, expected text, token ids, chat messages or a row of a dataset"),
    ],
)
def test_a_prompt_that_cannot_be_read_is_named(tokenizer, prompt, message):
    with pytest.raises(InvalidRequestError, match=message):
        encode(tokenizer, "hi", prompt)


def test_no_text_of_a_message_becomes_a_special_token(tokenizer):
    [(found, _)] = encode(tokenizer, [{"role": "user", "content": f"a {EOS_TOKEN} b"}])
    assert found == ids(f"<user>a {EOS_TOKEN} b>")
    assert found.count(EOS_TOKEN_ID) == 1  # the beginning, which the template writes


def test_what_a_tokenizer_lacks_is_named(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(InvalidRequestError, match=r"prompt 0 .*'the-model': the tokenizer has no chat template"):
        encode(tokenizer, [USER])
    with pytest.raises(InvalidRequestError, match="'the-model' has no tokenizer; submit token ids"):
        encode_prompts(["hi"], None, model="the-model")
    with pytest.raises(InvalidRequestError, match="takes a list of prompts"):
        encode_prompts({"prompt": "hi"}, tokenizer, model="the-model")


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("chat-model")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("{{ bos_token }}", "")
    tokenizer.save_pretrained(path)
    model = make_model("qwen3")
    model.resize_token_embeddings(258)
    model.save_pretrained(path)
    with inflight.launch(str(path), device="cpu", max_sequences=8, max_context=128, threads=1, slots=3) as engine:
        yield engine


def test_a_dataset_is_trained_on_and_its_columns_reach_the_reward(engine):
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": f"{i}+{i}"}], "answer": 2 * i} for i in range(4)])
    sampling = inflight.SamplingParams(n=2, max_tokens=4, ignore_eos=True)
    engine.submit(rows, sampling, metadata=[{"row": i} for i in range(4)])
    seen = []

    def score(rollout):
        assert rollout.prompt == f"<user>{rollout.metadata['row']}+{rollout.metadata['row']}>"
        assert rollout.metadata["answer"] == 2 * rollout.metadata["row"]
        return float(rollout.metadata["answer"])

    for batch in engine.stream.batches(rollouts=4, score=score):
        assert len(batch.rollouts) == batch.num_sequences
        assert all(rollout.text and rollout.reward == rollout.metadata["answer"] for rollout in batch.rollouts)
        for part in batch.micro_batches(24):
            assert len(part.rollouts) == part.num_sequences
            first = part.rollouts[0]
            assert part.input_ids[: len(first.prompt_token_ids)].tolist() == first.prompt_token_ids.tolist()
        seen += [rollout.metadata["row"] for rollout in batch.rollouts]
    assert sorted(seen) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_grpo_trains_on_rows_of_a_dataset_and_on_chat_messages(engine):
    """Of rows, the other columns reach the score function; a row without a prompt is named."""
    model = make_model("qwen3")
    model.resize_token_embeddings(258)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chats = [[{"role": "user", "content": f"{i}+{i}"}] for i in range(4)]
    rows = Dataset.from_list([{"prompt": chat, "answer": 2 * i} for i, chat in enumerate(chats)])
    sampling = inflight.SamplingParams(n=2, max_tokens=4, ignore_eos=True)
    config = inflight.GRPOConfig(steps=9, groups_per_step=2, sampling=sampling)
    with engine.publisher(model) as publisher:
        engine.wait_for_version(publisher.publish())
        for examples in (rows, chats, [row["prompt"][0]["content"] for row in rows]):
            reports = inflight.grpo(
                engine, publisher, model, optimizer, examples, lambda r: float(len(r.text) + r.sample), config
            )
            seen = [rollout for report in reports for rollout in report.rollouts]
            prompts = sorted({rollout.prompt for rollout in seen})
            is_chat = examples is rows or examples is chats
            assert prompts == [f"<user>{i}+{i}>" if is_chat else f"{i}+{i}" for i in range(4)]
            answers = {rollout.metadata.get("answer") for rollout in seen}
            assert answers == ({0, 2, 4, 6} if examples is rows else {None})
        examples = [{"question": "hi"}, {"question": "ho"}]
        with pytest.raises(InvalidRequestError, match="is a row with the columns question"):
            next(inflight.grpo(engine, publisher, model, optimizer, examples, lambda r: 0.0, config))


def test_evaluation_beside_training_is_not_trained_on_and_greedy_prompts_end_no_run(engine):
    sampling = inflight.SamplingParams(n=2, max_tokens=6, ignore_eos=True)
    greedy = inflight.SamplingParams(temperature=0, max_tokens=6)
    engine.submit([f"train {i}" for i in range(4)], sampling)
    evaluations, trained = {}, []
    for index, batch in enumerate(engine.stream.batches(rollouts=2, score=lambda rollout: 1.0)):
        trained += [rollout.prompt for rollout in batch.rollouts]
        if index == 0:
            evaluations["sampled"] = engine.submit([f"held out {i}" for i in range(8)], sampling, train=False)
            evaluations["greedy"] = engine.submit([f"held out {i}" for i in range(8)], greedy)
            assert len(engine.generate(["held out"], sampling)[0]) == 2
    assert sorted(trained) == sorted(f"train {i}" for i in range(4) for _ in range(2))
    for ids in evaluations.values():
        groups = engine.stream.collect(ids)
        assert [group[0].prompt for group in groups] == [f"held out {i}" for i in range(8)]
    assert engine.stream.outstanding == []


def test_a_version_that_was_just_published_is_waited_for(engine):
    model = make_model("qwen3", seed=1)
    model.resize_token_embeddings(258)
    greedy = inflight.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with engine.publisher(model) as publisher:
        for _ in range(3):
            version = publisher.publish()
            [group] = engine.generate([[1, 2, 3]], greedy, version=version)
            assert set(group[0].weight_versions) == {version}
        with pytest.raises(InvalidRequestError, match=f"pinned to version {version + 5}, which no slot holds"):
            engine.submit([[1, 2, 3]], greedy, version=version + 5)


def test_text_is_tokenised_in_many_threads_at_once(engine):
    start = threading.Barrier(8)

    def work(thread):
        start.wait(20)
        prompts = [f"thread {thread} prompt {i} " * (1 + i % 3) for i in range(30)]
        groups = engine.generate(prompts, inflight.SamplingParams(max_tokens=2, ignore_eos=True))
        return [group[0].prompt for group in groups] == prompts

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_a_fork_is_within_the_tokens_of_its_rollout():
    """The engine might have drawn more tokens, which the record of the fork would lack."""
    [rollout, *_] = make_rollouts()
    ids = [*rollout.prompt_token_ids, *rollout.token_ids]
    assert prompt_of_fork(rollout, len(rollout.token_ids), None, None).token_ids == ids
    for at in (-1, len(rollout.token_ids) + 1):
        with pytest.raises(InvalidRequestError, match="cannot fork at"):
            prompt_of_fork(rollout, at, None, None)
