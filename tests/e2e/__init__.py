"""A real Kubernetes on one machine; docs/test-cluster.md explains it."""
