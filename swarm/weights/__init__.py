"""Policy versions as bytes: full files, lossless patches, chunks and signed manifests.

A trainer publishes (`publish`), an engine verifies and loads (`apply`), `store` keeps chunks and manifests on disk, and
`patch_graph` finds the cheapest chain of patches (its invariants are stated there). The codec from the outside in:
`codec` (full file, patch or adapters), `delta` (a whole patch), `segment` (the changes of consecutive pieces),
`exponent_classes` (weights that are coded together), `ulp_delta` (sizes of changes), `payload` (chunks and streams).

Invariant: only `store` touches a disk, and nothing here touches a network.
"""
