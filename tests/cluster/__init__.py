"""Hosts for tests: network namespaces on one machine, see `hosts.py`; an object store in some of them, `store.py`."""
