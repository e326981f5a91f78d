"""The control plane: one file describes a run; this plans, launches and watches it."""
