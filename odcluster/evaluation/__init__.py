"""Room 6, how good: features, probes, neighbours."""
