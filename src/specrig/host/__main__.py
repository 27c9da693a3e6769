"""`python -m specrig.host`, and the zipapp's first module."""

from specrig.host.cli import main

raise SystemExit(main())
