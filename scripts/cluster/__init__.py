"""A cluster on one machine: hosts are namespaces, joined by a network.

    with Cluster(4, Link.of("1gbit"), slots=2) as cluster:
        cluster.run(["horovodrun", "--gloo", "python", "train.py"], limit_seconds=300)

Every host has a name (`host1` and on), an address, processes, a link and an sshd of its own, and
shares the files of this machine. Needs root, and nothing but Python's standard library and the
programs in `cluster.needs`.
"""

from cluster.host import Host
from cluster.lab import Cluster
from cluster.link import Link
from cluster.needs import ClusterError, missing

__all__ = ["Cluster", "ClusterError", "Host", "Link", "missing"]
