"""`python -m specrig`: what `./rig` hands over to."""

import contextlib
import sys

try:
    from specrig.cli import main

    code = main()
    with contextlib.suppress(OSError):
        sys.stdout.close()  # all is written, or it was told that it cannot be: Python would say so once more
except KeyboardInterrupt:  # the imports take a while
    code = 130
raise SystemExit(code)
