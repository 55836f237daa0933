"""`python -m fastclip`: the same as the `fastclip` command."""

import sys

from fastclip.cli import main

if __name__ == "__main__":
    sys.exit(main())
