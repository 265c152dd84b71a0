"""Policy versions as bytes: full files, lossless patches, chunks and signed manifests.

A trainer publishes (`publish`), an engine verifies (`verify`) and loads (`apply`), `store` keeps chunks and manifests
on disk. The codec, from the outside in: `codec` (full file, patch or adapters), `delta` (a patch of a whole version),
`segment` (the changes of consecutive pieces), `exponent_classes` (which weights are coded together), `ulp_delta` (by
how much they changed), `streams` (zstd and bit packing).

Invariant: but for `store`, which is files, nothing here talks to a network or a disk.
"""
