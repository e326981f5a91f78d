"""``python -m msa_operator`` is the ``msa`` command."""

from msa_operator.cli import main

main()
