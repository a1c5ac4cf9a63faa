"""A server in front of an engine that answers word for word."""

from dataclasses import dataclass

import openai
import pytest
from scripted_model import save_scripted_model

import inflight
from inflight.server.http_server import HttpServer


@dataclass
class Served:
    engine: inflight.Engine
    http: HttpServer
    client: openai.OpenAI
    model: str


@pytest.fixture(scope="session")
def scripted_dir(tmp_path_factory):
    return save_scripted_model(tmp_path_factory.mktemp("scripted"))


@pytest.fixture(scope="session")
def served(scripted_dir):
    """max_context is 256."""
    with inflight.launch(scripted_dir, device="cpu", max_sequences=16, max_context=256, threads=1) as engine:
        server = engine.serve(port=0, served_model_name="policy", max_body_mib=0.25, stream_interval_ms=0)
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            yield Served(engine, server, client, scripted_dir)
