"""Attacks on an HTTP front end by plain sockets. Each attack uses its own connections.

An attack returns how it ended: the status of an answer, `closed` if the front end closed the connection without an
answer, or `left` if the attack disconnected. An attack disconnects after at most `Target.patience` seconds.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

COMPLETIONS, CHAT, GENERATE, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/tokenize"
MEBIBYTE = 2**20
PIECE = 2**16
RECEIVE_BUFFER = 4096
"""Size of the kernel's buffer for a client that does not read, in bytes."""


@dataclass(frozen=True)
class Target:
    """A front end that listens on loopback.

    `key`: a valid key. `patience`: seconds after which an attack disconnects. `scale`: factor on the size of bodies and
    texts; 1.0 is the largest.
    """

    port: int
    key: str
    patience: float
    scale: float

    def size(self, most: int) -> int:
        """Return the size to send: `most` times `scale`, at least 1."""
        return max(1, round(most * self.scale))


class Attacker:
    """One connection, closed at the end of the context. `number`: selects the variant of an attack."""

    def __init__(self, target: Target, number: int) -> None:
        self.target, self.number = target, number

    async def __aenter__(self) -> Attacker:
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.target.port))
            self.reader, self.writer = await asyncio.open_connection(sock=sock, limit=PIECE)
        except OSError:
            sock.close()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        self.writer.transport.abort()

    async def send(self, data: bytes) -> None:
        """Write all data. Raise ConnectionError if the front end has closed the connection."""
        for start in range(0, len(data), PIECE):
            self.writer.write(data[start : start + PIECE])
            await self.writer.drain()
            if self.reader.at_eof():
                raise ConnectionResetError

    async def head(self, path: str, *headers: str, key: bool = True) -> None:
        """Send the head of a request."""
        own = [f"Authorization: Bearer {self.target.key}"] if key else []
        names = [header.partition(":")[0] for header in headers]
        host = [] if "Host" in names else ["Host: localhost"]
        await self.send("\r\n".join([f"POST {path} HTTP/1.1", *host, *own, *headers, "", ""]).encode())

    async def body(self, path: str, body: bytes) -> None:
        """Send a whole request."""
        await self.head(path, f"Content-Length: {len(body)}")
        await self.send(body)

    async def status(self) -> str:
        """Return the status of the front end's answer, or `closed`."""
        line = await self.reader.readline()
        return line.split()[1].decode() if line.startswith(b"HTTP/1.1 ") else "closed"

    async def refused_while(self, sending: Awaitable[None]) -> str:
        """Send data and return the status of the answer. The answer may arrive before all data is sent."""
        task = asyncio.ensure_future(sending)
        try:
            return await self.status()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def chunks_of_strangers(attacker: Attacker) -> str:
    """Send an endless body without a key, one byte per chunk."""
    await attacker.head(COMPLETIONS, "Transfer-Encoding: chunked", key=False)
    return await attacker.refused_while(_one_byte_chunks(attacker))


async def chunks(attacker: Attacker) -> str:
    """Send an endless body with a key, one byte per chunk."""
    await attacker.head(COMPLETIONS, "Transfer-Encoding: chunked")
    return await attacker.refused_while(_one_byte_chunks(attacker))


async def trailers(attacker: Attacker) -> str:
    """Send endless trailers after a body."""
    await attacker.head(COMPLETIONS, "Transfer-Encoding: chunked")
    await attacker.send(b"2\r\n{}\r\n0\r\n")
    return await attacker.refused_while(_for_ever(attacker, b"X-Trailer: y\r\n"))


async def silent(attacker: Attacker) -> str:
    """Open a connection and send nothing."""
    return await attacker.status()


