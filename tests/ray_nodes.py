"""A Ray cluster of two nodes on one machine, by Ray's own utility."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray.cluster_utils import Cluster


@contextmanager
def two_nodes(cpus: int) -> Iterator[str]:
    """Its address; each node has so many cores. Both are stopped at the end."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus, "include_dashboard": False})
    nodes.add_node(num_cpus=cpus)
    nodes.wait_for_nodes()
    yield nodes.address
    ray.shutdown()
    nodes.shutdown()
