"""A server for the tinker SDK, alone or as a node."""
