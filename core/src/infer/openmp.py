"""Imports torch so that its OpenMP threads sleep between operations. To be imported before torch is.

After each operation on many values they would poll for the next one for milliseconds. A decode step has few such
operations, and the polling takes cores away from the kernels' threads.
"""

import os

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # is read when torch loads OpenMP
    import torch  # noqa: F401

    del os.environ["OMP_WAIT_POLICY"]  # other processes do not inherit it
