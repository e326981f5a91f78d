"""Context parallelism: one sequence over many ranks, moving only the keys that the pattern needs.

Queries, outputs and their gradients stay on their rank. :mod:`layout` says which rank owns which
token, :mod:`solver` chooses a layout, :mod:`commplan` says which keys go where and how many bytes
that is, :mod:`rankplan` what one rank computes before and after they arrive, :mod:`exchange` moves
them, and :mod:`attention` is the differentiable function of all this.
"""
