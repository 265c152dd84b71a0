"""Further environments: app calls, dialogue, small programs, nim, notes."""
