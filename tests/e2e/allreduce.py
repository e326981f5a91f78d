"""Run as a Ray job: one task per worker pod, and a gloo all-reduce between them."""

import os
import sys
from typing import Any

import ray


@ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
class Rank:
    def address(self) -> tuple[str, int]:
        import socket

        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return host, probe.getsockname()[1]

    def reduce(self, rank: int, world: int, host: str, port: int) -> tuple[float, str]:
        import torch
        import torch.distributed as dist

        os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
        dist.init_process_group("gloo", rank=rank, world_size=world)
        value = torch.full((1024,), float(rank + 1))
        dist.all_reduce(value)
        dist.destroy_process_group()
        return value.mean().item(), os.environ["HOSTNAME"]


def main(world: int) -> None:
    ray.init()
    actor: Any = Rank  # the decorator's types describe the class that it was given
    ranks = [actor.remote() for _ in range(world)]
    host, port = ray.get(ranks[0].address.remote())
    results = ray.get(
        [rank.reduce.remote(index, world, host, port) for index, rank in enumerate(ranks)]
    )
    pods = {pod for _, pod in results}
    assert [value for value, _ in results] == [world * (world + 1) / 2] * world, results
    assert len(pods) == world, f"ranks shared a pod: {pods}"
    print(f"all-reduce of {world} ranks on {len(pods)} pods: {results[0][0]}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
