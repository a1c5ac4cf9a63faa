"""The part of verifiers 0.4 that `verifiers_rollout` uses, with its names and its order of calls, in process."""

import traceback
import uuid
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import openai


class TaskError(Exception):
    pass


@dataclass(frozen=True)
class EvalClientConfig:
    base_url: str
    api_key_var: str


@dataclass(frozen=True)
class ModelContext:
    model: str
    client: EvalClientConfig


@dataclass
class Data:
    prompt: str

    @classmethod
    def model_validate(cls, row):
        return cls(**row)


@dataclass
class Task:
    data: Data
    config: object = None

    data_type = staticmethod(lambda: Data)


@dataclass
class Trace:
    """What one agent did."""

    client: EvalClientConfig
    agent: SimpleNamespace
    rewards: dict = field(default_factory=dict)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    ok: bool = True
    errors: tuple = ()
    task: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(type="Task"))

    async def say(self, messages):
        """Add the reply of the model to messages, and return its text."""
        headers = {"X-Session-ID": self.id}
        async with openai.AsyncOpenAI(
            base_url=self.client.base_url, api_key="EMPTY", default_headers=headers, max_retries=0
        ) as client:
            answer = await client.chat.completions.create(model="inflight", messages=messages)
        messages.append(answer.choices[0].message.model_dump(exclude_none=True))
        return answer.choices[0].message.content

    def reward(self, **values):
        self.rewards |= {name: SimpleNamespace(value=value) for name, value in values.items()}


class Env:
    """`play(task, agent)` is one episode; `agent(name, trainable)` begins the run of an agent, a Trace."""

    config = SimpleNamespace(taskset=SimpleNamespace(task=None))
    taskset = SimpleNamespace(task_type=lambda: Task)

    def __init__(self, play, fails_to_start=0):
        self._play, self._fails_to_start = play, fails_to_start
        self.starts, self.serves = 0, False

    @asynccontextmanager
    async def serving(self):
        self.starts += 1
        if self.starts <= self._fails_to_start:
            raise TaskError("no port")
        self.serves = True
        try:
            yield
        finally:
            self.serves = False

    async def run_episode(self, task, ctx, *, on_trace, on_discard):
        assert self.serves
        traces, errors = [], []

        def agent(name="agent", trainable=True):
            traces.append(Trace(ctx.client, SimpleNamespace(name=name, trainable=trainable)))
            on_trace(traces[-1])
            return traces[-1]

        agent.discard = on_discard
        try:
            await self._play(task, agent)
        except Exception as error:
            told = SimpleNamespace(type=type(error).__name__, message=str(error), traceback=traceback.format_exc())
            errors.append(told)
        return SimpleNamespace(ok=not errors, traces=traces, errors=errors)
