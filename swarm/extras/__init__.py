"""Extras: packages beside the core and its operation, which are loaded by name when a user asks for them.

Invariant: no other package imports from here; `swarm.plugins.EXTRAS` is the closed table of what can be loaded.
"""
