import pytest


@pytest.fixture(scope="module", params=["inflight", pytest.param("vllm", marks=[pytest.mark.peers, pytest.mark.slow])])
def bases(request, tmp_path_factory):
    from lora_bases import Bases  # imports PEFT

    made = Bases(request.param, tmp_path_factory.mktemp("bases"))
    yield made
    made.close()
