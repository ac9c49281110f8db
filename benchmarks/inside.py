"""The two ends of a measurement, started inside the nodes by benchmarks/links.py.

python -m benchmarks.inside echo                       answers every datagram, until killed
python -m benchmarks.inside ping A,B,... COUNT EVERY_S   round trips in ms, as JSON
python -m benchmarks.inside count                      different datagrams before end
python -m benchmarks.inside flood ADDRESS COUNT EVERY_S
python -m benchmarks.inside receive SKIP_S             Mbit/s of a TCP stream after its start
python -m benchmarks.inside send ADDRESS SECONDS
"""

from __future__ import annotations

import json
import socket
import sys
import time

UDP_PORT, TCP_PORT = 5001, 5002
LOST_AFTER_S = 0.5


def echo() -> None:
    with _listening() as sock:
        while True:
            data, sender = sock.recvfrom(2048)
            sock.sendto(data, sender)


def ping(addresses: str, count: str, every_s: str) -> None:
    """Print a list of round trips per address; null for packets that did not come back."""
    found = [_round_trips(address, int(count), float(every_s)) for address in addresses.split(",")]
    print(json.dumps(found))


def _round_trips(address: str, count: int, every_s: float) -> list[float | None]:
    found: list[float | None] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(LOST_AFTER_S)
        sock.connect((address, UDP_PORT))
        for number in range(count + 1):
            began_s = time.perf_counter()
            try:
                sock.send(b"%d" % number)
                while int(sock.recv(2048)) != number:
                    pass  # an earlier packet that was given up
                found.append((time.perf_counter() - began_s) * 1e3)
            except (TimeoutError, ConnectionError):
                found.append(None)
            time.sleep(every_s)
    return found[1:]  # without the first one, which finds cold caches


def count() -> None:
    seen: set[bytes] = set()
    with _listening() as sock:
        while (data := sock.recv(2048)) != b"end":
            seen.add(data)
    print(json.dumps(len(seen)))


def flood(address: str, number: str, every_s: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for packet in range(int(number)):
            sock.sendto(b"%d" % packet, (address, UDP_PORT))
            if packet % 10 == 9:
                time.sleep(10 * float(every_s))
        for _ in range(50):
            sock.sendto(b"end", (address, UDP_PORT))
            time.sleep(0.01)


def receive(skip_s: str) -> None:
    buffer = bytearray(1 << 20)
    total, marks = 0, []
    with socket.create_server(("0.0.0.0", TCP_PORT)) as server:
        print(flush=True)
        connection, _ = server.accept()
        while got := connection.recv_into(buffer):
            total += got
            marks.append((time.perf_counter(), total))
    (last_s, last) = marks[-1]
    began_s, began = next(m for m in marks if m[0] >= marks[0][0] + float(skip_s))
    print(json.dumps((last - began) * 8e-6 / (last_s - began_s)))


def send(address: str, seconds: str) -> None:
    data = bytes(1 << 18)
    with socket.create_connection((address, TCP_PORT)) as connection:
        until = time.perf_counter() + float(seconds)
        while time.perf_counter() < until:
            connection.sendall(data)


def _listening() -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    sock.bind(("0.0.0.0", UDP_PORT))
    print(flush=True)  # the other end may begin
    return sock


ENDS = {end.__name__: end for end in (echo, ping, count, flood, receive, send)}

if __name__ == "__main__":
    ENDS[sys.argv[1]](*sys.argv[2:])
