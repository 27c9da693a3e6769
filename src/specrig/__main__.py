"""`python -m specrig`: what `./rig` hands over to."""

from specrig.cli import main

raise SystemExit(main())
