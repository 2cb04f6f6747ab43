"""`python -m ptq` is `ptq`."""

from __future__ import annotations

import sys

from ptq.cli.main import main

sys.exit(main())
