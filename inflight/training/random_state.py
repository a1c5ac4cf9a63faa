"""The state of this process's random number generators, as arrays: Python's, NumPy's and torch's."""

import random
from collections.abc import Mapping

import numpy as np
import torch


def random_state() -> dict[str, np.ndarray]:
    """Return the state of all these generators."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    assert (version, kind) == (3, "MT19937")
    states = {
        "python": np.array(words, np.uint64),
        "python_gauss": np.array([] if gauss is None else [gauss], np.float64),
        "numpy": np.array(keys, np.uint32),
        "numpy_rest": np.array([position, has_gauss], np.int64),
        "numpy_gauss": np.array([cached], np.float64),
        "torch": torch.get_rng_state().numpy(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states |= {f"cuda/{i}": state.numpy() for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def restore_random_state(states: Mapping[str, np.ndarray]) -> None:
    """Continue from a state that `random_state` returned. States of missing GPUs are left out. Raises KeyError or
    ValueError for any other data."""
    gauss = states["python_gauss"].tolist()
    position, has_gauss = states["numpy_rest"].tolist()
    random.setstate((3, tuple(states["python"].tolist()), gauss[0] if gauss else None))
    np.random.set_state(("MT19937", states["numpy"], position, has_gauss, float(states["numpy_gauss"][0])))
    torch.set_rng_state(torch.from_numpy(states["torch"].copy()))
    for index in range(torch.cuda.device_count()):
        if (state := states.get(f"cuda/{index}")) is not None:
            torch.cuda.set_rng_state(torch.from_numpy(state.copy()), index)
