"""Models and tokenizers: their source, loading, published tensors and version digest.

Invariant: importing this package, `source` or `tokenizer` never imports torch.
"""
