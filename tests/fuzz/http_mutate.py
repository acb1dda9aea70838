"""Mutations of HTTP requests: of the tree of a body, of the head, and of the bytes of both.

All randomness comes from the given `random.Random`, so a seed gives the same requests.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from fuzz.http_corpus import Request
from fuzz.trees import Pairs, Place, Raw, places, tree

MAX_BODY_BYTES = 2**18
"""Size limit of a mutated body in bytes. The limit of the attacked front end is lower."""
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 16, 17, 64, 65, 128, 129, 500, 512, 513, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1),
    *(2**63, 2**64, -(2**63), 10**30, 0.0, -0.0, 0.5, 1.0, 1e-46, 5e-324, 1e39, 1e308, 1e16),
    *("", " ", "x", "\0", "a\0b", "x" * 1025, "x" * 20_000, "\u202e", "é" * 300, "\U0001f600" * 100, "{{7*7}}", "../x"),
    *("auto", "none", "user", "text", "stream", "\x1b[2J", "<|im_end|>", "<tool_call>{}</tool_call>"),
    *([], {}, [[]], [None], [{}], {"": None}, {"role": "user"}, [1.0], [True], [-1], [10**30], ["a", 1], [[1], [2]]),
    *(Raw(b"NaN"), Raw(b"-Infinity"), Raw(b"1e999"), Raw(b"1" * 5000), Raw(b'"\\ud800"'), Raw(b'"\xff"'), Raw(b"01")),
    *(Raw(b""), Raw(b"'x'"), Raw(b"tru"), Raw(b'"\\x"'), Raw(b'"\n"'), Raw(b"[1,]"), Raw(b"\xef\xbb\xbf1"), Raw(b"//")),
)
KEYS = (
    *("n", "prompt", "messages", "stop", "stream", "logprobs", "tools", "seed", "token_ids", "best_of", "suffix"),
    *("", "x", "__class__", "é" * 300, "x" * 5000, "\0", "self", "model_config", "response_format", "logit_bias"),
)
DEPTHS = (1, 2, 10, 50, 100, 500, 1000, 5000, 50_000)


def encoded(node: Any) -> bytes:
    """Return the bytes of a tree as JSON."""
    if isinstance(node, Raw):
        return node.data
    if isinstance(node, Pairs):
        return b"{" + b",".join(json.dumps(key).encode() + b":" + encoded(value) for key, value in node) + b"}"
    if isinstance(node, list):
        return b"[" + b",".join(map(encoded, node)) + b"]"
    return json.dumps(node, ensure_ascii=False).encode(errors="surrogatepass")


def mutated_body(rng: random.Random, body: dict[str, Any], others: Sequence[dict[str, Any]]) -> bytes:
    """Return a body after one to four mutations of its tree. `others`: bodies to take parts from."""
    root = [tree(body)]
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        if found := places(root):
            rng.choice(_OPERATIONS)(rng, rng.choice(found), others)
    return b"".join(map(encoded, root))[:MAX_BODY_BYTES]


def _drop(rng: random.Random, place: Place, others: Sequence[dict[str, Any]]) -> None:
    del place.box[place.at]


def _double(rng: random.Random, place: Place, others: Sequence[dict[str, Any]]) -> None:
    place.box.insert(rng.randrange(len(place.box) + 1), place.box[place.at])


def _rename(rng: random.Random, place: Place, others: Sequence[dict[str, Any]]) -> None:
    if isinstance(place.box, Pairs):
        place.box[place.at] = [rng.choice(KEYS), place.value]


def _add(rng: random.Random, place: Place, others: Sequence[dict[str, Any]]) -> None:
    value = tree(rng.choice(VALUES))
    place.box.append([rng.choice(KEYS), value] if isinstance(place.box, Pairs) else value)


def _replace(rng: random.Random, place: Place, others: Sequence[dict[str, Any]]) -> None:
    place.put(tree(rng.choice(VALUES)))


def _nest(rng: random.Random, place: Place, others: Sequence[dict[str, Any]]) -> None:
    depth, (opening, closing) = rng.choice(DEPTHS), rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
    place.put(Raw(opening * depth + encoded(place.value) + closing * depth))


def _grow(rng: random.Random, place: Place, others: Sequence[dict[str, Any]]) -> None:
    """Repeat the value many times."""
    count = int(10 ** rng.uniform(0, 5 if rng.random() < 0.05 else 3))
    one = encoded(place.value)
    count = min(count, MAX_BODY_BYTES // (len(one) + 1))
    if isinstance(place.value, str):
        place.put(place.value * count)
    elif isinstance(place.value, Pairs):
        place.value.extend([f"k{number}", None] for number in range(min(count, 5000)))
    else:
        place.put(Raw(b"[" + b",".join([one] * count) + b"]"))


def _swap(rng: random.Random, place: Place, others: Sequence[dict[str, Any]]) -> None:
    if found := places([tree(rng.choice(others))]):
        place.put(rng.choice(found).value)


_OPERATIONS: tuple[Callable[[random.Random, Place, Sequence[dict[str, Any]]], None], ...] = (
    *(_replace,) * 6,
    *(_drop, _double, _rename, _add, _add, _nest, _grow, _swap),
)


def framed(request: Request, body: bytes | None) -> bytes:
    """Return a whole request with a head that gives the length of its body."""
    head = f"{request.method} {request.target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    return head.encode() + (b"\r\n" if body is None else b"Content-Length: %d\r\n\r\n" % len(body) + body)


def plain_body(request: Request) -> bytes | None:
    """Return the unchanged body."""
    return None if request.body is None else json.dumps(request.body).encode()


def hostile_head(rng: random.Random, request: Request, body: bytes) -> bytes:
    """Return a request with a head or framing that is wrong, odd, or too large."""
    lines = [f"{request.method} {request.target} HTTP/1.1".encode(), b"Host: localhost", b"Connection: close"]
    length = b"Content-Length: %d" % len(body)
    if rng.random() < 0.3:
        return _first_line(rng, request) + b"\r\n" + b"\r\n".join([*lines[1:], length]) + b"\r\n\r\n" + body
    if rng.random() < 0.3:
        return b"\r\n".join([*lines, b"Transfer-Encoding: chunked"]) + b"\r\n\r\n" + _chunks(rng, body)
    lines += [length]
    for _ in range(rng.choice((1, 1, 2, 3))):
        lines.insert(rng.randrange(1, len(lines) + 1), rng.choice(HEADERS))
    if rng.random() < 0.1:
        lines += [b"X-%d: y" % number for number in range(rng.choice((50, 200, 2000)))]
    return rng.choice((b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r")).join(lines) + b"\r\n\r\n" + body


HEADERS = (
    *(b"Content-Length: 0", b"Content-Length: 5", b"Content-Length: -1", b"Content-Length: +5", b"Content-Length: 0x5"),
    *(b"Content-Length: 99999999999999999999", b"Content-Length: 1000000", b"Content-Length: 5, 6", b"Content-Length:"),
    *(b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: identity"),
    *(b"Transfer-Encoding: chunked, chunked", b"Transfer-Encoding : chunked", b"Transfer-Encoding:\x0bchunked"),
    *(b"Host: evil.example", b"Host: x@127.0.0.1", b"Host: [::1].evil", b"Host: localhost:evil", b"Host:", b"Host"),
    *(b"Origin: http://evil.example", b"Origin: null", b"Expect: 100-continue", b"Expect: 200-maybe"),
    *(b"Connection: upgrade", b"Upgrade: websocket", b"Upgrade: h2c", b"Connection: keep-alive, close, x"),
    *(b"Content-Encoding: gzip", b"Content-Type: text/plain", b"Content-Type: application/json; charset=utf-7"),
    *(b"Authorization: Bearer", b"Authorization: Bearer " + b"x" * 5000, b"Authorization: \xff\xfe"),
    *(b" folded", b"\tfolded", b": no name", b"no colon", b"a b: c", b"x:\x00", b"x: \x1b[2J", b"\xff: x", b"x: \xff"),
    *(b"X: " + b"y" * 60_000, b"X: " + b"y" * 70_000, b"y" * 2000 + b": x", b"Cookie: " + b"a=b; " * 500, b"", b"\r"),
    *(b"Accept: application/openmetrics-text", b"Accept-Encoding: br", b"Range: bytes=0-1", b"Date: yesterday"),
)


def _first_line(rng: random.Random, request: Request) -> bytes:
    target, method = request.target.encode(), request.method.encode()
    method = rng.choice(
        (method, method, b"GET", b"PUT", b"HEAD", b"CONNECT", b"TRACE", b"x" * 300, b"p\x00st", b"", b"PRI")
    )
    end = b"?a=" + b"b" * rng.choice((1, 100, 70_000))
    absolute, strange = b"http://evil.example" + target, b"\xff\xfe\x00 \t"
    targets = (target, target + end, target + b"#x", target + b"/", b"/" + target, absolute, b"*", b"", b"/..", b"/a b")
    version = rng.choice(
        (b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/9.9", b"http/1.1", b"")
    )
    return rng.choice((b" ", b" ", b" ", b"  ", b"\t")).join([method, rng.choice((*targets, b"/" + strange)), version])


def _chunks(rng: random.Random, body: bytes) -> bytes:
    """Return a body in chunks, valid or invalid."""
    size = rng.choice((1, 7, 100, 10_000))
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    ext = rng.choice((b"", b"", b";a=b", b";" + b"x" * 300, b" "))
    told = [b"%x%s\r\n%s\r\n" % (len(part), ext, part) for part in parts]
    if rng.random() < 0.5 and told:
        bad = (
            b"zz\r\n",
            b"-1\r\n",
            b"ffffffffffffffff\r\n",
            b"%x\r\n" % (size + 3),
            b"0x5\r\n",
            b"\r\n",
            b"5\r\n",
            b"\n",
        )
        told[rng.randrange(len(told))] = rng.choice(bad)
    return b"".join(told) + rng.choice(
        (b"0\r\n\r\n", b"0\r\n\r\n", b"0\r\nX: y\r\n\r\n", b"0\r\nX: " + b"y" * 9000, b"")
    )
