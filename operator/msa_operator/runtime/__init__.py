"""What makes the pure core run: clients, cache, queue, lease, and the loop over one job."""
