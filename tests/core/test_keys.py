"""Keys are made once, for one user, and read only where nobody else could have read or changed them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from inflight.core.errors import KeysError
from inflight.core.keys import client_keys, engine_keys, make_engine_keys, make_keys, prepare_client


@pytest.fixture
def directory(tmp_path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


def test_a_pair_fits_and_is_for_its_owner_alone(tmp_path):
    before = os.umask(0)
    try:
        make_keys(tmp_path / "keys")
    finally:
        os.umask(before)
    engine, client = engine_keys(str(tmp_path / "keys")), client_keys(str(tmp_path / "keys"))
    assert zmq.curve_public(engine.secret) == client.engine
    assert zmq.curve_public(client.secret) == client.public
    assert engine.clients == {client.public}
    modes = {path.name: path.stat().st_mode & 0o777 for path in [tmp_path / "keys", *(tmp_path / "keys").iterdir()]}
    files = ("client.key", "client.key_secret", "engine.key", "engine.key_secret")
    assert modes == {"keys": 0o700} | dict.fromkeys(files, 0o600)


def test_keys_of_an_engine_alone_let_in_the_client_whose_public_key_is_known(tmp_path):
    client, _ = zmq.curve_keypair()
    before = os.umask(0)
    try:
        public = make_engine_keys(tmp_path / "keys", client)
    finally:
        os.umask(before)
    engine = engine_keys(str(tmp_path / "keys"))
    assert zmq.curve_public(engine.secret) == public
    assert engine.clients == {client}
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "keys").iterdir()} == {0o600}


def test_secrets_are_in_no_text_that_is_logged(directory):
    for keys in (engine_keys(str(directory)), client_keys(str(directory))):
        assert keys.secret.decode() not in repr(keys)


def test_keys_are_never_overwritten(directory):
    before = {path: path.read_bytes() for path in directory.iterdir()}
    with pytest.raises(KeysError, match="exists, and keys are never overwritten"):
        make_keys(directory)
    assert {path: path.read_bytes() for path in directory.iterdir()} == before


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_secret_that_others_can_read_is_refused(directory, mode):
    (directory / "engine.key_secret").chmod(mode)
    (directory / "client.key_secret").chmod(mode)
    for read in (engine_keys, client_keys):
        with pytest.raises(KeysError, match=r"others than this user can read or change .*key_secret .*chmod 600"):
            read(str(directory))


@pytest.mark.parametrize("name", [".", "client.key", "engine.key"])
def test_a_list_of_keys_that_others_can_change_is_refused(directory, name):
    """They would let themselves in, or pass their engine off as ours."""
    (directory / name).chmod(0o777)
    with pytest.raises(KeysError, match="others than this user can change"):
        (client_keys if name == "engine.key" else engine_keys)(str(directory))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_secret_of_another_user_is_refused(directory):
    os.chown(directory / "client.key_secret", 65534, 65534)
    with pytest.raises(KeysError, match="owner 65534"):
        client_keys(str(directory))


def test_what_is_no_key_is_named(directory, tmp_path):
    with pytest.raises(KeysError, match=r"no key in .*none/engine.key_secret.*inflight keys"):
        engine_keys(str(tmp_path / "none"))
    (directory / "engine.key_secret").write_text('public-key = "short"\nsecret-key = "short"\n')
    with pytest.raises(KeysError, match="holds no whole key"):
        engine_keys(str(directory))
    (directory / "client.key").unlink()
    with pytest.raises(KeysError, match="holds no whole key"):
        engine_keys(str(directory))


def test_an_engine_that_nobody_could_reach_is_refused(directory):
    (directory / "client.key").unlink()
    with pytest.raises(KeysError, match="no key of a client"):
        engine_keys(str(directory))


def test_nobody_connects_over_tcp_without_keys():
    with zmq.Context.instance().socket(zmq.DEALER) as socket, pytest.raises(KeysError, match="needs keys"):
        prepare_client(socket, "tcp://127.0.0.1:5600", None)


def test_the_command_makes_keys_and_says_how_they_are_used(tmp_path):
    command = [sys.executable, "-m", "inflight.tools.cli", "keys", str(tmp_path / "keys")]
    first = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 'inflight.launch(model, listen="tcp://0.0.0.0:5600", keys=' in first.stdout
    assert "inflight.attach(" in first.stdout
    assert engine_keys(str(tmp_path / "keys")).clients == {client_keys(str(tmp_path / "keys")).public}
    second = subprocess.run(command, capture_output=True, text=True)
    assert second.returncode == 2
    assert "never overwritten" in second.stderr
