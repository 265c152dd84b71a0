"""Parts of recipes, a package for each kind, a file for each family.

Invariant: a part imports from `swarm.learn` and its own kind only; recipes combine them.
"""
