"""What ``msa doctor`` looks at: this machine, or a cluster, one finding for each thing."""
