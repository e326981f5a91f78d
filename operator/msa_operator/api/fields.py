"""Kinds of leaves that several parts of a job share."""

from __future__ import annotations

from typing import Annotated

from msa_operator.api import values
from msa_operator.api.schema import Bool, Int, Text

Switch = Annotated[bool, Bool()]
Duration = Annotated[
    str, Text(32, values.DURATION, values.DURATION_HELP, values.nearest_duration, shortest=2)
]
Quantity = Annotated[
    str, Text(24, values.QUANTITY, values.QUANTITY_HELP, values.nearest_quantity, shortest=1)
]
Degree = Annotated[int, Int(1, 1 << 15)]
ObjectName = Annotated[
    str,
    Text(253, values.SUBDOMAIN, "a Kubernetes object name (lower case, digits, '-' and '.')",
         lambda found: values.nearest_name(found, 253), shortest=1),
]  # fmt: skip
