"""The model that a node trained, for its user: export, evaluation, chat, samples."""
