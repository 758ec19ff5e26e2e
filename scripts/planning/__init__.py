"""`horovod-topk plan` against steps that were measured on emulated hosts."""
