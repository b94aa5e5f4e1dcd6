"""Prove that the brokers of docker-compose.ha.yml are one queue; exit 0, or 1 and what is wrong.

    BROKERS   URLs of two or more brokers, comma-separated; MESH_PORT is their mesh port (6633)
    BALANCER  URL of the load balancer before them

Standard library only: it runs in any image with a Python.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import queue
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from urllib.parse import urlsplit

# From `docker compose up`: PostgreSQL's first start, the schema, and the brokers' dialling.
READY_SECONDS = float(os.environ.get("READY_SECONDS", "120"))
# For what a running cluster does at once.
PROMPT_SECONDS = 20.0
# For an end of a connection that a broker refuses.
REFUSAL_SECONDS = 3.0
# A parked pop looks by itself at least every second; a hint that arrives is faster than that.
WAKE_SECONDS = 0.5
POP_TIMEOUT_MS = 30_000
ANSWER_SECONDS = 40.0

STATS = "/internal/api/shared-state/stats"


class Failed(Exception):
    """What isn't as it should be, in a sentence."""


def call(url: str, path: str, body: object = None) -> tuple[int, object]:
    """GET, or POST with a body; the status and the decoded answer (None without one)."""
    request = urllib.request.Request(  # noqa: S310 - the URLs are ours
        url + path,
        data=None if body is None else json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as response:  # noqa: S310
            status, answer = response.status, response.read()
    except urllib.error.HTTPError as error:
        status, answer = error.code, error.read()
    try:
        return status, json.loads(answer) if answer else None
    except ValueError:
        return status, answer.decode(errors="replace")


def expect(url: str, path: str, body: object = None, *, status: int = 200):
    """As `call`, for the answer alone; raises `Failed` for another status."""
    found, answer = call(url, path, body)
    if found != status:
        raise Failed(f"{url}{path} answered {found}, not {status}: {answer}")
    return answer


def wait(what: str, seconds: float, condition) -> None:
    """Poll until `condition()` is true; a connection refused in the meantime is just not yet."""
    until = time.monotonic() + seconds
    last = ""
    while time.monotonic() < until:
        try:
            if condition():
                return
        except (OSError, Failed) as error:
            last = f" ({error})"
        time.sleep(0.1)
    raise Failed(f"after {seconds:g} s still waiting for: {what}{last}")


def push(url: str, name: str, payload: object) -> None:
    items = [{"queue": name, "payload": payload, "partition": "p"}]
    [result] = expect(url, "/api/v1/push", {"items": items}, status=201)
    if result["status"] != "queued":
        raise Failed(f"a push to {url} was {result['status']}")


def pop(url: str, name: str, *, wait_ms: int = 0):
    """The one message of a pop, or None."""
    query = f"?wait={'true' if wait_ms else 'false'}&timeout={wait_ms or 1}&batch=1"
    status, answer = call(url, f"/api/v1/pop/queue/{name}{query}")
    if status == 204:
        return None
    if status != 200:
        raise Failed(f"a pop from {url} answered {status}: {answer}")
    return answer["messages"][0]


def ack(url: str, message) -> None:
    body = {key: message[key] for key in ("transactionId", "partitionId", "leaseId")}
    [result] = expect(url, "/api/v1/ack", {**body, "status": "completed"})
    if not result["success"]:
        raise Failed(f"an ack to {url} failed: {result}")


def check_health(brokers: list[str], balancer: str) -> str:
    for url in brokers:
        wait(f"{url}/health", READY_SECONDS, lambda url=url: call(url, "/health")[0] == 200)
    wait("the balancer", READY_SECONDS, lambda: call(balancer, "/health")[0] == 200)
    return f"{len(brokers)} brokers and the balancer are healthy"


def check_mesh(brokers: list[str]) -> str:
    """Every broker has its own link up to every other: both directions of each pair."""

    def is_up(source: str, target: str) -> bool:
        host = urlsplit(target).hostname
        stats = expect(source, STATS)
        return any(p["host"] == host and p["connected"] for p in stats.get("peers", ()))

    pairs = [(a, b) for a in brokers for b in brokers if a != b]
    for source, target in pairs:
        wait(f"a link {source} to {target}", READY_SECONDS, lambda s=source, t=target: is_up(s, t))
    return f"the mesh is up in all {len(pairs)} directions"


def check_authentication(brokers: list[str], port: int) -> str:
    """auth=hmac: a HELLO signed with another secret is refused, and counted."""
    for url in brokers:
        before = expect(url, STATS)["handshake_failures"]
        nonce = os.urandom(16).hex()
        mac = hmac.new(b"not the secret", nonce.encode(), hashlib.sha256).hexdigest()
        hello = json.dumps({"server_id": "runner", "nonce": nonce, "mac": mac}).encode()
        host = urlsplit(url).hostname
        with socket.create_connection((host, port), timeout=REFUSAL_SECONDS) as link:
            link.sendall((1 + len(hello)).to_bytes(4, "big") + b"\x04" + hello)
            try:
                refused = link.recv(1) == b""
            except ConnectionResetError:
                refused = True
            except TimeoutError:
                refused = False
        if not refused or expect(url, STATS)["handshake_failures"] <= before:
            raise Failed(f"the mesh of {url} is open: it took a HELLO with a wrong MAC")
    return "auth=hmac on every broker"


def check_wake(brokers: list[str], name: str) -> str:
    """A push on the first wakes a pop that is parked on the second."""
    first, second = brokers[:2]
    took = []
    for number in range(5):
        received = expect(second, STATS)["messages_received"]
        answers: queue.Queue = queue.Queue()

        def parked(answers: queue.Queue = answers) -> None:
            try:
                answers.put(pop(second, name, wait_ms=POP_TIMEOUT_MS))
            except Exception as error:  # carried to the thread that waits for it
                answers.put(error)

        threading.Thread(target=parked, daemon=True).start()
        wait(
            f"a pop to park on {second}",
            PROMPT_SECONDS,
            lambda: expect(second, "/metrics")["wakeups"]["parked"] > 0,
        )
        started = time.monotonic()
        push(first, name, number)
        message = answers.get(timeout=ANSWER_SECONDS)
        took.append(time.monotonic() - started)
        if isinstance(message, Exception):
            raise message
        if message is None or message["data"] != number:
            raise Failed(f"the parked pop got {message}, not {number}")
        if expect(second, STATS)["messages_received"] <= received:
            raise Failed(f"no frame of the mesh reached {second}")
        ack(second, message)
    median = sorted(took)[len(took) // 2]
    if median > WAKE_SECONDS:
        raise Failed(f"parked pops were woken after {median * 1000:.0f} ms: hints don't arrive")
    return f"a push on one broker wakes a pop on another in {median * 1000:.1f} ms"


def check_ack_across(brokers: list[str], name: str) -> str:
    """A lease of one broker is acked at every other one."""
    for source in brokers:
        for target in brokers:
            push(source, name, "lease")
            message = pop(source, name)
            if message is None:
                raise Failed(f"{source} didn't see its own push")
            ack(target, message)
            if pop(target, name) is not None:
                raise Failed(f"a message acked at {target} came again")
    return "a lease is good on every broker"


def check_balancer(balancer: str, name: str) -> str:
    for number in range(20):
        push(balancer, name, number)
        message = pop(balancer, name)
        if message is None or message["data"] != number:
            raise Failed(f"through the balancer came {message}, not {number}")
        ack(balancer, message)
    for path in (STATS, STATS.replace("/i", "/%69", 1)):
        expect(balancer, path, status=403)
    return "the balancer serves clients and denies /internal/"


def main() -> int:
    brokers = os.environ["BROKERS"].split(",")
    balancer = os.environ["BALANCER"]
    name = f"runner-{os.urandom(4).hex()}"
    checks = [
        lambda: check_health(brokers, balancer),
        lambda: check_mesh(brokers),
        lambda: check_authentication(brokers, int(os.environ.get("MESH_PORT", "6633"))),
        lambda: check_wake(brokers, f"{name}-wake"),
        lambda: check_ack_across(brokers, f"{name}-ack"),
        lambda: check_balancer(balancer, f"{name}-balancer"),
    ]
    for check in checks:
        try:
            print("ok:", check(), flush=True)
        except (Failed, OSError) as error:
            print("FAILED:", error, file=sys.stderr, flush=True)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
