"""Python API: train, callbacks, a run as a source of rollouts. The package `swarm` offers the names."""
