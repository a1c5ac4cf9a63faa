"""What nobody takes is not waited for."""

import pytest

from inflight.core.connection import Connection
from inflight.core.messages import Hello
from inflight.stream.reader import StreamReader


@pytest.mark.timeout(20)
def test_a_message_to_an_engine_that_refused_our_keys_stays_where_it_is(tmp_path):
    endpoint = f"ipc://{tmp_path}/control"
    connection = Connection(endpoint, print)
    connection._socket.disconnect(endpoint)  # which ZeroMQ does when keys are refused
    answer = connection.send(Hello(ticket=connection.ticket()))
    assert not connection.pump(0)
    assert not answer.done()
    connection.close()
    assert answer.done()


@pytest.mark.timeout(20)
def test_a_reader_whose_keys_are_refused_can_be_closed(tmp_path):
    endpoint = f"ipc://{tmp_path}/stream"
    reader = StreamReader(endpoint)
    reader.socket.disconnect(endpoint)
    reader._subscribe()
    assert reader.receive(0) is None
    reader.close()
