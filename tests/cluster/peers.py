"""Two programs that talk: `peers.py WAY` listens, `peers.py WAY ADDRESS AMOUNT` sends to it.

The listener prints how many seconds a stream took, or how many datagrams came.
"""

from __future__ import annotations

import socket
import sys
import time

PORT = 5001
SILENCE = 1.0  # seconds after which no more datagrams are expected
PACE = 0.001  # seconds between groups of them: the listener's buffer is small


def listen_to_stream() -> float:
    with socket.create_server(("", PORT)) as server:
        print("listening", flush=True)
        connection, _ = server.accept()
        with connection:
            began = 0.0
            while connection.recv(1 << 16):
                began = began or time.perf_counter()
            return time.perf_counter() - began


def stream(address: str, amount: int) -> None:
    with socket.create_connection((address, PORT)) as connection:
        connection.sendall(bytes(amount))


def listen_to_datagrams() -> int:
    with socket.socket(type=socket.SOCK_DGRAM) as server:
        server.bind(("", PORT))
        print("listening", flush=True)
        received = 0
        while True:
            server.settimeout(SILENCE if received else None)
            try:
                server.recv(100)
            except TimeoutError:
                return received
            received += 1


def datagrams(address: str, amount: int) -> None:
    with socket.socket(type=socket.SOCK_DGRAM) as client:
        for number in range(amount):
            client.sendto(b"one", (address, PORT))
            if number % 20 == 19:
                time.sleep(PACE)


if __name__ == "__main__":
    way, *rest = sys.argv[1:]
    if rest:
        (stream if way == "stream" else datagrams)(rest[0], int(rest[1]))
    else:
        print(listen_to_stream() if way == "stream" else listen_to_datagrams())
