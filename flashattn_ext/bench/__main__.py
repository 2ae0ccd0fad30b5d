"""``python -m flashattn_ext.bench SUITE …``: see ``--help`` and benchmarks/README.md.

Exit code 0; 1 if flashattn_ext failed or a comparison did; 2 for a command line that cannot be
served, a missing GPU among them.
"""

import sys

try:
    import torch  # noqa: F401
except ImportError as error:
    sys.exit(f"flashattn_ext.bench needs PyTorch, which does not import here: {error}")

from .run import main

if __name__ == "__main__":
    sys.exit(main())
