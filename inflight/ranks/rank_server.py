"""Rank 0's end: the batches of its stream, split over the ranks of a data-parallel trainer.

The server listens on a socket in a directory that only this user can enter. If there are ranks on other machines, it
also listens on TCP, only for the holders of their keys. Shares are pulled: a rank asks for its share of a batch, reads
it in parts, and confirms it.
"""

import os
import shutil
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Literal

import zmq

from inflight.core.clock import now_ns
from inflight.core.decoders import msgpack_decoder
from inflight.core.errors import InflightError, ListenError, ProtocolError, RankLostError
from inflight.core.messages import Call, FromEngine, Prompt, Result, Status, decode_to_engine, read, to_raw
from inflight.core.options import EngineOptions
from inflight.core.waiting import Wait
from inflight.engine.process.control_socket import ControlSocket
from inflight.engine.process.directory import make_directory
from inflight.engine.process.tcp_listener import TcpListener
from inflight.engine.process.verbs import Verbs, verb
from inflight.ranks.meeting import (
    NOTHING_ASKED,
    SOCKET,
    WAITS_FOR_ROLLOUTS,
    Joined,
    Offer,
    Outside,
    Process,
    RankAddress,
    Take,
    this_host,
)
from inflight.training.data.batch import PackedBatch
from inflight.training.data.rollout_stream import RolloutStream
from inflight.training.data.shares import encode_share, split

_CHECK_S = 0.1
_ASK_AGAIN_S = 1.0
"""Maximum time after which a rank that asks for a batch is answered that there is none yet."""
_PART_BYTES = 16 << 20
_LOOK_EVERY_NS = 1_000_000_000
_GONE_NS = 30_000_000_000
"""Time in which an unreachable rank of another machine has to call again."""
_TAKE = msgpack_decoder(Take)


@dataclass(slots=True)
class _Client:
    """A rank that has joined."""

    rank: int
    name: str
    process: Process | None
    """None on another machine: its processes cannot be watched from here."""
    address: bytes
    """The address of its last call."""
    left: bool = False
    missed_ns: int = 0
    """Time since which it could not be reached; 0: it can be reached."""
    data: bytes = b""
    """The share that it is reading."""


