"""The arrays that block managers compute with."""

import numpy as np

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
Ints64 = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Bools = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
Slots = Ints64