async def half_a_head(attacker: Attacker) -> str:
    """Send a head slowly and never finish it."""
    await attacker.send(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
    return await attacker.refused_while(_for_ever(attacker, b"X-A: b\r\n", pause=0.5))


async def never_reads(attacker: Attacker) -> str:
    """Do not read an answer of several megabytes. The request costs the worker no time, so good requests are not slowed
    down.
    """
    wanted = dict(prompt="x y" * 100_000, return_token_strs=True)
    await attacker.body(TOKENIZE, json.dumps(wanted).encode())
    attacker.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await asyncio.sleep(attacker.target.patience)
    return "left"


async def huge_answer(attacker: Attacker) -> str:
    """Request an answer of hundreds of megabytes."""
    wanted = dict(prompt=[1, 2], n=128, max_tokens=4000, logprobs=64, return_token_ids=True, ignore_eos=True)
    await attacker.body(COMPLETIONS, json.dumps(wanted).encode())
    return await attacker.status()


async def small_elements(attacker: Attacker) -> str:
    """Send a body of millions of elements: prompts, token ids, sampling parameters or messages."""
    count = attacker.target.size(2 * MEBIBYTE)
    kind = attacker.number % 4
    path = (COMPLETIONS, GENERATE, GENERATE, CHAT)[kind]
    body = (
        b'{"prompt": [' + b"[1]," * count + b"[1]]}",
        b'{"token_ids": [' + b"1," * 2 * count + b'1], "sampling_params": {}}',
        b'{"token_ids": [1], "sampling_params": {' + b",".join(b'"a%x":1' % i for i in range(count // 4)) + b"}}",
        b'{"messages": [' + b"{}," * 2 * count + b"{}]}",
    )[kind]
    await attacker.body(path, body)
    return await attacker.status()


async def unfinished_body(attacker: Attacker) -> str:
    """Send most of a large body, then nothing for a long time."""
    size = attacker.target.size(12 * MEBIBYTE)
    await attacker.head(COMPLETIONS, f"Content-Length: {size}")
    await attacker.send(b" " * (size - 1000))
    return await attacker.refused_while(_for_ever(attacker, b" ", pause=1.0))


async def long_text(attacker: Attacker) -> str:
    """Send a text of millions of characters and disconnect at once."""
    text = "x y" * attacker.target.size(4 * MEBIBYTE // 3)
    await attacker.body(TOKENIZE if attacker.number % 2 else COMPLETIONS, json.dumps(dict(prompt=text)).encode())
    return "left"


async def long_conversation(attacker: Attacker) -> str:
    """Send a conversation of millions of characters."""
    messages = [{"role": "user", "content": "word " * attacker.target.size(400_000)}] * 4
    await attacker.body(CHAT, json.dumps(dict(messages=messages)).encode())
    return await attacker.status()


async def refused_conversation(attacker: Attacker) -> str:
    """Send a conversation that the chat template refuses."""
    await attacker.body(CHAT, json.dumps(dict(messages=[{"role": "user", "content": None}], max_tokens=1)).encode())
    return await attacker.status()


async def huge_head(attacker: Attacker) -> str:
    """Send headers of 32 MiB."""
    await attacker.send(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
    line = b"X-Header: " + b"y" * 4000 + b"\r\n"
    return await attacker.refused_while(_times(attacker, line, attacker.target.size(32 * MEBIBYTE) // len(line)))


async def strange_names(attacker: Attacker) -> str:
    """Send two content lengths for one body."""
    body = b'{"prompt": [1], "prompt": [2], "n": true}'
    await attacker.head(COMPLETIONS, f"Content-Length: {len(body)}", "Transfer-Encoding: chunked")
    await attacker.send(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
    return await attacker.status()


async def escape_codes(attacker: Attacker) -> str:
    """Send a name with terminal escape codes."""
    await attacker.body(COMPLETIONS, json.dumps({"prompt": [1], "model": "\x1b]0;owned\x07"}).encode())
    return await attacker.status()


Attack = Callable[[Attacker], Awaitable[str]]
ATTACKS: tuple[Attack, ...] = (
    *(chunks_of_strangers, chunks, trailers, silent, half_a_head, never_reads, huge_answer, small_elements),
    *(unfinished_body, long_text, long_conversation, refused_conversation, huge_head, strange_names, escape_codes),
)


async def run_attack(attack: Attack, target: Target, number: int) -> str:
    """Run an attack and return how it ended. `number`: see `Attacker`."""
    with suppress(OSError, asyncio.IncompleteReadError):
        async with Attacker(target, number) as attacker:
            try:
                async with asyncio.timeout(target.patience + 1):
                    return await attack(attacker)
            except TimeoutError:
                return "left"
            except ConnectionError:
                with suppress(ConnectionError):
                    return await attacker.status()
    return "closed"


async def _one_byte_chunks(attacker: Attacker) -> None:
    await _for_ever(attacker, b"1\r\n \r\n")


async def _for_ever(attacker: Attacker, data: bytes, pause: float = 0.0) -> None:
    while True:
        await attacker.send(data)
        await asyncio.sleep(pause)


async def _times(attacker: Attacker, data: bytes, count: int) -> None:
    for _ in range(count):
        await attacker.send(data)
