"""Asks this server and vLLM's the same things with the official OpenAI client, and writes down what differs.

    make peers
    python benchmarks/openai_differences.py [FILE]  # FILE: docs/openai-differences.md

Both serve one model, which answers word for word, so that texts, tokens and log-probabilities can be compared. An
answer is flattened to its fields; ids and times are left out, streams are put together. `WHY` explains each difference;
the program fails where one is not explained.
"""

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import openai
from vllm_server import ROOT, vllm_server, vllm_version

import inflight

sys.path.insert(0, str(ROOT / "tests" / "helpers"))
from scripted_model import save_scripted_model

MODEL = "policy"
_CONTEXT = 256
_LEFT_OUT = {"id", "created", "request_id", "system_fingerprint"}
Client = openai.OpenAI


@dataclass(frozen=True)
class Ask:
    """One request. input: "prompt" or "messages", which is the endpoint. random: its tokens are drawn, so that their
    values are not compared."""

    name: str
    input: str
    body: dict[str, Any]
    random: bool = False


def completion(name: str, *, random: bool = False, **body: Any) -> Ask:
    return Ask(name, "prompt", {"model": MODEL, "prompt": "<answer>", "max_tokens": 8, **body}, random)


def chat(name: str, **body: Any) -> Ask:
    return Ask(name, "messages", {"model": MODEL, "messages": _USER, **body})


_USER = [{"role": "user", "content": "Say hello."}]
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]
_CALLED = [
    *_USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "3"},
]
_IDS = [1, 2, 3]
_USAGE = {"include_usage": True}

ASKS = [
    completion("text"),
    completion("several texts", prompt=["<answer>", "<answer>Hello"]),
    completion("token ids", prompt=_IDS, random=True),
    completion("several lists of token ids", prompt=[_IDS, [4]], random=True),
    completion("n", n=2),
    completion("one token", max_tokens=1),
    Ask("tokens where none are asked for", "prompt", {"model": MODEL, "prompt": "a", "seed": 1}, True),
    completion("stop", stop="wor"),
    completion("stops that do not come", stop=["xyz", "abc"]),
    completion("stop token", stop_token_ids=[261]),
    completion("stop string in the text", stop="wor", include_stop_str_in_output=True),
    completion("logprobs 1", logprobs=1),
    completion("logprobs 0", logprobs=0),
    completion("logprobs by token id", logprobs=2, return_tokens_as_token_ids=True),
    completion("stream", stream=True),
    completion("stream with usage", stream=True, stream_options=_USAGE),
    completion("stream with logprobs", stream=True, logprobs=1),
    completion("stream of two", stream=True, n=2),
    completion("greedy", temperature=0),
    completion("filters", prompt=_IDS, top_p=0.5, top_k=20, min_p=0.01, seed=1, logprobs=2, random=True),
    completion("logit bias", prompt=_IDS, logit_bias={"40": 100}, logprobs=1),
    completion("at least and whatever the end", min_tokens=7, ignore_eos=True, random=True),
    completion("token ids of the answer", return_token_ids=True),
    completion("echo", echo=True),
    completion("suffix", suffix="end"),
    completion("frequency penalty", frequency_penalty=1.0),
    chat("chat"),
    chat("chat of several messages", messages=[{"role": "system", "content": "Be kind."}, *_USER]),
    chat("chat, n", n=2),
    chat("chat, stream", stream=True),
    chat("chat, stream with usage", stream=True, stream_options=_USAGE),
    chat("chat, logprobs", logprobs=True, top_logprobs=2),
    chat("chat, stream with logprobs", stream=True, logprobs=True),
    chat("chat, at most two tokens", max_completion_tokens=2),
    chat("chat, stop", stop=["wor"]),
    chat("tools", tools=_TOOLS),
    chat("tools, stream", tools=_TOOLS, stream=True),
    chat("tools that are not wanted", tools=_TOOLS, tool_choice="none"),
    chat("a tool's answer", messages=_CALLED, tools=_TOOLS),
    chat("arguments of the template", chat_template_kwargs={"shout": True}),
    chat("chat, token ids", return_token_ids=True),
    chat("JSON as the answer", response_format={"type": "json_object"}, max_tokens=4),
    completion("error: model that is not there", model="another"),
    completion("error: temperature that is no number", temperature="hot"),
    completion("error: temperature below 0", temperature=-1),
    completion("error: n is 0", n=0),
    completion("error: more tokens than the context", max_tokens=1000),
    completion("error: prompt beyond the context", prompt=[1] * 300),
    chat("error: messages beyond the context", messages=[{"role": "user", "content": "a" * 300}]),
    completion("error: token id beyond the vocabulary", prompt=[100_000]),
    completion("error: empty prompt", prompt=[]),
    chat("error: top_logprobs alone", top_logprobs=2),
    Ask("error: no messages", "messages", {"model": MODEL}),
]

