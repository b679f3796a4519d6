"""Room 3, labels: k-means, the two memories, small clusters, agreement between labellings."""
