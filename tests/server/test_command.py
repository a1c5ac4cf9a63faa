"""`inflight serve`."""

import os
import re
import signal
import subprocess
import sys

import pytest
from http_calls import call
from waiting import PATIENCE_S

from inflight.server.command import ServedModel


class Address:
    def __init__(self, url):
        self.url = url


def test_options_of_the_engine_are_those_of_the_command():
    options = ServedModel(
        model="tiny", lora_rank=8, max_loras=2, set=("kv_on_swap=recompute", "seed=3", "prefix_caching=false")
    ).engine_options()
    assert (options.model, options.lora_rank, options.adapters) == ("tiny", 8, ("place-0", "place-1"))
    assert (options.kv_on_swap, options.seed, options.prefix_caching) == ("recompute", 3, False)


@pytest.mark.parametrize("pair", ["kv_on_swap", "nothing=1", "seed=many", "slots=0"])
def test_an_option_that_cannot_be_set(pair):
    with pytest.raises(ValueError, match=pair.partition("=")[0]):
        ServedModel(model="tiny", set=(pair,)).engine_options()


@pytest.mark.slow
def test_the_command_serves_until_it_is_told_to_end(scripted_dir):
    command = [sys.executable, "-m", "inflight.cli", "serve", scripted_dir, "--port", "0", "--max-context", "64"]
    process = subprocess.Popen(
        [*command, "--set", "threads=1", "--device", "cpu"], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    try:
        assert process.stdout is not None
        found = next(re.search(r"http://\S+", line) for line in process.stdout if "http://" in line)
        status, answer = call(Address(found[0]), "POST", "/v1/completions", {"prompt": "<answer>"})
        assert (status, answer["choices"][0]["text"][:5]) == (200, "Hello")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
