"""Exchanges: how payloads cross the network. One file each, over the protocol in protocol.py.

`core.exchange.selection` makes the exchange that a setting names.
"""
