"""Connections to nodes that cannot be dialled: they hold reservations at relays, which pass on sealed bytes."""
