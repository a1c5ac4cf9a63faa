"""vLLM as a backend: its engine takes one step at a time, and weights go live between two of them.

`engine.py` is the backend; `build.py` starts vLLM as our options say; `line.py` holds what waits for it and what it
runs; `sampling.py` translates sampling parameters; `staged_slots.py` says who owns which slot. `worker.py` is what
vLLM's workers get; `shadow.py` and `adapters.py` are the next version in the form in which a worker computes with it,
and `columns.py` records what requests ask for beside tokens. vLLM is imported in functions alone.
"""
