"""Relays: a node that cannot be dialled holds a reservation at a relay, which forwards bytes that it cannot read."""
