"""Measurements that print ratios against a floor or a peer; `python -m benchmarks.exchange` and so on."""
