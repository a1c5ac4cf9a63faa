"""A model for trainers of other libraries."""

import pytest
from trl_trainers import save_chat_model


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_chat_model(tmp_path_factory.mktemp("trl-model"))
