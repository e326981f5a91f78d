"""What a worker runs: data, model, training loop, checkpoints and context parallelism."""
