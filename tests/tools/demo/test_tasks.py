"""Tasks hold out prompts that no training example has, and name what is wrong with a file."""

import json
import sys
from types import SimpleNamespace

import pytest

from inflight.tools.demo.tasks import TaskError, file_task, gym_task


def write(path, *prompts):
    path.write_text("".join(json.dumps({"prompt": p, "answer": "a"}, ensure_ascii=False) + "\n" for p in prompts))
    return path


def test_repeated_lines_of_a_file_are_not_held_out_and_trained_on(tmp_path):
    path = write(tmp_path / "rows.jsonl", *(f"{i}\u2028" for i in range(16)), *(f"{i}\u2028" for i in range(8, 16)))
    task = file_task(path, max_tokens=4)
    assert [example.prompt for example in task.held_out] == [f"{i}\u2028" for i in range(12, 16)]
    assert [example.prompt for example in task.train] == [f"{i}\u2028" for i in (*range(12), *range(8, 12))]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "a", "answer": "b"}\n{"prompt": "a", "answer": null}\n', r"rows.jsonl, line 2: expected"),
        (b'{"prompt": "a", "answer": "b"}\n{"prompt": "\xff", "answer": "b"}\n', r"rows.jsonl, line 2 is not UTF-8"),
        (
            b'{"prompt": [{"role": "user", "content": "a"}], "answer": "b"}\n',
            r"line 1: .* text or numbers, got",
        ),
        (b'{"prompt": "a", "answer": ["b"]}\n', r"line 1: expected .*, both text or numbers"),
        (b'{"prompt": "a", "answer": true}\n', r"line 1: expected .*, both text or numbers"),
        (b'{"prompt": "a", "answer": "b"}\n' * 20, "has 1 different prompts; at least 8 are needed"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path, content, message):
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(TaskError, match=message):
        file_task(tmp_path / "rows.jsonl", max_tokens=4)


@pytest.mark.parametrize(("size", "held_out"), [(40, 10), (5000, 512)])
def test_a_small_task_keeps_most_of_its_prompts_for_training(monkeypatch, size, held_out):
    def create_dataset(name, *, size, seed):
        return [{"question": f"{i % num_prompts}", "answer": "a"} for i in range(size)]

    num_prompts = size
    monkeypatch.setitem(sys.modules, "reasoning_gym", SimpleNamespace(create_dataset=create_dataset))
    task = gym_task("small", seed=0)
    assert (len(task.train), len(task.held_out)) == (size - held_out, held_out)
    num_prompts = 7
    with pytest.raises(TaskError, match="'small' has 7 different prompts; at least 8 are needed"):
        gym_task("small", seed=0)


def test_numbers_are_read_as_text(tmp_path):
    rows = [{"prompt": number, "answer": number / 2} for number in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = file_task(tmp_path / "rows.jsonl", max_tokens=4)
    assert [(one.prompt, one.metadata) for one in task.held_out] == [("6", {"answer": "3.0"}), ("7", {"answer": "3.5"})]
