"""Tokens and log-probabilities of a truth-teller tell which weights drew them, in every dtype, and torn weights too."""

import numpy as np
import pytest
import torch

from inflight.core.errors import InvalidRequestError
from inflight.tools.bench.truth_teller import TORN, TruthTeller, belong, versions_of

VERSIONS = (0, 1, 2, 5, 40, 41, 254)


@pytest.fixture(scope="module")
def truth():
    return TruthTeller("tiny")


def logprobs(model, dtype):
    """f32[2, V] after any token: the model's state does not depend on what came before."""
    with torch.no_grad():
        rounded = model if dtype == torch.float32 else type(model)(model.config).to(dtype)
        if rounded is not model:
            rounded.load_state_dict(model.state_dict())
        return rounded(torch.tensor([[3, 77]])).logits[0].to(dtype).float().log_softmax(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_tokens_and_log_probabilities_tell_the_version(truth, dtype):
    for version in VERSIONS:
        truth.teach(version)
        table = logprobs(truth.model, dtype)
        tokens = [2 * version + 1, 2 * version + 2]
        assert set(table.topk(2).indices.flatten().tolist()) == set(tokens)
        assert table.exp()[:, tokens].sum(-1).min() > 1 - 1e-6
        assert versions_of(tokens).tolist() == [version, version]
        given = table[0, tokens].numpy()
        assert belong(tokens, given, exact=dtype == torch.float32).all()
        for other in (version + 1, version + 2):  # which have other gaps
            assert not belong([2 * other + 1, 2 * other + 2], given, exact=dtype == torch.float32).any()


def test_weights_of_two_versions_draw_the_torn_token(truth):
    truth.teach(7)
    before = {name: tensor.clone() for name, tensor in truth.model.state_dict().items()}
    truth.teach(8)
    after = {name: tensor.clone() for name, tensor in truth.model.state_dict().items()}
    changed = [name for name in after if (after[name] != before[name]).any()]
    assert len(changed) == 4
    for name in changed:
        truth.model.load_state_dict(before | {name: after[name]})
        table = logprobs(truth.model, torch.float32)
        assert table.argmax(-1).tolist() == [TORN, TORN], name
        assert table[:, TORN].exp().min() > 1 - 1e-6
    truth.model.load_state_dict(after)
    assert not belong([TORN], [0.0], exact=True).any()
    assert versions_of([TORN]).tolist() == [-1]


def test_what_is_saved_is_the_model(truth, tmp_path):
    truth.teach(3)
    truth.save(tmp_path)
    truth.teach(4)
    truth.save_weights(tmp_path)
    loaded = type(truth.model).from_pretrained(tmp_path, dtype=torch.float32)
    for name, tensor in truth.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_limits_are_named(truth):
    assert truth.num_versions == 255
    with pytest.raises(InvalidRequestError, match="version 255 is not among the 255"):
        truth.teach(255)
    with pytest.raises(InvalidRequestError, match="shapes tiny, small"):
        TruthTeller("tiny-moe")
    assert np.array_equal(versions_of([]), np.zeros(0))
