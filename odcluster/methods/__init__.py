"""Room 4, learning: one file, one method."""
