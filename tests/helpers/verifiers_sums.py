"""A taskset of verifiers: sums, with a tool that adds."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: int


class Calculator(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def correct(self, task, trace) -> float:
        if task.answer == 13:
            raise ZeroDivisionError("no luck")
        return float(str(task.answer) in trace.last_reply)

    @vf.reward(weight=0.25)
    async def turns(self, trace) -> float:
        return float(trace.num_turns)


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Calculator(vf.SharedToolsetConfig())]

    def load(self):
        for a, b in ((1, 2), (6, 7)):
            yield SumTask(SumData(prompt=f"{a} + {b}?", answer=a + b), self.config.task)


__all__ = ["Sums"]

if __name__ == "__main__":
    Calculator.run()
