"""Flash-MSA: exact attention in which the sparse pattern is applied inside the tiling loop."""
