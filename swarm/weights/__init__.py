"""Policy versions on the wire: published tensors as full files, lossless patches, chunks and signed manifests.

`publish` makes a manifest and chunks of a version, `stage` a verified copy from them; both are in `publish`.
`publisher` does the first for every version of a trainer, `apply` the second for an engine; `store` keeps the chunks.

Invariant: but for `store`, which is files, nothing here talks to a network or a disk.
"""
