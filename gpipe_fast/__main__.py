"""``python -m gpipe_fast``: the command ``gpipe-fast``."""

import sys

from gpipe_fast.command import main

if __name__ == "__main__":
    sys.exit(main())
