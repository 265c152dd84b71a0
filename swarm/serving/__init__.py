"""A node's policy, or any model, behind the HTTP interface that OpenAI's clients and vLLM's speak."""
