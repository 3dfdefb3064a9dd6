# SPDX-License-Identifier: Apache-2.0
"""Frames arrive whole and in order, whatever the socket does to them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import TypeAlias

import anyio
import msgspec
import pytest

from actorsnap.runtime.link import Link


class Small(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    number: int


class Large(msgspec.Struct, frozen=True, array_like=True, tag="l"):
    data: bytes


Frame: TypeAlias = Small | Large
Pair: TypeAlias = tuple[Link[Frame, Frame], Link[Frame, Frame]]


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def linked(sockets: tuple[socket.socket, socket.socket]) -> Pair:
    """To be made on a loop."""
    return Link(sockets[0], Frame), Link(sockets[1], Frame)


async def test_frames_of_any_size_arrive_in_their_order(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    one, other = linked(sockets)
    # The large ones are more than a socket takes at a time.
    frames: list[Frame] = [Small(1), Large(bytes(range(256)) * 20_000), Small(2), Large(b"")]
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one.flush_forever)
            for frame in frames:
                one.send(frame)
            assert [await other.receive() for _ in frames] == frames
            one.send(Small(3))  # behind a pause
            assert await other.receive() == Small(3)
            tasks.cancel_scope.cancel()
    assert one.sent_frames == other.received_frames == len(frames) + 1
    assert one.sent_bytes == other.received_bytes


async def test_frames_come_in_pieces_of_a_byte(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    _, other = linked(sockets)
    encoded = msgspec.msgpack.encode(Small(7))
    data = len(encoded).to_bytes(4, "big") + encoded
    received: list[Frame | None] = []

    async def receive() -> None:
        received.append(await other.receive())

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(receive)
            for at in range(len(data)):
                assert received == []
                sockets[0].send(data[at : at + 1])
                await anyio.wait_all_tasks_blocked()
    assert received == [Small(7)]


@pytest.mark.parametrize("how", ["closed", "shut"])
async def test_an_end_that_is_gone_is_heard(
    sockets: tuple[socket.socket, socket.socket], how: str
) -> None:
    one, other = linked(sockets)
    with anyio.fail_after(60):
        other.send(Small(1))
        assert await other.flush()
        if how == "closed":
            other.close()
        else:
            other.shut()
        assert await one.receive() == Small(1)  # what was said before counts
        assert await one.receive() is None
        one.send(Small(2))
        assert not await one.flush()
        await one.flush_forever()  # returns


async def test_what_is_no_frame_is_an_error(sockets: tuple[socket.socket, socket.socket]) -> None:
    _, other = linked(sockets)
    sockets[0].send((3).to_bytes(4, "big") + b"\xc1\xc1\xc1")
    with anyio.fail_after(60), pytest.raises(ValueError, match="msgpack|valid|malformed"):
        await other.receive()