class RankServer:
    """Rank 0's end: it makes a share of every batch for each rank, and passes calls of the ranks to the engine.

    A batch is made once every rank has taken its share of the previous one. A thread answers the ranks. A rank that
    ends, leaves, or takes nothing for `timeout_s` seconds is lost: then waiting calls raise a RankLostError that names
    it.
    """

    def __init__(
        self,
        options: EngineOptions,
        num_ranks: int,
        *,
        submit: Callable[[list[Prompt]], list[int]],
        status: Callable[[], Status],
        first_version: Callable[[int], int | None],
        outside: Outside | None = None,
    ):
        """first_version: returns the version that the publisher with this index began with, None if that publisher was
        not made yet. outside: None if all ranks are on this machine. Raises ListenError."""
        self._num_ranks, self._timeout_s = num_ranks, options.rank_timeout_s
        self._ask_again_ns = int(min(_ASK_AGAIN_S, options.answer_timeout_s / 4) * 1e9)
        self._submit, self._status, self._first_version = submit, status, first_version
        self._directory, self._lock_file = make_directory()
        self._context = zmq.Context() if outside is not None else None  # one TcpListener per context
        self._socket = ControlSocket(f"ipc://{self._directory / SOCKET}", context=self._context)
        self._listener: TcpListener | None = None
        endpoint, key = ("", b"") if outside is None else self._open(outside)
        self.own_address = RankAddress(options, str(self._directory), os.getpid(), this_host(), endpoint, key)
        """Address at which the other ranks attach."""
        self._verbs = Verbs(self)
        self._condition = threading.Condition(threading.RLock())
        self._clients: dict[str, _Client] = {}
        self._caller = b""
        """The address of the process whose call is being answered."""
        self._looked_ns = 0
        """Time of the last check for ranks on other machines."""
        self._number = 0
        """The newest batch; batches count from 1."""
        self._kind: Literal["share", "end", "error"] = "share"
        self._error = ("", "")
        self._shares: dict[int, bytes] = {}
        """Encoded shares of the newest batch by rank."""
        self._taken: set[int] = set(range(1, num_ranks))
        """Ranks that have taken their share of the newest batch."""
        self._state = NOTHING_ASKED
        self._lost: RankLostError | None = None
        self._asking: list[tuple[bytes, int, str, int, int]] = []
        """(address, ticket, client, number, deadline in ns) of each call that waits for a batch."""
        self._answers: deque[tuple[bytes, FromEngine]] = deque()
        self._workers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="inflight-ranks")
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="inflight-server", daemon=True)
        self._thread.start()

    # ---- calls of rank 0 ------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise RankLostError if a rank is known to be lost."""
        if self._lost is not None:
            raise self._lost

    def shares(self, batches: Iterator[PackedBatch], stream: RolloutStream) -> Iterator[PackedBatch]:
        """Yield rank 0's share of each batch, and keep the shares of the other ranks for them. Ends on all ranks at
        once. Raises RankLostError, and the errors of `batches`, which the other ranks raise too."""
        while True:
            self._wait_until_taken()
            try:
                with self._condition:
                    self._state = WAITS_FOR_ROLLOUTS
                batch = next(batches, None)
                if batch is None:
                    self._offer("end")
                    self._wait_until_taken()
                    return
                news = {"last_reward": stream.last_reward, "dropped": stream.dropped}
                own, *others = split(batch, self._num_ranks, **news)
                encoded = {rank: encode_share(share) for rank, share in enumerate(others, start=1)}
                batch = own.batch() if others else batch
            except BaseException as error:
                kind = type(error).__name__
                self._offer("error", error=(kind, f"rank 0 could not make the batch: {kind}: {error}"))
                raise
            self._offer("share", encoded)
            yield batch

    def close(self) -> None:
        """Stop answering. Waiting calls get a RankLostError. Safe to call twice."""
        with self._condition:
            if self._closing:
                return
            self._lose(RankLostError("rank 0 has closed its engine"))
            self._closing = True  # from here on the thread is not woken
        self._thread.join()
        self._workers.shutdown(wait=False, cancel_futures=True)
        for client in self._clients.values():
            if client.process is not None:
                client.process.close()
        self._release()

    def _open(self, outside: Outside) -> tuple[str, bytes]:
        """Listen for ranks on other machines. Returns the endpoint and the public key."""
        public, secret = zmq.curve_keypair()
        self._listener = listener = TcpListener(secret, outside.lets_in, self._context)
        try:
            number = str(socket.getaddrinfo(outside.address, 0, type=socket.SOCK_STREAM)[0][4][0])
            wanted = f"tcp://[{number}]:*" if ":" in number else f"tcp://{number}:*"
            if not ip_address(number.partition("%")[0]).is_loopback or number == outside.address:
                return self._socket.listen(lambda bound: listener.open(bound, wanted)), public
            # On Debian a machine's name resolves to 127.0.1.1 on that machine, and to another number elsewhere.
            bound = self._socket.listen(lambda bound: listener.open(bound, "tcp://*:*"))
            return f"tcp://{outside.address}:{bound.rpartition(':')[2]}", public
        except OSError as error:
            self._release()
            raise ListenError(
                f"rank 0 cannot listen for ranks on other machines on {outside.address!r}, its MASTER_ADDR: {error}"
            ) from error

    def _release(self) -> None:
        """Close the sockets, and remove the directory."""
        self._socket.close()
        if self._listener is not None:
            self._listener.close()
        if self._context is not None:
            self._context.term()
        shutil.rmtree(self._directory, ignore_errors=True)
        os.close(self._lock_file)

    def _offer(
        self,
        kind: Literal["share", "end", "error"],
        shares: dict[int, bytes] | None = None,
        error: tuple[str, str] = ("", ""),
    ) -> None:
        with self._condition:
            self._number += 1
            self._kind, self._shares, self._error = kind, shares or {}, error
            self._taken = set()
            self._state = NOTHING_ASKED
            self._wake()

    def _wait_until_taken(self) -> None:
        """Return when every rank has taken the newest batch. Raises RankLostError."""
        wait = Wait()
        with self._condition:
            while missing := set(range(1, self._num_ranks)) - self._taken:
                here = {client.rank for client in self._clients.values() if not client.left}
                gone = {client.rank for client in self._clients.values() if client.left} - here
                named = f"rank {', '.join(map(str, sorted(missing)))}"
                if self._kind == "end" and missing <= gone:  # closed ranks need no end
                    break
                if missing & gone:
                    self._lose(RankLostError(f"{named} has closed its engine, and rank 0 goes on with batches"))
                elif wait.waited_s > self._timeout_s:
                    self._lose(
                        RankLostError(
                            f"{named} has not taken its share of batch {self._number} within {self._timeout_s:g} s "
                            f"(launch with rank_timeout_s for another bound){_why_absent(missing - here)}"
                        )
                    )
                self.check()
                wait.tick()
                wait.tell(f"{named} has not taken its share of batch {self._number}{_why_absent(missing - here)}")
                self._condition.wait(_CHECK_S)
        self.check()

    def _lose(self, error: RankLostError) -> None:
        with self._condition:
            self._lost = self._lost or error
            self._condition.notify_all()
            self._wake()

    def _wake(self) -> None:
        with self._condition:
            if not self._closing:
                self._socket.wake()

    # ---- calls of the other ranks ---------------------------------------------------------------------------------

    @verb()
    def join(self, client: str, rank: int, pid: int, host: str) -> Joined:
        """Attach a process. It begins with the newest batch if its rank's share of that batch was not taken, else with
        the next one. host: its machine, as `this_host` names it; "" for one that sees neither files nor processes of
        this one."""
        with self._condition:
            if not 0 < rank < self._num_ranks:
                raise ProtocolError(f"rank {rank} cannot attach: the trainer has ranks 0 to {self._num_ranks - 1}")
            others = [other for other in self._clients.values() if other.rank == rank and not other.left]
            if others:
                raise ProtocolError(f"rank {rank} is attached already, as {others[0].name}")
            is_here = host == this_host()
            name = f"process {pid}" if is_here else f"process {pid} of another machine"
            self._clients[client] = _Client(rank, name, Process(pid) if is_here else None, self._caller)
            return Joined(self._number if rank not in self._taken else self._number + 1)

    @verb()
    def leave(self, client: str) -> None:
        """Note that a process takes no further batches."""
        with self._condition:
            self._client(client).left = True
            self._condition.notify_all()

    @verb()
    def read(self, client: str, at: int) -> bytes:
        """Return a part of the share that the client is reading."""
        with self._condition:
            return self._client(client).data[at : at + _PART_BYTES]

    @verb()
    def taken(self, client: str, number: int) -> None:
        """Note that the client has received the offered batch, end or error."""
        with self._condition:
            known = self._client(client)
            known.data = b""
            if number == self._number:
                self._taken.add(known.rank)
                self._shares.pop(known.rank, None)
            self._condition.notify_all()

    @verb()
    def submit(self, prompts: list[Prompt]) -> list[int]:
        return self._submit(prompts)

    @verb()
    def status(self) -> Status:
        return self._status()

    @verb()
    def first_version(self, index: int) -> int | None:
        return self._first_version(index)

    def _client(self, name: str) -> _Client:
        if name not in self._clients:
            raise ProtocolError("this process has not joined")
        self._clients[name].address = self._caller
        return self._clients[name]

    # ---- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            closing = self._closing
            self._socket.wait(0 if closing else int(_CHECK_S * 1000))
            while (received := self._socket.receive()) is not None:
                self._take_call(*received)
            self._look_for_the_dead()
            self._answer_those_who_ask()
            while self._answers:
                self._socket.send(*self._answers.popleft())
            if closing:  # waiting calls have been answered
                return

    def _take_call(self, sender: bytes, parts: list[bytes]) -> None:
        self._caller = sender
        try:
            [data] = parts
            call = decode_to_engine(data)
            if not isinstance(call, Call):
                raise ProtocolError(f"rank 0 takes calls, got {type(call).__name__}")
        except (InflightError, ValueError) as error:  # a message of one part is expected
            self._refuse(sender, 0, error)
            return
        if call.verb in ("submit", "status"):  # these wait for the engine
            self._workers.submit(self._answer, sender, call).add_done_callback(lambda _: self._wake())
        else:
            self._answer(sender, call)

    def _answer(self, sender: bytes, call: Call) -> None:
        try:
            if call.verb == "take":
                asked = read(_TAKE, call.arguments)
                self._client(asked.client)
                with self._condition:
                    now = now_ns()
                    self._asking.append((sender, call.ticket, asked.client, asked.number, now + self._ask_again_ns))
            else:
                self._answers.append((sender, self._verbs.answer(call)))
        except Exception as error:  # an invalid message of one process must not stop the answers to others
            self._refuse(sender, call.ticket, error)

    def _refuse(self, sender: bytes, ticket: int, error: Exception) -> None:
        told = error if isinstance(error, InflightError) else InflightError(f"rank 0 failed: {error!r}")
        self._answers.append((sender, self._socket.refusal(ticket, told)))

    def _look_for_the_dead(self) -> None:
        looks = now_ns() - self._looked_ns > _LOOK_EVERY_NS
        self._looked_ns = now_ns() if looks else self._looked_ns
        with self._condition:
            for client in self._clients.values():
                if client.process is None:
                    ended = looks and not client.left and self._is_gone(client)
                else:
                    ended = client.process.ended
                if not ended:
                    continue
                if not client.left:
                    self._lose(RankLostError(f"rank {client.rank} ({client.name}) has ended"))
                client.left = True

    def _is_gone(self, client: _Client) -> bool:
        """Return True if a process of another machine could not be reached for a while, and has not called. When a
        process ends, its machine closes the connection. After a broken connection the process connects again with its
        next call, from another address."""
        if self._socket.reaches(client.address):
            client.missed_ns = 0
            return False
        client.missed_ns = client.missed_ns or now_ns()
        return now_ns() - client.missed_ns > _GONE_NS

    def _answer_those_who_ask(self) -> None:
        now = now_ns()
        with self._condition:
            still: list[tuple[bytes, int, str, int, int]] = []
            for asking in self._asking:
                sender, ticket, name, number, deadline_ns = asking
                client = self._clients.get(name)
                if client is None:
                    continue
                offer = self._offer_to(client, number)
                if offer.kind == "nothing yet" and self._lost is not None:
                    self._refuse(sender, ticket, self._lost)
                elif offer.kind == "nothing yet" and now < deadline_ns:
                    still.append(asking)
                else:
                    self._answers.append((sender, Result(ticket=ticket, value=to_raw(offer, "an offer"))))
            self._asking = still

    def _offer_to(self, client: _Client, number: int) -> Offer:
        there = self._number == number
        if there and self._kind != "share":
            return Offer(self._number, self._kind, error=self._error)
        if not there or client.rank not in self._shares:
            return Offer(self._number, "nothing yet", state=self._state)
        client.data = self._shares[client.rank]
        return Offer(self._number, "share", nbytes=len(client.data))


def _why_absent(ranks: set[int]) -> str:
    if not ranks:
        return ""
    return (
        f"; rank {', '.join(map(str, sorted(ranks)))} has not attached: every rank calls inflight.launch(), unless "
        "rank 0 keeps its batches to itself with inflight.Engine(inflight.EngineOptions(…))"
    )
