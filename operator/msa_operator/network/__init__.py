"""What may reach what: policies as Kubernetes reads them, and the connections that a run needs."""
