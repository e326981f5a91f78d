"""The control plane's loop: what is observed, what is decided from it, what is rendered."""
