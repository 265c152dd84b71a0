"""The model that a node trained, in the hands of its user: to export, to evaluate, to talk to."""
