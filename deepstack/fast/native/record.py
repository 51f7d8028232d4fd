"""The record of one operation in the table that the C++ kernels read, `Op` of table.h."""

import struct
from collections.abc import Sequence

ADDRESSES, INTEGERS, CONSTANTS = 8, 30, 4
RECORD = struct.Struct(f"=ii{ADDRESSES}Q{INTEGERS}i{CONSTANTS}d")
LARGEST = 2**31 - 1


def pack_record(
    kind: int,
    dimensions: int,
    addresses: Sequence[int],
    integers: Sequence[int],
    constants: Sequence[float],
) -> bytes:
    """Return a record; missing values are 0."""
    return RECORD.pack(
        kind,
        dimensions,
        *addresses,
        *(0,) * (ADDRESSES - len(addresses)),
        *integers,
        *(0,) * (INTEGERS - len(integers)),
        *constants,
        *(0.0,) * (CONSTANTS - len(constants)),
    )
