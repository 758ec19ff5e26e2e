"""`horovod-topk plan` against what a cluster of namespaces measures."""
