"""Kernels of a bucket of Top-K: an encode has four passes, a file each, and a decode has one."""
