"""A client that does not import trueroll. The program shows what a client in another language needs: only ZMQ and
MessagePack (docs/protocol.md).

`python examples/raw_client.py ADDRESS` asks a running worker for four samples of one prompt.
"""

import struct
import sys
import uuid

import msgpack
import zmq

TIMEOUT_MS = 30_000


def send(socket, type, **fields):
    socket.send(msgpack.packb({"version": 1, "type": type, **fields}))


def receive(socket):
    if not socket.poll(TIMEOUT_MS):
        sys.exit(f"no answer within {TIMEOUT_MS / 1000:.0f} s")
    reply = msgpack.unpackb(socket.recv())
    if reply["type"] == "error":
        sys.exit(f"{reply['code']}: {reply['message']}")
    return reply


def elements(data, format):
    return struct.unpack(f"<{len(data) // 4}{format}", data)


context = zmq.Context()
socket = context.socket(zmq.DEALER)
socket.connect(sys.argv[1])

send(socket, "health", id=uuid.uuid4().hex)
health = receive(socket)
print("worker:", health["state"], health["engine"] and health["engine"]["model"])

request_id = uuid.uuid4().hex
prompt = [1, 2, 3]
send(
    socket,
    "generate",
    id=request_id,
    prompt_token_ids=struct.pack(f"<{len(prompt)}i", *prompt),
    params={"n": 4, "max_tokens": 16, "temperature": 1.0, "seed": 7},
)
while (reply := receive(socket))["type"] == "sample":
    tokens, logprobs = elements(reply["token_ids"], "i"), elements(reply["logprobs"], "f")
    print("sample", reply["index"], reply["finish_reason"], tokens, f"log-prob {sum(logprobs):.3f}")
print("done, seed", reply["params"]["seed"], reply["finish_reasons"])

send(socket, "ack", ids=[request_id])
socket.close()
context.term()  # blocks until the last message is sent