WHY: list[tuple[str, str, str]] = [
    (
        "error: more tokens than the context",
        "status",
        "an answer ends where the context does",
    ),
    ("frequency penalty", "status", "refused: recorded log-probabilities could not be reproduced by a trainer"),
    ("JSON as the answer", "status", "refused: drawing is not guided"),
    ("*", "error.type", "the names of OpenAI's API; vLLM writes those of Python classes"),
    ("*", "error.code", "the name of OpenAI's API"),
    ("*", "error.param", "the field that is to blame, where there is one"),
    ("*", "choices.logprobs.content*token_id", "ids beside names, for clients that read either"),
    ("*", "usage.prompt_tokens_details.*", "tokens that the prefix cache had, always told"),
    ("tools*", "choices.*.content", "the line break before a tool call is not part of the content"),
    ("a tool's answer", "choices.*.content", "the line break before a tool call is not part of the content"),
]
"""Pattern of a request's name, pattern of a field without [], why it differs. The first one that fits counts."""


# ---- what an answer says --------------------------------------------------------------------------------------------


def ask(client: Client, request: Ask) -> Any:
    """The answer as JSON: an error with its status, a stream as one value."""
    body = dict(request.body)
    named: dict[str, Any] = {name: body.pop(name, None) for name in ("model", request.input)}
    endpoint: Any = client.chat.completions if request.input == "messages" else client.completions
    try:
        answer = endpoint.with_raw_response.create(**named, extra_body=body)  # what the client does not know as well
    except openai.APIStatusError as error:
        told = error.response.json()
        return {"status": error.status_code, "error": {**told.get("error", told), "message": "…"}}
    text = answer.http_response.text
    return _stream(text) if body.get("stream") else json.loads(text)


def _stream(text: str) -> dict[str, Any]:
    """The fields of all parts; texts and lists of a choice are put together."""
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    whole: dict[str, Any] = {"ends": text.rstrip().endswith("data: [DONE]"), "choices": []}
    by_index: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.pop("choices", []):
            _join(by_index.setdefault(choice.pop("index"), {}), choice)
        whole.update({name: value for name, value in chunk.items() if value is not None})
    whole["choices"] = [by_index[index] for index in sorted(by_index)]
    return whole


def _join(whole: dict[str, Any], part: dict[str, Any]) -> None:
    for name, value in part.items():
        before = whole.get(name)
        if isinstance(value, dict) and isinstance(before, dict):
            _join(before, value)
        elif name == "tool_calls" and value is not None:
            whole[name] = before or []
            _join_calls(whole[name], value)
        elif name == "role" or before is None or value is None:
            whole[name] = value if before is None else before
        elif isinstance(value, (str, list)):
            whole[name] = before + value
        else:
            whole[name] = value


def _join_calls(before: Any, parts: Any) -> None:
    for part in parts:
        same = [call for call in before if call["index"] == part["index"]]
        if same:
            _join(same[0], part)
        else:
            before.append(part)


