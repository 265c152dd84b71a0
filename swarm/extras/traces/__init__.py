"""Episodes in the forms of other trainers, out and in."""
