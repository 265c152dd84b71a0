"""Serving of a node's policy, or of any model, over the HTTP interface of OpenAI and vLLM."""
