from __future__ import annotations

import os

# Before torch is imported: stages compute with one thread here, and what they compute is compared bit by bit with plain loops.
os.environ["OMP_NUM_THREADS"] = "1"
