"""Scale a fleet from 1 + 1 to 3 + 3 actors and back under load, kill three of them, and print a table.

Ray gets two nodes on this machine: one for prefill and one for decode, or with `--pack` one for both.
"""

import asyncio
import itertools
import sys
import time

import ray
from ray.cluster_utils import Cluster

from examples.ray.fleet import Fleet

CLIENTS, STEP = 6, 60  # clients with one request at a time; requests from one step to the next
HEADS = ("prefill", "decode", "served", "failed", "retried", "kills")


class Load:
    """A steady load, and what became of it."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.seeds = itertools.count()
        self.num_bytes = self.num_served = self.failed = self.kills = 0
        self.served: asyncio.Queue[int] = asyncio.Queue()
        self.started = time.monotonic()

    async def make_requests(self) -> None:
        """Make one request after another."""
        for seed in self.seeds:
            try:
                self.num_bytes += await self.fleet.serve_request(seed, 1 + seed * 37 % 256)
                self.num_served += 1
            except Exception as error:  # noqa: BLE001 - counted
                self.failed += 1
                print(f"request {seed} failed: {error}", file=sys.stderr)
            self.served.put_nowait(seed)

    async def print_row(self, step: str) -> None:
        """Wait for some more requests, and print the state."""
        for _ in range(self.served.qsize() + STEP):
            await self.served.get()
        ready = [len(names) for names in self.fleet.ready.values()]
        row = (*ready, self.num_served, self.failed, self.fleet.retried.total(), self.kills)
        print(f"{time.monotonic() - self.started:6.1f} {step:30}", *(f"{value:8}" for value in row), flush=True)


async def run_check(*, pack: bool) -> int:
    """Return the exit code: 0 if nothing failed, nothing was retried but for a kill, and all was placed as asked."""
    fleet = Fleet()
    await asyncio.gather(fleet.add_server("prefill-0"), fleet.add_server("decode-0"))
    load = Load(fleet)
    print(f"{'s':>6} {'step':30}", *(f"{head:>8}" for head in HEADS))
    clients = [asyncio.create_task(load.make_requests()) for _ in range(CLIENTS)]
    await load.print_row("start")
    for name in ("prefill-1", "decode-1", "prefill-2", "decode-2"):
        await fleet.add_server(name)
        await load.print_row(f"add {name}")
    has_failed = fleet.retried.total() > 0
    for name in ("prefill-0", "decode-0"):
        load.kills += 1
        ray.kill(ray.get_actor(name), no_restart=False)
        await load.print_row(f"kill {name}, Ray restarts it")
    load.kills += 1
    fleet.ready["prefill"].remove("prefill-1")
    ray.kill(ray.get_actor("prefill-1"))
    await fleet.add_server("prefill-1")
    await load.print_row("kill and replace prefill-1")
    num_retried = fleet.retried.total()
    for name in ("prefill-1", "decode-1", "prefill-0", "decode-0"):
        await fleet.remove_server(name)
        await load.print_row(f"drain {name}")
    for client in clients:
        client.cancel()
    late = fleet.retried.total() - fleet.retried["RankDraining"] - num_retried  # after the last kill
    has_failed |= load.failed > 0 or late > 0 or not num_retried
    is_packed = fleet.nodes["prefill"] == fleet.nodes["decode"]
    print(f"{load.num_bytes / 1e6:.0f} MB compared; retried because of {dict(fleet.retried)}; one node: {is_packed}")
    return int(has_failed or is_packed is not pack)


def main() -> int:
    """Run the check on a cluster of its own."""
    pack = "--pack" in sys.argv
    offers = [{"prefill": 3, "decode": 3}, {}] if pack else [{"prefill": 3}, {"decode": 3}]
    cluster = Cluster(initialize_head=True, connect=True, head_node_args={"num_cpus": 1, "resources": offers[0]})
    cluster.add_node(num_cpus=1, resources=offers[1])
    try:
        return asyncio.run(run_check(pack=pack))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main())
