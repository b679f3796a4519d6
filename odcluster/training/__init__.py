"""Room 5, the loop: time, optimiser, signals and disk."""
