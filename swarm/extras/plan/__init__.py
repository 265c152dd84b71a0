"""Capacity of a swarm, and memory of a node on a GPU, by arithmetic."""
