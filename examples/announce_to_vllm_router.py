"""Announce a vLLM server to `vllm-router --vllm-discovery-address` every second, as long as it is healthy.

Run it beside the server: `python examples/announce_to_vllm_router.py prefill 10.0.0.1:8001 10.0.0.9:30001`. It needs
pyzmq and msgspec, which kvflow needs, too.
"""

import argparse
import http.client
import time
import urllib.request

import msgspec
import zmq

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("role", choices=["prefill", "decode"])
parser.add_argument("server", help="host and port under which the router reaches the server")
parser.add_argument("router", help="host and port of --vllm-discovery-address")
options = parser.parse_args()


def is_healthy() -> bool:
    """Ask as a router would. With kvflow's middleware, a server whose rank drains says no."""
    try:
        with urllib.request.urlopen(f"http://{options.server}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):
        return False


kind = {"prefill": "P", "decode": "D"}[options.role]
message = msgspec.msgpack.encode({"type": kind, "http_address": options.server, "zmq_address": options.server})
dealer = zmq.Context().socket(zmq.DEALER)
dealer.sndhwm = 1  # an announcement that was not sent in time is worth nothing
dealer.connect(f"tcp://{options.router}")
while True:
    if is_healthy():
        try:
            dealer.send(message, zmq.DONTWAIT)
        except zmq.Again:
            print("the router does not listen")
    time.sleep(1.0)