def fields(value: Any, *, random: bool, path: str = "") -> Iterator[tuple[str, Any]]:
    """Paths of leaves, with [] for any place in a list and * for any token, and their values."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name not in _LEFT_OUT:
                name = "*" if path.endswith("top_logprobs[]") and "content" not in path else name
                yield from fields(inner, random=random, path=f"{path}.{name}".lstrip("."))
    elif isinstance(value, list) and value:
        for inner in value:
            yield from fields(inner, random=random, path=f"{path}[]")
    elif random and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        yield path, "…"
    elif isinstance(value, float):
        yield path, round(value, 3) + 0.0
    else:
        yield path, "[]" if value == [] else value


def told(answer: Any, *, random: bool) -> dict[str, list[Any]]:
    """The values of each field, in order; how many there are does not count where tokens are drawn."""
    found: dict[str, list[Any]] = defaultdict(list)
    for path, value in fields(answer, random=random):
        found[path].append(value)
    return {path: values[:1] if random and set(values) == {"…"} else values for path, values in found.items()}


def shown(values: list[Any] | None) -> str:
    if values is None:
        return "not there"
    text = json.dumps(values[0] if len(set(map(str, values))) == 1 else values, ensure_ascii=False)
    return text if len(text) < 60 else f"{text[:57]}…"


# ---- the two servers ------------------------------------------------------------------------------------------------


@contextmanager
def ours(directory: str) -> Iterator[Client]:
    with inflight.launch(directory, device="cpu", max_context=_CONTEXT, threads=1) as engine:
        server = engine.serve(port=0, served_model_name=MODEL)
        yield Client(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@contextmanager
def vllm(directory: str) -> Iterator[Client]:
    options = ("--served-model-name", MODEL, "--max-model-len", str(_CONTEXT), "--enforce-eager")
    with vllm_server(directory, *options, "--enable-auto-tool-choice", "--tool-call-parser", "hermes") as url:
        yield Client(base_url=f"{url}/v1", api_key="none", max_retries=0)


# ---- the table ------------------------------------------------------------------------------------------------------


def why(name: str, path: str) -> str | None:
    return next((text for names, paths, text in WHY if fnmatchcase(name, names) and _fits(path, paths)), None)


def _fits(path: str, pattern: str) -> bool:
    return fnmatchcase(path.replace("[]", ""), pattern)


def differences(asks: Sequence[Ask], mine: list[Any], theirs: list[Any]) -> list[tuple[str, str, str, str, str | None]]:
    """Rows of (request, field, vLLM's, ours, why)."""
    rows = []
    for request, my_answer, their_answer in zip(asks, mine, theirs, strict=True):
        my_fields, their_fields = (told(answer, random=request.random) for answer in (my_answer, their_answer))
        statuses = [shown(found.get("status", ["an answer"])) for found in (their_fields, my_fields)]
        if statuses[0] != statuses[1]:
            rows.append((request.name, "status", *statuses, why(request.name, "status")))
            continue
        for path in sorted({*my_fields, *their_fields}):
            my_values, their_values = my_fields.get(path), their_fields.get(path)
            if my_values == their_values or (my_values is None and set(map(str, their_values or [])) <= {"None", "[]"}):
                continue
            if _is_none_here(path, my_fields, their_fields):
                continue
            rows.append((request.name, path, shown(their_values), shown(my_values), why(request.name, path)))
    return rows


def _is_none_here(path: str, mine: dict[str, list[Any]], theirs: dict[str, list[Any]]) -> bool:
    """Whether a field is null with one and an object with fields of its own with the other: these are told of."""
    return any(
        set(a.get(path, [None])) == {None} and any(other.startswith((f"{path}.", f"{path}[")) for other in b)
        for a, b in ((mine, theirs), (theirs, mine))
    )


def page(rows: list[tuple[str, str, str, str, str | None]], version: str) -> str:
    """Rows with the same field and values are told once."""
    differing, changed = {name for name, *_ in rows}, {name for name, _, theirs, *_ in rows if theirs != "not there"}
    merged: dict[tuple[str, str, str, str], list[str]] = defaultdict(list)
    for name, path, theirs, mine, reason in rows:
        merged[reason or "**not explained**", path, theirs, mine].append(name)
    lines = [
        "# The OpenAI client at both servers",
        "",
        "After reading this page you know what a client of vLLM's server notices when it talks to inflight's instead.",
        "",
        f"{len(ASKS)} requests of the official `openai` client went to `vllm serve` ({version},",
        "`--logprobs-mode processed_logprobs`) and to `inflight serve`, with one model that answers word for word.",
        f"{len(ASKS) - len(changed)} of the answers are the same, field by field, but for ids, times, and fields that",
        f"are null there and not there here; in {len(differing - changed)} of these ours have fields besides. The",
        "others differ as the table says.",
        "`python benchmarks/openai_differences.py docs/openai-differences.md` writes this page, and fails where a",
        "difference is not explained.",
        "",
        "| what differs | vLLM | inflight | in | why |",
        "|---|---|---|---|---|",
    ]  # fmt: skip
    for (reason, path, theirs, mine), names in sorted(merged.items()):
        where = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        lines.append(f"| `{path}` | `{theirs}` | `{mine}` | {where} | {reason} |".replace("||", "\\|\\|"))
    return "\n".join([*lines, "", "Next: [server.md](server.md).", ""])


def answers(server: Callable[[str], Any], directory: str) -> list[Any]:
    with server(directory) as client:
        return [ask(client, request) for request in ASKS]


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        model = save_scripted_model(Path(directory))
        theirs = answers(vllm, model)
        mine = answers(ours, model)
    rows = differences(ASKS, mine, theirs)
    text = page(rows, vllm_version())
    if sys.argv[1:]:
        Path(sys.argv[1]).write_text(text)
    print(text)
    unexplained = [row for row in rows if row[4] is None]
    sys.exit(f"{len(unexplained)} differences are not explained" if unexplained else 0)


if __name__ == "__main__":
    main()
