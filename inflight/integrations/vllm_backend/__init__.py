"""vLLM as a backend. Its engine takes one step at a time, and weights go live between two steps.

`engine.py` is the backend. `build.py` starts vLLM with our options. `vllm_scheduler.py` queues sequences and tracks the
sequences in vLLM. `sampling.py` translates sampling parameters. `staged_slots.py` tracks the owner of each slot, and
`updates.py` makes versions live. `worker.py` extends vLLM's workers. `shadow.py` and `adapters.py` convert the next
version to the form in which a worker computes with it. `columns.py` records the optional columns of requests. vLLM is
only imported inside functions.
"""
