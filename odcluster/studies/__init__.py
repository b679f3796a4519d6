"""Room 8: the paper's tables and figures, as plans that `odcluster reproduce` carries out."""
