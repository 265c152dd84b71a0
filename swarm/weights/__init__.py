"""Policy versions on the wire: published tensors as full files, lossless patches, chunks and signed manifests.

Invariant: pure functions over bytes and arrays; nothing here talks to a network, a disk or an engine.

`publish` makes a manifest and chunks of a version, `stage` a verified copy from them; both are in `publish`.
"""
