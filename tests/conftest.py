"""Before anything imports torch."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:  # one thread for each of the processes that run side by side
    os.environ.setdefault("OMP_NUM_THREADS", "1")
