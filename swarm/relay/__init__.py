"""Relays: nodes that cannot be dialled hold a reservation at one, which forwards bytes that it cannot read."""
