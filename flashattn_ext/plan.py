"""``python -m flashattn_ext.plan --seqlen-q 1 --kv-len 8192 …``: see ``--help``.

Exit code 0; 2 for a call that would raise, or a picture that cannot be drawn.
"""

import sys
from types import ModuleType
from typing import cast

if __name__ == "__main__":
    try:
        from ._plan_options import main
    except ImportError as error:
        sys.exit(f"flashattn_ext.plan needs PyTorch, which does not import here: {error}")
    sys.exit(main())

from .planning import plan

# `flashattn_ext.plan` is the function and stays it when somebody imports the module of that name:
# what stands here is what the import system binds in the package.
sys.modules[__name__] = cast(ModuleType, plan)
