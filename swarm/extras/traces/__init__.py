"""Conversion of episodes to and from the formats of other trainers."""
