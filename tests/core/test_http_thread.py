"""Sockets that HTTP servers listen on."""

import socket

import pytest

from inflight.core.errors import ListenError
from inflight.core.http_thread import listen


def test_a_port_is_taken_before_its_server_has_started():
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ListenError, match=f"cannot listen on 127.0.0.1 port {port}: .*choose another port"):
            listen("127.0.0.1", port)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_all_addresses_of_ipv6_are_those_of_ipv4_too():
    with listen("::", 0) as listening, socket.create_connection(("127.0.0.1", listening.getsockname()[1])):
        pass


@pytest.mark.parametrize(("host", "port"), [("no.such.host.invalid", 0), ("127.0.0.1", 1 << 16), ("a" * 300, 0)])
def test_what_nobody_can_listen_on_is_refused(host, port):
    with pytest.raises(ListenError, match=f"cannot listen on (host '{host}'|{host} port {port}): "):
        listen(host, port)
