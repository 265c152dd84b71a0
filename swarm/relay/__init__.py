"""Connections to nodes that cannot be dialled: they hold places at relays, which pass on sealed bytes."""
