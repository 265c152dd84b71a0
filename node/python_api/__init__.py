"""Python API: training, callbacks, and a run as a source of rollouts. The package `swarm` exports the names."""
