"""Devices of a cluster, their links, and the time of messages and collectives on them.

`cluster` has devices, links and process groups, `collective` the time of a collective.
"""
