"""Extras: what stands beside the core and its operation, and is loaded by name where a user asks for it.

Invariant: no other package imports from here; `swarm.plugins.EXTRAS` is the closed table of what can be loaded.
"""
