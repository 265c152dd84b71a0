"""Games and tools to learn on: app calls, dialogue, small programs, nim, notes."""
