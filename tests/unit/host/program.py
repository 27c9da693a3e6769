"""The interpreter that runs the host program in tests; SPECRIG_HOST_PYTHON names an older one."""

import os
import sys

PYTHON = os.environ.get("SPECRIG_HOST_PYTHON", sys.executable)
