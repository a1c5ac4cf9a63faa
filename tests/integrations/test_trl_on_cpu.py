"""The replacements of CUDA work: a packed tree has the log-probabilities of its sequences alone."""

import os

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
pytest.importorskip("trl", reason="the trl extra is not installed")

from trl.experimental.async_grpo.packing import TREE_ATTENTION, TreeRow, register_tree_attention
from trl_on_cpu import run_on_cpu, varlen_attention

SEQUENCES = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 20, 21, 22], [5, 6, 40, 41]]


def test_a_packed_tree_has_the_logits_of_its_sequences(path):
    run_on_cpu()
    register_tree_attention()
    row = TreeRow()
    for ids in SEQUENCES:
        mask = np.array([0, *[1] * (len(ids) - 1)])
        row.add(
            {"input_ids": np.array(ids), "completion_mask": mask, "old_log_probs": mask * 0.0, "advantage": 1.0,
             "group_id": 0}
        )  # fmt: skip
    packed = row.pack()
    assert len(packed["input_ids"]) < sum(map(len, SEQUENCES))  # the shared prefix is computed once
    tree = AutoModelForCausalLM.from_pretrained(path, attn_implementation=TREE_ATTENTION, dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logits = tree(
            input_ids=packed["input_ids"][None],
            position_ids=packed["position_ids"][None],
            **{name: packed[name] for name in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")},
            tree_max_seqlen_q=int(packed["tree_max_seqlens"][0]),
            tree_max_seqlen_k=int(packed["tree_max_seqlens"][1]),
        ).logits[0]
        expected = torch.cat([plain(torch.tensor([ids])).logits[0, :-1] for ids in SEQUENCES])
    torch.testing.assert_close(logits[packed["token_index"]], expected, atol=1e-5, rtol=1e-4)


def test_a_window_and_a_softcap():
    q = k = v = torch.randn(4, 2, 8)
    ends = torch.tensor([0, 4])
    inside = varlen_attention(q, k, v, ends, ends, 4, 4, causal=True, window_size=(1, -1))
    last_two = varlen_attention(q[3:], k[2:], v[2:], torch.tensor([0, 1]), torch.tensor([0, 2]), 1, 2, causal=True)
    torch.testing.assert_close(inside[3:], last_two)
    assert not torch.allclose(varlen_attention(q, k, v, ends, ends, 4, 4, causal=True)[3:], last_two)
    with pytest.raises(NotImplementedError, match="softcap"):
        varlen_attention(q, k, v, ends, ends, 4, 4, causal=True, softcap=30.0)
