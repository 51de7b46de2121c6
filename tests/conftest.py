"""One thread for torch in every test: the tensors are small, so more threads only wait for each other, and spawned ranks share the
cores anyway. It also fixes the bits: a matrix product on two threads may sum in another order than on one."""
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402  (reads OMP_NUM_THREADS once, when it is imported)

torch.set_num_threads(1)
